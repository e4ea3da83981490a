# SPDX-License-Identifier: Apache-2.0
"""A launch on the hosts of a file: what filters leave, the commands of the hosts, and a remote shell that runs them."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path

import pytest
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from launches import LaunchTarget
from launching import HERE, REST, Workspace
from processes import free_ports, patience, wait_for
from profiles import share

from accel.config import LaunchConfig
from accel.errors import ConfigError, LaunchError
from accel.launching.hosts._hostfile import HostSlots, choose_hosts, exported, host_commands, read_hosts

FILE = "# two of them\nnode0 slots=4\n\nnode1  slots = 4 # the new one\n"
HOSTS = read_hosts(FILE, "hosts")
NUMBERS = st.sets(st.integers(0, 3), min_size=1)
FILTERS = st.dictionaries(st.sampled_from(["node0", "node1"]), st.none() | NUMBERS, min_size=1)
SHELL = """
import subprocess, sys
host, command = sys.argv[1:]
if host == "node9":
    sys.exit(255)
sys.exit(subprocess.run(["sh", "-c", command.replace("node0:29400", "127.0.0.1:PORT")], stdin=sys.stdin).returncode)
"""


def spelled(named: dict[str, set[int] | None]) -> str:
    parts = [name if slots is None else f"{name}:{','.join(map(str, slots))}" for name, slots in named.items()]
    return "@".join(parts)


def slots(hosts: tuple[HostSlots, ...]) -> set[tuple[str, int]]:
    return {(host.name, slot) for host in hosts for slot in host.slots or ()}


@given(FILTERS)
@settings(max_examples=share(0.8))
def test_what_is_included_and_what_is_excluded_are_all_there_is(named: dict[str, set[int] | None]) -> None:
    everything = slots(HOSTS)
    chosen = choose_hosts(HOSTS, include=spelled(named))
    wanted = {name: numbers or {0, 1, 2, 3} for name, numbers in named.items()}
    assert slots(chosen) == {(name, slot) for name, slot in everything if slot in wanted.get(name, ())}
    assert [host.whole for host in chosen] == [host.slots == (0, 1, 2, 3) for host in chosen]
    if slots(chosen) == everything:
        with assert_raises(LaunchError, problem="the filter leaves no host"):
            choose_hosts(HOSTS, exclude=spelled(named))
    else:
        assert slots(choose_hosts(HOSTS, exclude=spelled(named))) == everything - slots(chosen)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("node0 slots=0", "the line does not describe a host: expected NAME slots=COUNT"),
        ("node0 slots=2 x", "at hosts, line 1"),
        ("node0\nnode0", "a host is listed twice: got node0 - at hosts, line 2"),
        ("# none", "the file names no host"),
    ],
)
def test_a_file_that_names_no_hosts_is_refused(text: str, told: str) -> None:
    with pytest.raises(LaunchError) as caught:
        read_hosts(text, "hosts")
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("filters", "told"),
    [
        ({"include": "node2"}, "the file of hosts does not list this host: got node2 - at --include. Did you mean"),
        ({"exclude": "node0:4"}, "the host has no such slot: expected 0 to 3, got node0:4 - at --exclude"),
        ({"include": "node0:"}, "the filter is not valid"),
        ({"include": "node0", "exclude": "node1"}, "two filters exclude each other"),
    ],
)
def test_a_filter_that_fits_nothing_is_refused(filters: dict[str, str], told: str) -> None:
    with pytest.raises((LaunchError, ConfigError)) as caught:
        choose_hosts(HOSTS, **filters)
    assert told in str(caught.value)


def commands(hosts: tuple[HostSlots, ...], config: LaunchConfig, *told: str) -> list[str]:
    target = LaunchTarget(kind="script", name="train.py", args=("--name", "a b"))
    exports = {"NCCL_DEBUG": "INFO"}
    made = host_commands(hosts, target, config, told, python="/bin/py", folder="/home/a b", exports=exports)
    return [each.command for each in made]


def test_each_host_gets_its_place_and_its_slots() -> None:
    chosen = choose_hosts(HOSTS, include="node0:0,2@node1:1,3")
    first, second = commands(chosen, LaunchConfig(precision="bf16"), "precision")
    assert first.startswith("cd '/home/a b' || exit 1; ")
    launch = "env NCCL_DEBUG=INFO /bin/py -m accel.cli launch --nnodes=2"
    words = "--precision=bf16 -- train.py --name 'a b' &"
    assert f"{launch} --node-rank=0 --rdzv-endpoint=node0:29400 --nproc-per-node=2 --gpu-ids=0,2 {words}" in first
    assert f"{launch} --node-rank=1 --rdzv-endpoint=node0:29400 --nproc-per-node=2 --gpu-ids=1,3 {words}" in second
    (alone,) = commands(choose_hosts(HOSTS, include="node1"), LaunchConfig(device="cpu"), "device")
    assert "launch --nnodes=1 --nproc-per-node=4 --device=cpu -- train.py" in alone


@pytest.mark.parametrize(
    ("config", "told", "problem"),
    [
        (LaunchConfig(nnodes=2), "nnodes", "the file of hosts determines nnodes"),
        (LaunchConfig(nproc_per_node=3), "nproc_per_node", "expected 2, got 3"),
        (LaunchConfig(gpu_ids=(0,)), "gpu_ids", "gpu_ids and the filter both choose GPUs"),
    ],
)
def test_what_the_file_says_is_not_said_again(config: LaunchConfig, told: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        commands(choose_hosts(HOSTS, include="node0:0,2"), config, told)
    assert problem in str(caught.value)


def test_hosts_start_equally_many_processes() -> None:
    with assert_raises(LaunchError, got="node0 has 2, node1 has 4"):
        commands(choose_hosts(HOSTS, exclude="node0:0,1"), LaunchConfig())


def test_only_variables_that_hold_no_secrets_leave_this_host() -> None:
    environ = {"NCCL_DEBUG": "INFO", "API_KEY": "s", "PYTHONPATH": "/lib", "MINE": "1"}
    assert exported(environ) == {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/lib"}
    assert "MINE" in exported(environ, ["MINE"])
    with assert_raises(ConfigError, problem="the variable is not set on this host", got="OTHER", where="--export"):
        exported(environ, ["OTHER"])


@pytest.mark.multiprocess
@pytest.mark.slow
def test_two_hosts_meet_and_a_stop_here_ends_both(workspace: Workspace) -> None:
    port = free_ports(1)[0]
    shell = workspace.write(SHELL.replace("PORT", str(port)), "shell.py")
    words = ["launch", "--cpu", "--hostfile", str(workspace.write("node0 slots=1\nnode1 slots=1\n", "hosts"))]
    words += ["--shell", shlex.join([sys.executable, str(shell)])]
    line = 'f\'rank {os.environ["RANK"]} of {os.environ["WORLD_SIZE"]}\\n\''
    shown = workspace.write(f"import os\nos.write(1, {line}.encode())", "show.py")  # at once, as ranks share a stream
    done = workspace.accel(*words, shown)
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2" in done.stdout
    assert "rank 1 of 2" in done.stdout
    running = workspace.start(*words, workspace.write(f"{HERE}\nhere()\n{REST}\n", "wait.py"))
    pids = workspace.pids(2)
    running.send_signal(signal.SIGTERM)
    assert running.wait(patience(60)) == 128 + signal.SIGTERM
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_a_host_without_a_connection_ends_the_launch(workspace: Workspace) -> None:
    shell = workspace.write(SHELL, "shell.py")
    hosts = workspace.write("node9 slots=1\n", "hosts")
    words = ["--hostfile", hosts, "--shell", shlex.join([sys.executable, str(shell)])]
    done = workspace.accel("launch", "--cpu", *words, workspace.write("", "train.py"))
    assert done.returncode == 255
    assert "accel: no connection to node9, exit status 255" in done.stderr
    idle = workspace.accel("launch", "--include", "node9", Path("train.py"))
    assert "no effect without --hostfile: got --include" in idle.stderr
    unset = ["--hostfile", "", "--include", ""]  # as of variables of a shell that are not set
    empty = workspace.accel("launch", "--cpu", *unset, Path("train.py"))
    assert empty.returncode == 0, empty.stderr
