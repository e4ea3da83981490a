# SPDX-License-Identifier: Apache-2.0
"""A round of a launch over several hosts, whose hosts are threads of this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from catching import assert_raises
from processes import wait_for
from torch.distributed import HashStore

from accel.errors import LaunchError
from accel.launching.hosts import _round
from accel.launching.hosts._round import HostRound


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HostRound]]:
    monkeypatch.setattr(_round, "_LOOK_S", 0.02)
    monkeypatch.setattr(_round, "_LAST_LOOK_S", 0.02)
    monkeypatch.setattr(_round, "_LISTEN_S", 0.05)
    store = HashStore()
    made = [HostRound(store, at, ["h0", "h1", "h2"], 1, lambda: 0) for at in range(3)]
    yield made
    for each in made:
        each.end()


def test_hosts_end_once_all_are_done(rounds: list[HostRound]) -> None:
    assert not rounds[0].all_done()
    assert not rounds[2].all_done()
    wait_for(lambda: rounds[0]._hosts_done == 2, 10)
    assert not rounds[0].all_done()
    assert not rounds[1].all_done()
    for each in rounds:
        wait_for(each.all_done, 10)


def test_a_host_that_is_done_does_not_wait_for_one_that_is_lost(
    rounds: list[HostRound], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_round, "SILENT_S", 1.0)
    assert not rounds[0].all_done()
    rounds[1].end()  # its launcher is gone; h2 still works
    with assert_raises(LaunchError, problem="another host does not answer.*s", got="nothing from h1 for"):
        wait_for(rounds[0].all_done, 30)
