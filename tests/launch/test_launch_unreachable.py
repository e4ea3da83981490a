# SPDX-License-Identifier: Apache-2.0
"""Hosts that cannot be reached, or that do not come: what is said, and when it is given up."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest
from launching import ACCEL, Workspace
from processes import free_port, patience
from simulated_hosts import Hosts, require_hosts

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

JOINING = "import accel\nwith accel.session(device='cpu', timeout_s=3):\n    pass\n"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    require_hosts()
    made = Hosts(2, tmp_path_factory.mktemp("hosts"))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("endpoint", "flags", "said"),
    [
        ("203.0.113.7:29400", (), ["error: the rendezvous endpoint does not answer: .* Network is unreachable"]),
        (
            "10.83.0.99:29400",  # a neighbour that does not exist
            (),
            [
                "waiting for the first host at 10.83.0.99:29400, up to 300 s",
                "error: the rendezvous endpoint does not answer: .* No route to host",
            ],
        ),
        (
            "h0:29400",
            ("--rdzv-timeout-s", 2),
            [
                r"waiting for the first host at h0:29400, up to 2 s \(--rdzv-timeout-s\): .*refused",
                "error: the rendezvous endpoint does not answer: expected the first host's launcher .*refused",
            ],
        ),
    ],
)
def test_a_first_host_that_cannot_be_reached_is_told_in_a_line(
    hosts: Hosts, workspace: Workspace, endpoint: str, flags: tuple[object, ...], said: list[str]
) -> None:
    words = [*ACCEL, "launch", "--nnodes", 2, "--rdzv-endpoint", endpoint, *flags, workspace.write("")]
    launcher = hosts.start(1, words, folder=workspace.folder)
    _, err = launcher.communicate(timeout=patience(60))
    assert launcher.returncode == 2, err
    for line, pattern in zip(err.splitlines(), said, strict=True):
        assert re.match(f"accel: {pattern}", line), err


def test_hosts_that_do_not_come_are_waited_for_aloud_and_in_vain(workspace: Workspace) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    flags = ("--nnodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-timeout-s", "4")
    done = workspace.accel("launch", "--cpu", *flags, workspace.write(""))
    assert done.returncode == 2
    waits, gives_up = done.stderr.splitlines()
    alone = "which only launchers on this machine can reach"
    assert waits == f"accel: waiting for other hosts at {endpoint}, {alone}, up to 4 s (--rdzv-timeout-s)"
    assert gives_up.startswith("accel: error: the hosts did not all arrive: ")


def test_a_rank_that_finds_no_way_to_rank_0_gives_up_at_once(hosts: Hosts, workspace: Workspace) -> None:
    script = workspace.write(JOINING.replace("timeout_s=3", "timeout_s=600"))
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "203.0.113.7", "MASTER_PORT": "29500"}
    rank = hosts.start(1, [sys.executable, script], folder=workspace.folder, **environ)
    _, err = rank.communicate(timeout=patience(60))
    assert "rank 1 cannot reach the address where ranks meet: expected 203.0.113.7:29500" in err
    assert "Network is unreachable" in err


def test_a_rank_says_whom_it_waits_for(hosts: Hosts, workspace: Workspace) -> None:
    script = workspace.write(JOINING.replace("timeout_s=3", "timeout_s=7"))
    environ = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h0", "MASTER_PORT": "29500"}
    rank = hosts.start(1, [sys.executable, script], folder=workspace.folder, **environ)
    _, err = rank.communicate(timeout=patience(60))
    assert err.startswith("accel: rank 1 waits for rank 0 at h0:29500, up to 7 s: "), err
    assert "PeerError: rank 1 cannot reach the address where ranks meet" in err
