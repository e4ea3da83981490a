# SPDX-License-Identifier: Apache-2.0
"""Faults happen where they were asked for, or the run says that they did not."""

from __future__ import annotations

import signal

import pytest
import torch
import torch.distributed as dist
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share

from accel.errors import ConfigError
from accel.testing import Deadlock, Fault, FaultNotReached, InjectedFault, SimulationError, Simulator, WriteFault


def three_barriers(group) -> int:
    for _ in range(3):
        dist.barrier(group=group)
    return group.rank()


@pytest.mark.parametrize(
    ("fault", "where", "expected"),
    [
        (Fault(2, 0), "faults[0].rank", "0 to 1"),
        (Fault(-1, 0), "faults[0].rank", "0 to 1"),
        (Fault("1", 0), "faults[0].rank", "0 to 1"),
        (Fault(0, -1), "faults[0].call", "from 0"),
        (Fault(0, 1.0), "faults[0].call", "from 0"),
        (Fault(0, 0, "vanihs"), "faults[0].action", "Did you mean `vanish`?"),
        (Fault(0, 0, "terminate", signal=signal.SIGKILL), "faults[0].signal", "SIGINT, SIGTERM, SIGHUP"),
        (Fault(0, 0, "raise", signal=signal.SIGUSR1), "faults[0].action", "terminate"),
        (WriteFault(2, 0), "faults[0].rank", "0 to 1"),
        (WriteFault(0, -1), "faults[0].write", "from 0"),
        (WriteFault(0, 0, "dorp"), "faults[0].action", "Did you mean `drop`?"),
        (("raise", 0), "faults[0]", "a Fault or WriteFault"),
    ],
)
def test_faults_that_cannot_happen_are_refused(ranks, fault, where, expected):
    with pytest.raises(ConfigError) as caught:
        ranks.run_groups(three_barriers, 2, faults=[fault])
    assert caught.value.where == where
    assert expected in str(caught.value)


@pytest.mark.parametrize("action", ["raise", "vanish", "delay", "terminate"])
def test_a_fault_that_comes_after_the_end_is_an_error(ranks, action):
    with pytest.raises(FaultNotReached) as caught:
        ranks.run_groups(three_barriers, 2, faults=[Fault(1, 3, action)])
    assert "expected rank 1 to come to call #3, got 3 in all, counted from #0" in str(caught.value)


def test_a_write_that_never_came_is_an_error(ranks):
    with assert_raises(FaultNotReached, expected="to come to write #0", got="0 in all"):
        ranks.run_groups(three_barriers, 2, faults=[WriteFault(0, 0)])


def test_only_what_came_is_told_when_a_run_fails_before_another_fault(ranks):
    with assert_raises(InjectedFault, problem="rank 0 fails at its call #1"):
        ranks.run_groups(three_barriers, 2, faults=[Fault(0, 1), Fault(1, 7)])


def order_of_arrival(size: int, calls: int, delays: list[Fault], simulator: Simulator, seed: int | None) -> list[int]:
    """Who made its calls in which order, where nobody waits for anybody."""
    order: list[int] = []

    def rank(group) -> None:
        posted = []
        for _ in range(calls):
            posted.append(dist.all_reduce(torch.ones(1), group=group, async_op=True))
            order.append(group.rank())
        for work in posted:
            work.wait()

    simulator.run_groups(rank, size, faults=delays, seed=seed)
    return order


@settings(deadline=None, max_examples=share(1))
@given(
    size=st.integers(2, 5),
    late=st.integers(0, 4),
    call=st.integers(0, 2),
    seed=st.none() | st.integers(0, 99),
)
def test_a_delayed_rank_goes_on_when_no_other_can(ranks, size, late, call, seed):
    late %= size
    order = order_of_arrival(size, 3, [Fault(late, call, "delay")], ranks, seed)
    at = [i for i, who in enumerate(order) if who == late][call]
    assert sorted(order[:at]) == sorted([rank for rank in range(size) if rank != late] * 3 + [late] * call)


def test_delayed_ranks_go_on_in_the_order_in_which_they_were_delayed(ranks):
    delays = [Fault(0, 0, "delay"), Fault(1, 0, "delay")]
    assert order_of_arrival(3, 1, delays, ranks, None) == [2, 0, 1]


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_delay_changes_no_result(ranks, seed):
    def rank(group):
        total = torch.tensor([group.rank()])
        for _ in range(3):
            dist.all_reduce(total, group=group)
        return int(total)

    delays = [Fault(rank, call, "delay") for rank in range(3) for call in range(3)]
    assert ranks.run_groups(rank, 3, faults=delays, seed=seed) == [27] * 3


def test_a_deadlock_is_found_though_a_rank_was_delayed(ranks):
    def rank(group):
        if group.rank() != 2:
            dist.barrier(group=group)

    with assert_raises(Deadlock, got="rank 2: returned"):
        ranks.run_groups(rank, 3, faults=[Fault(0, 0, "delay"), Fault(1, 0, "delay")])


def test_a_time_out_ends_delayed_ranks_too(ranks):
    def rank(group):
        while group.rank() == 1:
            pass
        dist.barrier(group=group)

    with assert_raises(SimulationError, got="rank 0: delayed"):
        ranks.run_groups(rank, 2, faults=[Fault(0, 0, "delay")], timeout_s=0.2)
    assert ranks.run_groups(three_barriers, 2) == [0, 1]
