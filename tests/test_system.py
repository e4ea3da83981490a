# SPDX-License-Identifier: Apache-2.0
"""Helper programs: whatever they print, leave behind or wait for, they cost bounded memory and time."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from processes import patience, wait_for
from profiles import share

from accel.system import run_helper

ROOT = Path(__file__).parent.parent / "accel"
# long-lived children, which are supervised: ranks, agents, remote launchers
SUPERVISED = {
    "system.py",
    "launching/_launch.py",
    "launching/local/_children.py",
    "launching/hosts/_hosts.py",
    "launching/hosts/_hostfile.py",
}


def shell(text: str) -> list[str]:
    return ["sh", "-c", text]


@pytest.mark.parametrize(
    ("text", "stdin", "most_out", "status", "out", "err"),
    [
        ("exit 0", b"", 0, 0, b"", b""),
        ("exit 7", b"", 0, 7, b"", b""),
        ("kill -TERM $$", b"", 0, -signal.SIGTERM, b"", b""),
        ("echo said; echo wrong >&2; exit 3", b"", 100, 3, b"said\n", b"wrong\n"),
        ("cat", b"x" * 2_000_000, 3_000_000, 0, b"x" * 2_000_000, b""),  # more than pipes hold, both ways
        ("exec <&-; exit 0", b"x" * 2_000_000, 0, 0, b"", b""),
        ("exec >&- 2>&- <&-; sleep 0.1; exit 5", b"", 9, 5, b"", b""),
        ("sleep 40 >/dev/null & exit 4", b"", 9, 4, b"", b""),  # a child holds stderr
        ("head -c 100000 /dev/zero | tr '\\0' b >&2; echo end >&2", b"", 0, 0, b"", b"b" * 4092 + b"end\n"),
    ],
)
def test_a_helper_ends_with_its_process(
    text: str, stdin: bytes, most_out: int, status: int, out: bytes, err: bytes
) -> None:
    ended = run_helper(shell(text), limit_s=patience(20), stdin=stdin, most_out=most_out)
    assert (ended.status, ended.out, ended.err, ended.is_cut) == (status, out, err, False)


@pytest.mark.parametrize("text", ["yes >&2", "yes", "sleep 300", "trap '' TERM; sleep 300 & sleep 300"])
def test_a_helper_that_does_not_end_is_killed_with_all_it_has_started(tmp_path: Path, text: str) -> None:
    words = shell(f"echo $$ > {tmp_path}/pid; {text}; exit 0")
    began = time.monotonic()
    ended = run_helper(words, limit_s=0.3)
    assert ended.status is None
    assert len(ended.err) <= 4096
    assert time.monotonic() - began < patience(2)
    group = int((tmp_path / "pid").read_text())
    wait_for(lambda: not members(group))


def members(group: int) -> list[str]:
    """The processes of a session that run."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session, *_ = path.read_text(errors="replace").rpartition(")")[2].split()
        except (OSError, ValueError):
            continue
        if session == str(group) and state not in "ZX":
            found.append(path.parent.name)
    return found


def test_output_beyond_what_is_kept_ends_a_helper() -> None:
    ended = run_helper(["yes"], limit_s=patience(20), most_out=1000)
    assert (ended.out, ended.is_cut) == (b"y\n" * 500, True)


def test_an_endless_stderr_takes_little_memory_and_few_reads(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, resource\n"
        "from accel.system import run_helper\n"
        "read, sizes = os.read, []\n"
        "def counted(file, size):\n"
        "    sizes.append(len(found := read(file, size)))\n"
        "    return found\n"
        "os.read = counted\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert run_helper(['sh', '-c', 'yes >&2'], limit_s=0.5).status is None\n"
        "assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8_000, 'kB'\n"
        "assert sum(sizes) < 2**20 + 60 * 2**16  # slowly beyond the first MB: 50 pauses in 0.5 s\n"
    )
    assert subprocess.run([sys.executable, program], check=False, timeout=patience(60)).returncode == 0


@given(size=st.integers(0, 300_000), status=st.integers(0, 255))
@settings(max_examples=share(0.16), deadline=None)
def test_the_last_4_kb_are_kept(size: int, status: int) -> None:
    program = f"import os, sys; os.write(2, bytes(i % 251 for i in range({size}))); sys.exit({status})"
    ended = run_helper([sys.executable, "-S", "-c", program], limit_s=patience(20))
    written = bytes(i % 251 for i in range(size))
    assert ended.status == status
    assert ended.err == written[-4096:] or size > 65_536  # one write to a pipe may be cut short


def test_a_launcher_that_reaps_orphans_leaves_helpers_to_their_runner() -> None:
    """A helper leads a session of its own, as an orphan may; its status, and its time, are kept."""
    program = """
import threading, time
from accel.launching.local._signals import Orphans
from accel.system import Helpers, run_helper
words = ["sh", "-c", "sleep 0.3; exit 6"]
helpers = Helpers()
ends = []
with Orphans(helpers=helpers) as orphans:
    thread = threading.Thread(target=lambda: ends.append(run_helper(words, limit_s=20, helpers=helpers)))
    thread.start()
    while thread.is_alive():
        orphans.reap(())
        assert not orphans.end((), lambda s: bool(time.sleep(0.01)), print)
assert ends[0].status == 6, ends
with helpers.held() as left:
    assert not left
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=patience(60)).returncode == 0


def test_every_helper_program_is_started_by_one_runner() -> None:
    starts = re.compile(r"^\s*(import|from) subprocess\b|\bos\.(system|popen|spawn\w*|posix_spawn\w*)\(", re.MULTILINE)
    found = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if starts.search(path.read_text())}
    assert found == SUPERVISED


def test_an_interrupt_ends_a_helper_in_its_other_session(tmp_path: Path) -> None:
    text = f"read go; echo $$ > {tmp_path}/partial; mv {tmp_path}/partial {tmp_path}/pid; sleep 300"
    given = f"{['sh', '-c', text]!r}, limit_s=math.inf, stdin=b'go\\n'"  # which it gets once it is followed
    program = f"import math; from accel.system import run_helper; run_helper({given})"
    popen = subprocess.Popen(["env", "--default-signal", sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    wait_for((tmp_path / "pid").exists)
    popen.send_signal(signal.SIGINT)
    assert popen.wait(patience(10)) != 0
    wait_for(lambda: not members(int((tmp_path / "pid").read_text())))
