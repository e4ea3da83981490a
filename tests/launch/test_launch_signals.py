# SPDX-License-Identifier: Apache-2.0
"""Signals at the launcher, and its sudden death."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from launching import HERE, REST, Workspace, alive
from processes import patience, wait_for

pytestmark = pytest.mark.multiprocess

SLEEPING = f"{HERE}\nhere()\n{REST}\n"
SAVING = f"""{HERE}
def save(number, frame):
    print("saved", number, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
here()
{REST}
"""


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_every_rank_and_is_the_exit_status(workspace: Workspace, n: int, number: int) -> None:
    launcher = workspace.start("launch", "--nproc-per-node", str(n), workspace.write(SAVING))
    pids = workspace.pids(n)
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=patience(5))
    assert launcher.returncode == 128 + number
    assert out.count(f"saved {number}") == n
    assert err == f"accel: stopped by {signal.Signals(number).name}\n"
    assert not any(map(alive, pids))


@pytest.mark.parametrize("n", [1, 2])
def test_an_interrupt_tells_where_the_ranks_were_without_tracebacks(workspace: Workspace, n: int) -> None:
    script = workspace.write(SLEEPING)
    line = SLEEPING.count("\n")
    launcher = workspace.start("launch", "--nproc-per-node", str(n), script)
    workspace.pids(n)
    time.sleep(0.2)  # for what tells the test to return
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=patience(5))
    assert launcher.returncode == 130
    places = ", ".join(f"rank {rank} was at {script}:{line}" for rank in range(n))
    assert err == f"accel: stopped by SIGINT; {places}\n"


def test_a_stop_leaves_a_ranks_own_processes_to_the_rank_while_it_ends(workspace: Workspace) -> None:
    script = workspace.write(f"""{HERE}
if os.fork() == 0:
    here(f"child-{{rank}}")
    {REST}
def save(number, frame):
    time.sleep(0.5)
    print("child ended early" if os.waitpid(-1, os.WNOHANG)[0] else "child still there", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, save)
here()
{REST}
""")
    launcher = workspace.start("launch", "--nproc-per-node", "2", script)
    pids = workspace.pids(4)
    launcher.send_signal(signal.SIGTERM)
    out, _ = launcher.communicate(timeout=patience(5))
    assert launcher.returncode == 143
    assert out.count("child still there") == 2
    wait_for(lambda: not any(map(alive, pids)), seconds=5)


@pytest.mark.parametrize("n", [1, 2])
def test_a_second_signal_kills_at_once(workspace: Workspace, n: int) -> None:
    script = workspace.write(
        f"{HERE}\nsignal.signal(signal.SIGTERM, lambda *_: here(f'no-{{rank}}'))\nhere()\n{REST}\n"
    )
    launcher = workspace.start("launch", "--nproc-per-node", str(n), script)
    pids = workspace.pids(n)
    launcher.send_signal(signal.SIGTERM)
    workspace.pids(2 * n)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=patience(5))
    assert launcher.returncode == 143
    assert err.endswith(f"accel: killed because still running: rank {', '.join(map(str, range(n)))}\n")
    assert not any(map(alive, pids))


def test_a_failure_while_stopping_is_told_but_the_stop_is_the_status(workspace: Workspace) -> None:
    script = workspace.write(f"""{HERE}
def save(number, frame):
    if rank == 1:
        raise OSError(28, "No space left on device")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
here()
{REST}
""")
    launcher = workspace.start("launch", "--nproc-per-node", "2", script)
    workspace.pids(2)
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=patience(5))
    assert launcher.returncode == 143
    assert err.splitlines()[0] == "accel: stopped by SIGTERM; rank 1 was at " + f"{script}:{line_of(script, 'raise')}"
    assert err.splitlines()[1].startswith("accel: rank 1 failed: OSError: [Errno 28] No space left on device")
    assert err.endswith("OSError: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("n", [1, 2])
def test_a_killed_launcher_leaves_no_rank(workspace: Workspace, n: int) -> None:
    script = workspace.write(f"{HERE}\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nhere()\n{REST}\n")
    launcher = workspace.start("launch", "--nproc-per-node", str(n), script)
    pids = workspace.pids(n)
    assert all(map(alive, pids))
    launcher.kill()
    wait_for(lambda: not any(map(alive, pids)), seconds=5)


def line_of(script: Path, word: str) -> int:
    return next(number for number, line in enumerate(script.read_text().splitlines(), 1) if word in line)
