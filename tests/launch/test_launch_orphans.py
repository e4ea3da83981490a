# SPDX-License-Identifier: Apache-2.0
"""What ranks leave behind in sessions of their own ends with a failed launch, and outlives a good one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import HERE, REST, Workspace, alive
from processes import patience, wait_for

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans to another process than the first"),
]

LEFT = """import os, time
with open("partial", "w") as file:
    file.write(str(os.getpid()))
os.replace("partial", "pid-left")
time.sleep(60)
"""
LEAVING = f"""{HERE}
import subprocess
none = subprocess.DEVNULL
subprocess.Popen([sys.executable, "-c", {LEFT!r}], start_new_session=True, stdout=none, stderr=none)
while not os.path.exists("pid-left"):
    time.sleep(0.05)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("status", [3, 0])
def test_what_a_rank_leaves_behind_ends_with_a_failure_alone(workspace: Workspace, status: int) -> None:
    done = workspace.accel("launch", workspace.write(LEAVING), str(status))
    assert done.returncode == status
    [pid] = workspace.pids(1)
    assert alive(pid) == (status == 0)
    if status:
        assert f"accel: ended what ranks had left behind: {pid} (" in done.stderr
    else:
        assert done.stderr == ""
        os.kill(pid, signal.SIGKILL)


def test_a_launch_from_python_adopts_nothing(workspace: Workspace) -> None:
    script = workspace.write(LEAVING)
    call = f"import os; from accel.launching import run_launch; run_launch({str(script)!r}, ['3'], environ=os.environ)"
    _ = subprocess.run([sys.executable, "-c", call], cwd=workspace.folder, check=True, capture_output=True)
    [pid] = workspace.pids(1)
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)


IGNORING = """import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
time.sleep(60)
"""
STUBBORN = f"""
IGNORING = {IGNORING!r}
import os, signal, subprocess, sys, time
from accel.launching.local._signals import Orphans
orphans = Orphans(grace_s=0.3)
middle = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
own = subprocess.Popen(["sleep", "60"], start_new_session=True)
helper = subprocess.Popen(["sleep", "60"])
subprocess.run([sys.executable, "-c", middle, IGNORING], check=True)
time.sleep(0.5)
line = orphans.end([own.pid], lambda left_s: time.sleep(left_s) or False, sys.stderr.write)
assert own.poll() is None and helper.poll() is None
own.kill(), helper.kill()
print(line)
"""


def test_a_stubborn_process_is_killed_and_named_and_own_children_are_left_alone(workspace: Workspace) -> None:
    done = workspace.accel("launch", workspace.write(STUBBORN))
    pid, line = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert line.startswith(f"killed what ranks had left behind: {pid} (")
    assert not alive(int(pid))


def test_a_long_run_keeps_no_ended_orphans(workspace: Workspace) -> None:
    script = workspace.write(f"""{HERE}
import subprocess
code = "import subprocess; subprocess.Popen(['sleep', '0.2'], start_new_session=True)"
for _ in range(3):
    subprocess.run([sys.executable, "-c", code])
time.sleep(0.5)
here()
{REST}
""")
    launcher = workspace.start("launch", script)
    workspace.pids(1)

    def children() -> list[str]:
        found = []
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has ended
                state, parent, *_ = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                found += [state] if int(parent) == launcher.pid else []
        return found

    wait_for(lambda: "Z" not in children())
    assert len(children()) == 1
    launcher.send_signal(signal.SIGTERM)
    launcher.wait(patience(20))


IN_PROCESS = """
import ctypes, sys
from accel.cli import main

status = main(["launch", "--nproc-per-node", "1", sys.argv[1]])
adopts = ctypes.c_int(-1)
ctypes.CDLL(None).prctl(37, ctypes.byref(adopts), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
print("adopts", adopts.value, "status", status)
"""


def test_a_program_that_runs_the_command_within_itself_adopts_nothing_afterwards(workspace: Workspace) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_PROCESS, str(workspace.write("pass\n"))],
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=True,
    )
    assert "adopts 0 status 0" in done.stdout
