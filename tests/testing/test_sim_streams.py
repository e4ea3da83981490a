# SPDX-License-Identifier: Apache-2.0
"""Each simulated rank draws what a process of its own would, and the caller's streams are left alone."""

from __future__ import annotations

import contextvars
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from profiles import share

from accel.testing import Deadlock, Simulator, simulate_groups


def _draw() -> tuple[float, ...]:
    pair = random.gauss(0, 1), np.random.standard_normal(), torch.randn(1).item()
    return (*pair, random.random(), np.random.random(), torch.rand(1).item())


def _seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def _state() -> tuple[object, ...]:
    return random.getstate(), repr(np.random.get_state(legacy=False)), torch.get_rng_state().tolist()


@settings(max_examples=share(0.6), deadline=None)
@given(size=st.integers(1, 5), rounds=st.integers(1, 4), odd=st.booleans(), seed=st.none() | st.integers(0, 99))
def test_ranks_draw_what_separate_processes_would(size, rounds, odd, seed):
    def rank(group):
        _seed(group.rank())
        drawn = []
        for _ in range(rounds):
            if odd:  # leaves a gaussian pending in python's and numpy's streams
                drawn.append((random.gauss(0, 1), np.random.standard_normal()))
            dist.barrier(group=group)
            drawn.append(_draw())
        return drawn

    class Alone:
        def __init__(self, rank):
            self.rank = lambda: rank

    got = simulate_groups(rank, size, seed=seed)
    before = _state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "barrier", lambda group: None)
        expected = [rank(Alone(i)) for i in range(size)]
    assert got == expected
    assert before != _state()


@pytest.mark.parametrize("pending", [False, True])
def test_every_rank_starts_from_the_callers_state_and_leaves_it_untouched(pending):
    _seed(7)
    if pending:
        random.gauss(0, 1)
        np.random.standard_normal()
    before = _state()

    def rank(group):
        started = _state()
        _draw()
        dist.barrier(group=group)
        _draw()
        if group.rank() == 1:
            _seed(1)
        return started

    assert simulate_groups(rank, 3) == [before] * 3
    assert _state() == before


def test_streams_come_back_after_failures():
    _seed(3)
    before = _state()

    def rank(group):
        _draw()
        if group.rank() == 0:
            dist.barrier(group=group)

    with pytest.raises(Deadlock):
        simulate_groups(rank, 2)
    assert _state() == before


def test_context_variables_and_grad_mode_are_each_ranks_own():
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("caller")

    def rank(group):
        seen = variable.get(), torch.is_grad_enabled()
        variable.set(f"rank {group.rank()}")
        torch.set_grad_enabled(False)
        dist.barrier(group=group)
        return seen, variable.get()

    with Simulator() as simulator:
        for _ in range(3):
            got = simulator.run_groups(rank, 2)
            assert got == [(("caller", True), "rank 0"), (("caller", True), "rank 1")]
    assert variable.get() == "caller"
    assert torch.is_grad_enabled()


def test_graph_breaks_are_errors_on_the_rank_that_says_so():
    def refused(x):
        torch._dynamo.graph_break()
        return x + 1

    def broken(x):
        torch._dynamo.graph_break()
        return x + 2

    def rank(group):
        is_first = group.rank() == 0
        compiled = torch.compile(refused if is_first else broken, backend="eager")
        with torch._dynamo.error_on_graph_break(is_first):
            dist.barrier(group=group)
            if is_first:
                with pytest.raises(torch._dynamo.exc.Unsupported):
                    compiled(torch.ones(2))
            else:
                assert compiled(torch.ones(2)).tolist() == [3, 3]
            dist.barrier(group=group)

    simulate_groups(rank, 2)


def test_a_gaussian_that_numpy_has_pending_is_used_once():
    def rank(group):
        np.random.seed(group.rank())
        drawn = []
        for _ in range(4):
            drawn.append(np.random.standard_normal())
            dist.barrier(group=group)
        return drawn

    assert simulate_groups(rank, 3) == [np.random.RandomState(seed).standard_normal(4).tolist() for seed in range(3)]


def test_a_whole_round_of_draws_and_a_new_seed_are_noticed():
    """Both leave the generators' positions where they were: 624 words make one round."""

    def rank(group):
        _seed(group.rank())
        drawn = []
        for _ in range(3):
            dist.barrier(group=group)
            drawn.append([random.getrandbits(32) for _ in range(624)])
            drawn.append(np.random.randint(2**32, size=624, dtype=np.uint32).tolist())
        return drawn

    def alone(seed):
        python, numpy = random.Random(seed), np.random.RandomState(seed)
        rounds = [
            ([python.getrandbits(32) for _ in range(624)], numpy.randint(2**32, size=624, dtype=np.uint32).tolist())
            for _ in range(3)
        ]
        return [each for both in rounds for each in both]

    assert simulate_groups(rank, 3) == [alone(seed) for seed in range(3)]
