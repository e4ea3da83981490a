# SPDX-License-Identifier: Apache-2.0
"""Signals at the launcher, and its sudden death."""

from __future__ import annotations

import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from launching import HERE, REST, Workspace, alive
from processes import patience, wait_for

from accel.launching.local._signals import Guard, Signals
from accel.launching.local._worker import describe_failure
from accel.run_folder import read_launches

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
    time.sleep(patience(0.2))  # for what tells the test to return
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


@pytest.mark.parametrize(
    ("does", "number", "ends"),
    [
        ("reads nothing", signal.SIGTERM, True),
        ("reads nothing", signal.SIGCHLD, False),
        ("reads it and waits", signal.SIGTERM, False),
        ("reads it and goes on", signal.SIGTERM, False),
        ("reads it and is stuck", signal.SIGTERM, True),
        ("reads it and is stuck", signal.SIGCHLD, False),
    ],
)
def test_a_launcher_that_is_asked_to_stop_and_does_not_go_on_is_ended(does: str, number: int, ends: bool) -> None:
    source, sink = socket.socketpair()
    with source, sink:
        source.setblocking(False)
        signals, left, killed = Signals(source), threading.Event(), threading.Event()
        status: list[int] = []
        signals.abandon = killed.set
        guard = Guard(source, signals, lambda code: (status.append(code), left.set()), 0.3)
        guard.start()
        sink.send(bytes([number]))
        if does != "reads nothing":
            assert signals.stop(1.0) == (number if number == signal.SIGTERM else 0)
        if does == "reads it and waits":
            assert signals.wait(0.8) == 0
        for _ in range(16 if does == "reads it and goes on" else 0):
            assert signals.wait(0.0) == 0
            time.sleep(0.05)
        assert left.wait(patience(10) if ends else 0.0 if "and" in does and "stuck" not in does else 0.8) == ends
        guard.end()
        assert not guard.is_alive()
        assert (status, killed.is_set()) == (([128 + number], True) if ends else ([], False))


@pytest.mark.parametrize("restarts", [0, 3])
def test_a_stop_while_a_failed_run_is_ended_starts_nothing_again(workspace: Workspace, restarts: int) -> None:
    script = workspace.write(f"""{HERE}
signal.signal(signal.SIGTERM, signal.SIG_IGN)
here()
if rank == 0:
    raise RuntimeError("first")
{REST}
""")
    launcher = workspace.start("launch", "--nproc-per-node", "2", "--max-restarts", str(restarts), script)
    pids = workspace.pids(2)
    wait_for(lambda: not all(map(alive, pids)))
    time.sleep(patience(0.6))  # the other rank ignores SIGTERM, so it is being waited for
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=patience(10))
    assert "accel: rank 0 failed: RuntimeError: first" in err
    assert "start again" not in err
    assert ("accel: stopped by SIGTERM" in err) == bool(restarts)
    assert launcher.returncode == (128 + signal.SIGTERM if restarts else 1)


@pytest.mark.slow
def test_a_launcher_whose_output_nobody_reads_ends_when_it_is_asked_to(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # with it, a signal cuts a write short
    script = workspace.write(f"{HERE}\nhere()\nraise RuntimeError('line\\n' * 20_000)\n")  # more than a pipe holds
    launcher = workspace.start("launch", script)
    [pid] = workspace.pids(1)
    wait_for(lambda: not alive(pid))
    time.sleep(patience(1.0))  # for the report, at which the launcher blocks
    assert launcher.poll() is None
    asked_s = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(patience(10)) == 128 + signal.SIGTERM
    assert time.monotonic() - asked_s < patience(6)


@pytest.mark.nightly
def test_a_launcher_ends_ranks_whose_output_nobody_reads_when_it_is_asked_to(workspace: Workspace) -> None:
    launcher = workspace.start(
        "launch", "--nproc-per-node", "2", workspace.write(f"{HERE}\nhere()\nwhile True: print('x' * 999)")
    )
    pids = workspace.pids(2)
    time.sleep(patience(1.0))  # until the pipes are full
    asked_s = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(patience(10)) == 128 + signal.SIGTERM
    assert time.monotonic() - asked_s < patience(5)
    wait_for(lambda: not any(map(alive, pids)))


def test_a_long_word_in_an_exception_is_told_and_recorded_at_once(workspace: Workspace) -> None:
    script = workspace.write("raise RuntimeError('A' * 20_000)")
    done = workspace.accel("launch", "--nproc-per-node", "2", "--log-dir", "logs", script)
    assert done.returncode == 1
    assert "failed: RuntimeError: AAAA" in done.stderr
    assert read_launches(workspace.folder / "logs")[0].attempts[0].error.message == "A" * 20_000


def test_what_the_launcher_reads_of_a_message_is_bounded() -> None:
    record = describe_failure(0, RuntimeError("b" * 1_000_000))
    assert len(record.message) < 101_000
    assert len(record.traceback) < 101_000
