# SPDX-License-Identifier: Apache-2.0
"""`accel test` over two hosts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import ACCEL, Workspace
from processes import patience
from simulated_hosts import Hosts, require_hosts

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    require_hosts()
    made = Hosts(2, tmp_path)
    yield made
    made.close()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("flags", "last", "summary"),
    [
        (("--folder", "."), ["ok"] * 6, "6 of 6 checks passed."),
        ((), ["ok"] * 4 + ["skip", "ok"], "5 of 6 checks passed, 1 skipped."),
    ],
)
def test_two_hosts_check_themselves_together(
    hosts: Hosts, workspace: Workspace, flags: tuple[str, ...], last: list[str], summary: str
) -> None:
    words = [*ACCEL, "test", "--cpu", "--nnodes", 2, "--rdzv-endpoint", "h0:29400", *flags]
    launchers = [hosts.start(at, words, folder=workspace.folder) for at in range(2)]
    (out, err), (second, other_err) = (launcher.communicate(timeout=patience(300)) for launcher in launchers)
    assert [launcher.returncode for launcher in launchers] == [0, 0], out + second + err + other_err
    report = (out or second).splitlines()
    assert "" in (out, second)  # the host of rank 0 alone reports
    assert report[0].startswith("2 ranks on 2 hosts, cpu, gloo, ")
    assert [line.split()[0] for line in report[1:-1]] == last
    assert report[-1] == summary
    assert not list(workspace.folder.glob("accel-test-*"))
