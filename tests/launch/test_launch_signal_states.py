# SPDX-License-Identifier: Apache-2.0
"""Each signal in each state of a launch, whatever mask, ignored signals and closed streams the launcher inherits."""

from __future__ import annotations

import itertools
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from launching import ACCEL, FRESH, HERE, REST, Workspace, alive
from processes import free_port, patience, wait_for

from accel.launching.local import _signals
from accel.launching.local._signals import LOOK_S, listening
from accel.system import NOTICES, REPEATED, STOPPING

BOTH = (*STOPPING, *NOTICES)


@pytest.fixture
def inherits() -> Iterator[Callable[[int, str], object]]:
    """Let this process ignore or block a signal, for the test."""
    before = {number: signal.getsignal(number) for number in BOTH}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])

    def inherit(number: int, how: str) -> None:
        signal.signal(number, signal.SIG_IGN if how == "ignored" else signal.SIG_DFL)
        if how == "blocked":
            signal.pthread_sigmask(signal.SIG_BLOCK, [number])

    yield inherit
    for number, handler in before.items():
        signal.signal(number, signal.SIG_IGN)  # drops one that is pending
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.mark.parametrize("how", ["by default", "ignored", "blocked"])
@pytest.mark.parametrize("number", BOTH)
def test_a_launcher_hears_what_is_blocked_and_not_what_is_ignored(
    inherits: Callable[[int, str], object], number: int, how: str
) -> None:
    inherits(number, how)
    was = signal.getsignal(number), signal.pthread_sigmask(signal.SIG_BLOCK, [])
    if how == "blocked":
        signal.raise_signal(number)  # pending before the launcher listens
    with listening() as signals:
        if how != "blocked":
            signal.raise_signal(number)
        assert signals.wait(0.2) == (0 if how == "ignored" else number)
    assert (signal.getsignal(number), signal.pthread_sigmask(signal.SIG_BLOCK, [])) == was


@pytest.mark.parametrize(
    ("sent", "heard"),
    [
        *(([[number], [number]], [number, 0 if number in REPEATED else number]) for number in STOPPING),
        ([[signal.SIGHUP, signal.SIGHUP]], [signal.SIGHUP, 0]),
        ([[signal.SIGTERM], [signal.SIGINT]], [signal.SIGTERM, 0]),  # within 0.3 s
        ([[signal.SIGTERM], [], [signal.SIGINT]], [signal.SIGTERM, 0, signal.SIGINT]),
        ([[signal.SIGTERM], [], [signal.SIGHUP], [signal.SIGXCPU]], [signal.SIGTERM, 0, 0, 0]),
        ([[signal.SIGUSR1, signal.SIGUSR2]], [signal.SIGUSR1, signal.SIGUSR2, 0]),
        ([[signal.SIGUSR1, signal.SIGTERM]], [signal.SIGTERM, signal.SIGUSR1, 0]),
    ],
)
def test_repeats_by_the_system_are_no_second_request(
    monkeypatch: pytest.MonkeyPatch, sent: list[list[int]], heard: list[int]
) -> None:
    monkeypatch.setattr(_signals, "SAME_REQUEST_S", 60.0)
    with listening() as signals:
        found: list[int] = []
        for together in sent:
            if not together:
                monkeypatch.setattr(_signals, "SAME_REQUEST_S", 0.0)
            for number in together:
                signal.raise_signal(number)
            found.append(signals.wait(0.0))
        found += [signals.wait(0.0) for _ in heard[len(found) :]]
    assert found == heard


def test_every_wait_looks_at_the_children_in_time_though_their_signal_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[float] = []
    with listening() as signals:
        monkeypatch.setattr(_signals, "LOOK_S", 0.05)
        monkeypatch.setattr(
            select, "select", lambda *words: (times.append(words[3]), ([], [], []))[1]
        )  # no signal ever comes
        assert [signals.wait(), signals.wait(1e9), signals.wait(0.01)] == [0, 0, 0]
        monkeypatch.undo()
    assert times == [0.05, 0.05, 0.01]
    assert LOOK_S == 5.0


SAVING = f"""{HERE}
def save(number, frame):
    print("saved", number, flush=True)
    here(f"saved-{{rank}}-{{number}}")
    sys.exit(0)
for number in {[*map(int, STOPPING)]}:
    signal.signal(number, save)
"""
NOTING = f"""
for number in {[*map(int, NOTICES)]}:
    signal.signal(number, lambda number, _: here(f"note-{{rank}}-{{number}}"))
"""
WAITING = f"{SAVING}{NOTING}here()\n{REST}\n"
FAILING = f"""{SAVING}signal.signal(signal.SIGTERM, signal.SIG_IGN)
here()
if rank == 0:
    raise RuntimeError("first")
{REST}
"""


def saved(workspace: Workspace, number: int, ranks: int) -> bool:
    return len(list(workspace.folder.glob(f"pid-saved-*-{number}"))) == ranks


def launched(
    workspace: Workspace, *flags: str, within: Sequence[str] = FRESH, text: str = WAITING
) -> tuple[subprocess.Popen[str], list[int]]:
    launcher = workspace.start("launch", "--cpu", "--nproc-per-node", "2", *flags, workspace.write(text), within=within)
    return launcher, workspace.pids(2)


def ends(workspace: Workspace, launcher: subprocess.Popen[str], number: int) -> str:
    _, err = launcher.communicate(timeout=patience(10))
    assert launcher.returncode == 128 + number, err
    assert f"accel: stopped by {signal.Signals(number).name}" in err
    assert not any(alive(int(path.read_text())) for path in workspace.folder.glob("pid-*"))
    return err


def reads(launcher: subprocess.Popen[str], begins: str) -> str:
    """Wait until the launcher has printed such a line; return it."""
    assert launcher.stderr is not None
    return next(line for line in launcher.stderr if line.startswith(begins))


def as_it_starts(workspace: Workspace, number: int) -> None:
    """Before the script has set a handler."""
    text = f"{HERE}\nhere()\n{REST}\n"
    launcher, _ = launched(workspace, text=text)
    launcher.send_signal(number)
    ends(workspace, launcher, number)


def as_it_runs(workspace: Workspace, number: int) -> None:
    launcher, _ = launched(workspace)
    launcher.send_signal(number)
    ends(workspace, launcher, number)
    assert saved(workspace, number, 2)


def on_the_ranks_alone(workspace: Workspace, number: int) -> None:
    """As a scheduler that signals every process but the launcher; a script that ends well is no failure."""
    launcher, pids = launched(workspace)
    for pid in pids:
        os.kill(pid, number)
    launcher.communicate(timeout=patience(10))
    assert launcher.returncode == 0
    assert saved(workspace, number, 2)


def as_it_stops(workspace: Workspace, number: int) -> None:
    """A second request kills; a repeat by the system does not."""
    script = f"""{HERE}
def save(number, frame):
    here(f"saves-{{rank}}")
    time.sleep({patience(0.8)})
    here(f"saved-{{rank}}-{number}")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
for number in {[int(each) for each in STOPPING if each != signal.SIGTERM]}:
    signal.signal(number, signal.SIG_IGN)
here()
{REST}
"""
    launcher, _ = launched(workspace, text=script)
    launcher.send_signal(signal.SIGTERM)
    wait_for(lambda: len(list(workspace.folder.glob("pid-saves-*"))) == 2)
    time.sleep(0.3)  # later than one request takes to arrive twice
    launcher.send_signal(number)
    err = ends(workspace, launcher, signal.SIGTERM)
    assert ("killed because still running" in err) == (number not in REPEATED)
    assert saved(workspace, number, 2) == (number in REPEATED)


def before_it_starts_again(workspace: Workspace, number: int) -> None:
    launcher, pids = launched(workspace, "--max-restarts", "3", text=FAILING)
    wait_for(lambda: not all(map(alive, pids)))
    time.sleep(patience(0.6))  # the other rank ignores SIGTERM, so it is being waited for
    launcher.send_signal(number)
    err = ends(workspace, launcher, number)
    assert "rank 0 failed: RuntimeError: first" in err
    assert "start again" not in err


def as_it_waits_for_hosts(workspace: Workspace, number: int) -> None:
    where = ("--cpu", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    launcher = workspace.start("launch", *where, workspace.write(""), within=FRESH)
    if number % 2:
        reads(launcher, "accel: waiting for other hosts")
    else:  # its agent still imports torch
        wait_for(lambda: bool(Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()))
        launcher.send_signal(signal.SIGUSR1)  # a notice ends nothing
    launcher.send_signal(number)
    ends(workspace, launcher, number)


def as_it_waits_for_the_first_host(workspace: Workspace, number: int) -> None:
    where = ("--cpu", "--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", f"192.0.2.1:{free_port()}")
    launcher = workspace.start("launch", *where, workspace.write(""), within=FRESH)
    told = reads(launcher, "accel: ")
    launcher.send_signal(number)
    launcher.communicate(timeout=patience(10))
    if "the rendezvous endpoint does not answer" in told:
        pytest.skip("no route to other hosts")
    assert launcher.returncode == 128 + number


def as_it_runs_on_hosts(workspace: Workspace, number: int) -> None:
    where = ("--nnodes", "1:2", "--rdzv-last-call-s", "0.1", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    launcher, _ = launched(workspace, *where)
    launcher.send_signal(number)
    ends(workspace, launcher, number)
    assert saved(workspace, number, 2)


def as_a_function_runs(workspace: Workspace, number: int) -> None:
    """The signal ends the program as without a launch, once its ranks have saved."""
    workspace.write("def train(ctx):\n    exec(open('body.py').read(), {})\n", "program.py")
    workspace.write(WAITING, "body.py")
    launching = "import accel, program; accel.debug_launcher(program.train)"
    popen = subprocess.Popen(
        [*FRESH, sys.executable, "-c", launching], cwd=workspace.folder, stderr=subprocess.PIPE, text=True
    )
    workspace.started.append(popen)
    wait_for(lambda: len(list(workspace.folder.glob("pid-[01]"))) == 2, seconds=60)
    popen.send_signal(number)
    _, err = popen.communicate(timeout=patience(20))
    assert popen.returncode == -number, err
    assert saved(workspace, number, 2)


def as_a_script_runs_alone(workspace: Workspace, number: int) -> None:
    """Without a launcher; `stop_requests` records each of them."""
    text = f"""{HERE.replace('int(os.environ["RANK"])', "0")}
import accel
with accel.session(device="cpu") as ctx, accel.preempt.stop_requests(ctx) as requests:
    here()
    while (stop := accel.preempt.stop_agreed(ctx, requests)) is None:
        time.sleep(0.05)
    here(f"saved-0-{{int(stop.signal)}}")
    raise stop
"""
    words = [*FRESH, sys.executable, str(workspace.write(text))]
    popen = subprocess.Popen(words, cwd=workspace.folder)
    wait_for(lambda: (workspace.folder / "pid-0").exists() or popen.poll() is not None, seconds=60)
    popen.send_signal(number)
    assert popen.wait(patience(20)) == 128 + number
    assert saved(workspace, number, 1)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("number", STOPPING)
@pytest.mark.parametrize(
    "state",
    [
        as_it_starts,
        as_it_runs,
        on_the_ranks_alone,
        as_it_stops,
        before_it_starts_again,
        as_it_waits_for_hosts,
        as_it_waits_for_the_first_host,
        as_it_runs_on_hosts,
        as_a_function_runs,
        as_a_script_runs_alone,
    ],
)
def test_a_request_to_stop_in_a_state_of_a_launch(
    workspace: Workspace, state: Callable[[Workspace, int], None], number: int
) -> None:
    state(workspace, number)


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", NOTICES)
def test_a_notice_reaches_every_rank_and_ends_nothing(workspace: Workspace, number: int) -> None:
    launcher, _ = launched(workspace)
    launcher.send_signal(number)
    wait_for(lambda: len(list(workspace.folder.glob(f"pid-note-*-{number}"))) == 2)
    launcher.send_signal(signal.SIGHUP)
    ends(workspace, launcher, signal.SIGHUP)
    assert saved(workspace, signal.SIGHUP, 2)


@pytest.mark.multiprocess
def test_what_nohup_ignores_stays_ignored_in_the_launcher_and_in_ranks(workspace: Workspace) -> None:
    launcher, pids = launched(workspace, within=("env", "--default-signal", "--ignore-signal=HUP"))
    launcher.send_signal(signal.SIGHUP)
    time.sleep(patience(0.2))
    assert launcher.poll() is None
    assert all(map(alive, pids))
    launcher.send_signal(signal.SIGTERM)
    ends(workspace, launcher, signal.SIGTERM)
    assert not list(workspace.folder.glob(f"pid-saved-*-{signal.SIGHUP:d}"))


@pytest.mark.multiprocess
def test_ranks_save_when_their_terminal_is_closed(workspace: Workspace) -> None:
    """A session's leader gets SIGHUP from the kernel; what it prints then is lost, and what ranks print too."""
    script = workspace.write(WAITING)
    master, slave = os.openpty()
    # setsid makes the launcher leader of a session whose terminal is the slave
    words = ["setsid", "--ctty", "--wait", *FRESH, *ACCEL, "launch", "--cpu", "--nproc-per-node", "2", str(script)]
    popen = subprocess.Popen(words, cwd=workspace.folder, stdin=slave, stdout=slave, stderr=slave)
    workspace.started.append(popen)  # pyright: ignore[reportArgumentType] - it has no pipes
    os.close(slave)
    workspace.pids(2)
    os.close(master)
    assert popen.wait(patience(10)) == 128 + signal.SIGHUP
    assert saved(workspace, signal.SIGHUP, 2)


def closing(*numbers: int) -> list[str]:
    return ["sh", "-c", f'exec "$@" {" ".join(f"{number}>&-" for number in numbers)}', "_"]


CLOSED = [numbers for count in (1, 2, 3) for numbers in itertools.combinations((0, 1, 2), count)]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "closed", [numbers if numbers == (2,) else pytest.param(numbers, marks=pytest.mark.slow) for numbers in CLOSED]
)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_script_runs_whatever_streams_are_closed(workspace: Workspace, closed: Sequence[int], ranks: int) -> None:
    script = workspace.write(f"""{HERE}
assert all(os.fstat(number) for number in (0, 1, 2))
with open(f"opened-{{rank}}", "w") as file:
    assert file.fileno() > 2
print("printed", flush=True)
here()
sys.exit(7)
""")
    launcher = workspace.start("launch", "--cpu", "--nproc-per-node", str(ranks), script, within=closing(*closed))
    out, err = launcher.communicate(timeout=patience(20))
    assert launcher.returncode == 7
    assert out.count("printed") == (0 if 1 in closed else ranks)
    assert ("accel: rank " in err) == (2 not in closed)


@pytest.mark.multiprocess
def test_a_launch_ends_though_its_parent_has_blocked_every_signal(workspace: Workspace) -> None:
    blocked = ("env", "--default-signal", "--block-signal")
    launcher = workspace.start("launch", "--cpu", "--nproc-per-node", "2", workspace.write(""), within=blocked)
    assert launcher.wait(patience(LOOK_S - 1)) == 0


@pytest.mark.multiprocess
@pytest.mark.parametrize("named", ["absolute", "relative"])
def test_a_deleted_folder_is_no_obstacle_to_a_script_elsewhere(workspace: Workspace, named: str) -> None:
    script = workspace.write("print('printed')")
    gone = workspace.folder / "gone"
    gone.mkdir()
    inside = ["sh", "-c", 'cd gone && rmdir ../gone && exec "$@"', "_"]
    launcher = workspace.start("launch", "--cpu", script if named == "absolute" else script.name, within=inside)
    out, err = launcher.communicate(timeout=patience(20))
    if named == "absolute":
        assert (launcher.returncode, out) == (0, "printed\n"), err
        assert err == f"accel: the working directory is gone: {gone} (deleted)\n"
    else:
        assert launcher.returncode == 2
        assert err.startswith("accel: error: there is no such script")
        assert f"{gone} (deleted)" in err
