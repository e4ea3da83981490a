# SPDX-License-Identifier: Apache-2.0
"""Launches over several hosts: two launchers on this machine, and hosts that are network namespaces."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from launches import LaunchTarget
from launching import ACCEL, Workspace, missed_backward
from processes import free_port, patience, wait_for
from simulated_hosts import Hosts, require_hosts

from accel.config import LaunchConfig
from accel.launching.hosts._hosts import AgentOrder
from accel.report import rank_rows
from accel.run_folder import read_launches

pytestmark = pytest.mark.multiprocess

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"
# Hosts that are one machine would each take all of its cores.
ONE_CORE = ("--nproc-per-node", 1, "--threads-per-process", 1)
LAST_CALL_S = 10  # for the second of two launchers that start together; the default is for machines of a cluster
STEPPING = """
    import os, sys, time, torch, accel
    with accel.session(device="cpu", timeout_s=float(sys.argv[1])) as ctx:
        host = os.uname().nodename
        print("world", ctx.world_size, "restarts", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
        for step in range(600):
            accel.wait_for_everyone(ctx)
            if step == 2:
                open(f"ready-{host}-{ctx.world_size}", "w")
            time.sleep(0.1)
            if os.path.exists("enough"):
                accel.wait_for_everyone(ctx)
            if accel.any_rank(ctx, os.path.exists("enough")):
                break
        print("done", ctx.world_size, flush=True)
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    require_hosts()
    made = Hosts(2, tmp_path)
    yield made
    made.close()


def words(*flags: object, endpoint: str = "h0:29400") -> list[object]:
    return [*ACCEL, "launch", "--cpu", "--rdzv-endpoint", endpoint, *flags]


def ended(popen: subprocess.Popen[str], seconds: float = 240) -> tuple[int, str, str]:
    out, err = popen.communicate(timeout=patience(seconds))
    return popen.returncode, out, err


def here() -> str:
    return f"127.0.0.1:{free_port()}"


def leaving_s() -> float:
    """How long a process that has imported torch takes to end, here and now: whoever waits for ranks waits for that."""
    command = [sys.executable, "-c", "import torch, time; print(time.monotonic(), flush=True)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return time.monotonic() - float(done.stdout)


@pytest.mark.slow
@pytest.mark.kept("slow")
def test_a_rank_that_fails_on_one_host_is_told_on_all_and_all_start_again(workspace: Workspace) -> None:
    (workspace.folder / "run").mkdir()
    script = workspace.write("""
        import os, sys, time; sys.audit("accel.run", "run")
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "host", os.environ["NODE_RANK"], flush=True)
        role = [os.environ[f"ROLE_{name}"] for name in ("NAME", "RANK", "WORLD_SIZE")]
        print(*role, os.environ["TORCHELASTIC_RUN_ID"], flush=True)
        if first and os.environ["RANK"] == "2":
            raise ValueError("bad batch")
        time.sleep(60 if first else 0)
    """)
    flags = words("--nnodes", 2, "--nproc-per-node", 2, "--max-restarts", 1, "--rdzv-id", "job-7", endpoint=here())
    roles = ("reader", "trainer")
    launchers = [
        workspace.start(*map(str, flags[len(ACCEL) :]), "--node-rank", str(at), "--role", role, script)
        for at, role in enumerate(roles)
    ]
    for at, launcher in enumerate(launchers):
        status, out, err = ended(launcher)
        assert status == 0, err
        for rank in (2 * at, 2 * at + 1):
            assert out.count(f"[rank {rank}] rank {rank} of 4 host {at}\n") == 2
            assert out.count(f"[rank {rank}] {roles[at]} {rank - 2 * at} 2 job-7\n") == 2
        assert re.search(rf"^accel: rank 2 on \S+ failed: ValueError: bad batch - at {script}:8$", err, re.M), err
        assert err.count("ValueError: bad batch") == 2
        assert ", restart 1 of 1\n" in err
        assert re.fullmatch(r"accel: 4 ranks finished after 0:\d\d:\d\d and 1 restart", err.splitlines()[-1]), err
    records = read_launches(workspace.folder / "run")
    assert sorted([rank.rank for rank in record.attempts[-1].ranks] for record in records) == [[0, 1], [2, 3]]
    for record in records:
        first, last = record.attempts
        assert (record.status, record.restarts, len(first.hosts), len(last.hosts)) == (0, 1, 2, 2)
        assert first.error is not None
        assert (first.error.rank, first.error.message) == (2, "bad batch")
        assert [rank.status for rank in last.ranks] == [0, 0]
    assert [row[0] for row in rank_rows(records)] == ["0", "1", "2", "3"]


@pytest.mark.slow
@pytest.mark.parametrize("rest_s", [0, 600])
def test_a_host_whose_ranks_are_done_or_computing_hears_of_a_failure_on_another(
    workspace: Workspace, rest_s: int
) -> None:
    script = workspace.write(f"""
        import os, sys, time
        if os.environ["RANK"] == "1":
            time.sleep(1)
            sys.exit(3)
        time.sleep({rest_s})
    """)
    flags = words("--nnodes", 2, endpoint=here())[len(ACCEL) :]
    for launcher in [workspace.start(*map(str, flags), script) for _ in range(2)]:
        status, _, err = ended(launcher, 60)
        assert status == 3
        assert "accel: rank 1 on " in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (["--node-rank", "0"], ["--node-rank", "0"], "two hosts have one node_rank: got node_rank=0 on "),
        (["--precision", "bf16"], [], "hosts do not agree on precision: got "),
        (["--nproc-per-node", "2"], [], "hosts do not agree on processes: got "),
    ],
)
def test_hosts_that_were_told_different_things_are_named_before_anything_starts(
    workspace: Workspace, one: list[str], other: list[str], told: str
) -> None:
    script = workspace.write("open('ran', 'w')")
    flags = words("--nnodes", 2, endpoint=here())[len(ACCEL) :]
    for launcher in [workspace.start(*map(str, flags), *own, script) for own in (one, other)]:
        status, _, err = ended(launcher)
        assert status == 2
        *waits, error = err.splitlines()
        assert error.startswith(f"accel: error: {told}")
        assert all(line.startswith("accel: waiting for other hosts at ") for line in waits)
    assert not (workspace.folder / "ran").exists()


@pytest.mark.nightly
def test_a_late_host_that_does_not_fit_is_refused_and_the_others_go_on(workspace: Workspace) -> None:
    script, changed = workspace.write(STEPPING), workspace.write(STEPPING + "# changed\n", "changed.py")
    elastic = ("--nnodes", "1:2", "--rdzv-last-call-s", 2, "--max-restarts", 3)
    flags = [*map(str, words(*elastic, endpoint=here())[len(ACCEL) :])]
    running = workspace.start(*flags, script, "60")
    wait_for(lambda: bool(list(workspace.folder.glob("ready-*-1"))), 120)
    for own, told in (
        (["--precision", "bf16", str(script)], r"precision: got auto on \S+; bf16 on \S+"),
        ([str(changed)], r"the script: got version \w{8} on \S+; version \w{8} on \S+"),
    ):
        status, _, err = ended(workspace.start(*flags, *own, "60"))
        assert status == 2
        fix = r"The job continues without this host; launch here with the same settings\."
        assert re.fullmatch(rf"accel: error: hosts do not agree on {told}\. {fix}\n", err), err
    (workspace.folder / "enough").touch()
    status, out, err = ended(running)
    assert (status, out) == (0, "world 1 restarts 0\ndone 1\n"), err


@pytest.mark.slow
def test_a_port_that_something_else_has_is_told(workspace: Workspace) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = workspace.accel(
            "launch",
            "--cpu",
            "--nnodes",
            "2",
            "--rdzv-endpoint",
            f"127.0.0.1:{taken.getsockname()[1]}",
            workspace.write(""),
        )
    assert done.returncode == 2
    assert done.stderr.startswith("accel: error: the rendezvous port is in use")


@pytest.mark.slow
def test_a_signal_while_hosts_are_awaited_ends_the_launch(workspace: Workspace) -> None:
    flags = words("--nnodes", 2, endpoint=here())[len(ACCEL) :]
    launcher = workspace.start(*map(str, flags), workspace.write(""))
    assert launcher.stderr is not None
    assert any(line.startswith("accel: waiting for other hosts") for line in launcher.stderr)
    launcher.terminate()
    status, _, err = ended(launcher, 10)
    assert (status, err.splitlines()[-1]) == (143, "accel: stopped by SIGTERM")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("leaves", "named"),
    [
        ("time.sleep(60)", "never reached the collective: at {script}:8 in <module>"),
        ("os._exit(0)", "exited with status 0, while other ranks continued"),
    ],
)
def test_the_rank_that_a_backward_misses_is_named_first_on_all_hosts(
    workspace: Workspace, leaves: str, named: str
) -> None:
    script = workspace.write(missed_backward(leaves))
    flags = words("--nnodes", 2, endpoint=here())[len(ACCEL) :]
    launchers = [workspace.start(*map(str, flags), "--node-rank", str(at), script) for at in range(2)]
    for launcher in launchers:
        status, _, err = ended(launcher)
        assert status == 1, err
        told = [line for line in err.splitlines() if line.startswith("accel: ")]
        report = next((at for at, line in enumerate(told) if named.format(script=script) in line), None)
        assert report is not None, err
        assert told[report].startswith("accel: rank 1 on "), err
        assert re.match(r"accel: rank 0 on \S+ failed: RuntimeError: ", told[report + 1]), err
        assert re.fullmatch(r"accel: rank 0 failed after 0:\d\d:\d\d, exit status 1: RuntimeError: .+", told[-1]), err


EARLY = """
import signal, sys
from accel.launching.hosts import _agent

def stopped_before(*words, meet=_agent.Rendezvous):
    signal.raise_signal(signal.SIGTERM)
    return meet(*words)

_agent.Rendezvous = stopped_before
_agent.main(sys.argv[1:])
"""


def test_a_signal_that_comes_before_the_agent_waits_for_hosts_is_not_lost(workspace: Workspace) -> None:
    config = LaunchConfig(nproc_per_node=1, nnodes=2, device="cpu", rdzv_endpoint=here())
    order = AgentOrder(target=LaunchTarget(name=str(workspace.write(""))), config=config, parent=os.getpid(), added=())
    command = [sys.executable, "-c", EARLY, msgspec.json.encode(order).decode()]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=patience(60), check=False)
    assert (done.returncode, done.stderr) == (143, "accel: stopped by SIGTERM\n")


@pytest.mark.nightly
def test_the_example_trains_across_two_hosts(hosts: Hosts, workspace: Workspace) -> None:
    command = words("--nnodes", 2, *ONE_CORE, DIGITS, "--epochs", 1, "--out", "run")
    launchers = [hosts.start(at, command, folder=workspace.folder) for at in range(2)]
    first, second = map(ended, launchers)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "ranks 0 on h" in first[2] + second[2]
    assert (workspace.folder / "run" / "step-00000023").exists()


@pytest.mark.slow
@pytest.mark.kept("slow")
def test_a_host_that_is_cut_off_is_reported_in_time_on_both_sides(hosts: Hosts, workspace: Workspace) -> None:
    command = words("--nnodes", 2, workspace.write(STEPPING), 8)
    launchers = [hosts.start(at, command, folder=workspace.folder) for at in range(2)]
    wait_for(lambda: len(list(workspace.folder.glob("ready-*-2"))) == 2, 60)
    slow_s = leaving_s()
    hosts.cut_off(1)
    cut = time.monotonic()
    errors: list[str] = []
    for launcher in launchers:
        status, _, err = ended(launcher, 90)
        assert status == 1
        last = r"accel: rank \d failed after 0:\d\d:\d\d, exit status 1: accel\.errors\.PeerError: .+"
        assert re.fullmatch(last, err.splitlines()[-1]), err
        assert re.search(r"^accel: rank \d on h\d failed: accel\.errors\.PeerError: ", err, re.M), err
        assert "accel: ranks 0 on h" in err, err
        errors.append(err)
    missing = (
        r"^accel: rank \d on h1 never reached the collective: no answer from the launcher\n"
        r"accel: rank \d on h0 failed: "
    )
    assert re.search(missing, errors[0], re.M), errors[0]  # the other launcher cannot reach the store
    assert time.monotonic() - cut < patience(8 + 5) + 4 * slow_s  # nearly 5 where nothing else computes


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.kept("slow")
def test_training_goes_on_from_the_last_checkpoint_on_the_hosts_that_are_left(
    hosts: Hosts, workspace: Workspace
) -> None:
    flags = ("--nnodes", "1:2", "--rdzv-last-call-s", LAST_CALL_S, *ONE_CORE, "--max-restarts", 3, "--timeout-s", 10)
    command = words(*flags, DIGITS, "--epochs", 8, "--save-every", 5, "--out", "run")
    launchers = [hosts.start(at, command, folder=workspace.folder) for at in range(2)]
    wait_for(lambda: len(list((workspace.folder / "run").glob("step-*"))) > 1, 90)
    hosts.cut_off(1)
    status, out, err = ended(launchers[0], 500)
    assert status == 0, err
    assert "accel: rank 0 on h0, restart 1 of 3" in err
    assert "going on from run/step-" in out
    assert (workspace.folder / "run" / "step-00000184").exists()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_host_that_comes_back_is_taken_in_again(hosts: Hosts, workspace: Workspace) -> None:
    elastic = ("--nnodes", "1:2", "--rdzv-last-call-s", 3, "--max-restarts", 3)  # a late host is taken in, too
    command = words(*elastic, workspace.write(STEPPING), 10)
    launchers = [hosts.start(at, command, folder=workspace.folder) for at in range(2)]
    wait_for(lambda: (workspace.folder / "ready-h0-2").exists(), 60)
    (workspace.folder / "ready-h0-1").unlink(missing_ok=True)
    launchers[1].kill()
    wait_for(lambda: (workspace.folder / "ready-h0-1").exists(), 90)
    (workspace.folder / "ready-h0-2").unlink()
    back = hosts.start(1, command, folder=workspace.folder)
    wait_for(lambda: (workspace.folder / "ready-h0-2").exists(), 90)
    (workspace.folder / "enough").touch()
    for launcher in (launchers[0], back):
        status, out, err = ended(launcher, 60)
        assert status == 0, err
        assert out.endswith("done 2\n")
