# SPDX-License-Identifier: Apache-2.0
"""Uneven inputs on the CPU: ranks that run dry keep the others going, and end with their parameters."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from processes import job, script_ranks
from torch import nn

import accel
from accel.errors import ConfigError, PrepareError
from accel.testing import InjectedFault, Simulator


def make() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(3, 1, bias=False).double()


def batches(rank: int, steps: int) -> torch.Tensor:
    return torch.randn(steps, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def train(ctx: accel.DistContext, steps: list[int], *, initial: bool) -> torch.Tensor:
    model = accel.prepare_model(ctx, make())
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), accel.loss_scale(ctx)
    with accel.join_uneven_inputs(ctx, model, divide_by_initial_world_size=initial):
        for inputs in batches(ctx.rank, steps[ctx.rank]):
            accel.backward(ctx, model(inputs).square().mean(), scaler)
            accel.optimizer_step(ctx, optimizer, scaler)
    return accel.unwrap_model(model).weight.detach()


def by_hand(steps: list[int], *, initial: bool) -> torch.Tensor:
    model = make()
    data = [batches(rank, count) for rank, count in enumerate(steps)]
    for step in range(max(steps)):
        here = [rank for rank, count in enumerate(steps) if count > step]
        model.zero_grad()
        total = sum(model(data[rank][step]).square().mean() for rank in here)
        (total / (len(steps) if initial else len(here))).backward()
        with torch.no_grad():
            model.weight -= 0.1 * model.weight.grad
    return model.weight.detach()


@settings(max_examples=12, deadline=None)
@given(steps=st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any))
def test_every_step_is_that_of_the_ranks_that_take_it(steps: list[int]) -> None:
    expected = by_hand(steps, initial=True)
    with Simulator() as simulator:
        world = len(steps)
        for got in simulator.run(lambda ctx: train(ctx, steps, initial=True), world, default_group=world > 1):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def test_the_block_leaves_nothing_behind(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        model, before = accel.prepare_model(ctx, make()), warnings.filters[:]
        with accel.join_uneven_inputs(ctx, model):
            pass
        assert warnings.filters == before
        if ctx.rank == 0:  # alone, which within the block would wait for the others
            model(batches(0, 1)[0])

    ranks.run(rank, 2, default_group=True)


def test_a_rank_that_fails_answers_nobody(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        with accel.join_uneven_inputs(ctx, accel.prepare_model(ctx, make())):
            raise InjectedFault("on purpose")

    with pytest.raises(InjectedFault):
        ranks.run(rank, 2, default_group=True)


def test_what_cannot_be_joined_is_refused(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        for models, error, said in (
            ([make()], PrepareError, "a Linear that DDP does not wrap"),
            ([], ConfigError, "the models that the block trains"),
        ):
            with pytest.raises(error, match=said), accel.join_uneven_inputs(ctx, *models):
                pass

    ranks.run(rank, 2)


REAL = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, accel
from test_join_uneven_inputs import by_hand, train
torch.set_num_threads(1)
with accel.session(device="cpu") as ctx:
    for initial in (True, False):  # False makes DDP wait in C++, which simulated ranks cannot
        got = train(ctx, [2, 5], initial=initial)
        torch.testing.assert_close(got, by_hand([2, 5], initial=initial), rtol=0, atol=1e-10)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_uneven_inputs_over_gloo(tmp_path: Path) -> None:
    script = tmp_path / "real.py"
    script.write_text(REAL)
    with script_ranks(script, job(2), Path(__file__).parent, folder=tmp_path) as ranks:
        assert not any(rank.wait(120) for rank in ranks), [rank.said() for rank in ranks]
