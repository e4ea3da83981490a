# SPDX-License-Identifier: Apache-2.0
"""One rank at a time, in an order that the seed fixes; threads end with their simulator."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from profiles import share

from accel.testing import Simulator, simulate, simulate_groups


def _trace(simulator: Simulator, size: int, rounds: int, seed: int | None) -> list[tuple[int, int]]:
    trace: list[tuple[int, int]] = []

    def rank(group):
        for step in range(rounds):
            trace.append((group.rank(), step))
            dist.barrier(group=group)

    simulator.run_groups(rank, size, seed=seed)
    return trace


@settings(max_examples=share(0.6), deadline=None)
@given(size=st.integers(1, 8), rounds=st.integers(1, 4), seed=st.none() | st.integers(0, 2**32))
def test_the_same_seed_gives_the_same_schedule(size, rounds, seed):
    with Simulator() as simulator:
        first = _trace(simulator, size, rounds, seed)
        assert first == _trace(simulator, size, rounds, seed)
    with Simulator() as other:
        assert first == _trace(other, size, rounds, seed)
    assert sorted(first) == [(rank, step) for rank in range(size) for step in range(rounds)]


def test_different_seeds_explore_the_orders():
    with Simulator() as simulator:
        assert _trace(simulator, 3, 1, None) == [(0, 0), (1, 0), (2, 0)]
        orders = {tuple(rank for rank, _ in _trace(simulator, 3, 1, seed)) for seed in range(100)}
    assert len(orders) == 6


def test_exactly_one_rank_runs_at_a_time():
    running = []

    def rank(group):
        for _ in range(20):
            running.append(group.rank())
            assert len(running) == 1
            sum(range(200))
            running.pop()
            dist.barrier(group=group)

    for seed in (None, 1):
        simulate_groups(rank, 5, seed=seed)


def test_a_random_schedule_finds_an_order_that_the_plain_one_hides():
    def rank(group, board):
        dist.barrier(group=group)
        if group.rank() == 0:
            board.append("written")
        return list(board)

    def read_too_early(seed):
        board = []
        return any(seen == [] for seen in simulate_groups(lambda group: rank(group, board), 2, seed=seed))

    assert any(read_too_early(seed) for seed in range(20))


def test_a_seed_also_interleaves_ranks_that_need_not_wait():
    def trace(seed):
        order = []

        def rank(group):
            works = []
            for _ in range(3):
                works.append(dist.barrier(group=group, async_op=True))
                order.append(group.rank())
            for work in works:
                work.wait()

        simulate_groups(rank, 2, seed=seed)
        return order

    assert trace(None) == [0, 0, 0, 1, 1, 1]
    assert len({tuple(trace(seed)) for seed in range(60)}) > 6


def test_a_thousand_simulations_leave_no_thread():
    before = set(threading.enumerate())
    for seed in range(500):
        simulate_groups(lambda group: dist.barrier(group=group), 3, seed=seed)
        assert set(threading.enumerate()) <= before
    with Simulator() as simulator:
        for seed in range(500):
            simulator.run_groups(lambda group: dist.barrier(group=group), 1 + seed % 5, seed=seed)
            assert len(set(threading.enumerate()) - before) <= 5
    assert set(threading.enumerate()) <= before


def test_a_simulation_inside_of_a_rank():
    def inner(group):
        total = torch.tensor(float(group.rank() + 1))
        dist.all_reduce(total, group=group)
        return total.item()

    def outer(group):
        dist.barrier(group=group)
        found = simulate_groups(inner, 3)
        dist.barrier(group=group)
        return found

    assert simulate_groups(outer, 2) == [[6.0] * 3] * 2


def test_many_ranks():
    assert simulate(lambda ctx: ctx.rank, 256) == list(range(256))
