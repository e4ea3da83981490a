# SPDX-License-Identifier: Apache-2.0
"""Scripts on disk, and launchers around them as real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from processes import patience, wait_for

ACCEL = (sys.executable, "-m", "accel.cli")
FRESH = ("env", "--default-signal")  # a shell that runs the tests in the background lets them ignore SIGINT

_MISSED_BACKWARD = """
import os, sys, time, torch, accel
with accel.session(device="cpu", timeout_s={timeout_s}) as ctx:
    model = accel.prepare_model(ctx, torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    print("begins", flush=True)
    if ctx.rank == 1:
        {leaves}
    model(torch.ones(1, 2)).sum().backward()
"""


def missed_backward(leaves: str) -> str:
    """A script whose rank 1 does `leaves`, its second backward missing; where it exits nothing waits for the limit."""
    return _MISSED_BACKWARD.format(leaves=leaves, timeout_s=patience(30 if "exit" in leaves else 4))


class Workspace:
    """A folder with scripts, in which `accel` is run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def write(self, text: str, name: str = "script.py") -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def accel(self, *words: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run `accel` to its end."""
        return subprocess.run(
            [*ACCEL, *map(str, words)],
            cwd=self.folder,
            env=os.environ | environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=patience(60),
            check=False,
            errors="surrogateescape",
        )

    def start(self, *words: str | Path, within: Sequence[str] = FRESH) -> subprocess.Popen[str]:
        """Start `accel`, `within` another program, and come back at once."""
        popen = subprocess.Popen(
            [*within, *ACCEL, *map(str, words)],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(popen)
        return popen

    def pids(self, count: int) -> list[int]:
        """Wait until that many processes have written `pid-*` files; return what they hold."""
        wait_for(lambda: len(list(self.folder.glob("pid-*"))) == count)
        return [int(path.read_text()) for path in self.folder.glob("pid-*")]


# What a test script waits with: in short pieces, since python sees a signal that comes just before a sleep after it.
REST = "for _ in range(600): time.sleep(0.1)"

# What a test script begins with: `here(name)` tells the test that this process has come so far.
HERE = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def here(name=rank):
    with open(f"partial-{name}", "w") as file:
        file.write(str(os.getpid()))
    os.replace(f"partial-{name}", f"pid-{name}")
"""


def alive(pid: int) -> bool:
    """Tell whether a process runs; one that has ended and waits for its parent to look does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
