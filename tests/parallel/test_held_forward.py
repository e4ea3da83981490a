# SPDX-License-Identifier: Apache-2.0
"""A forward whose gradients are held back runs the module alone, and is what DDP's own would be."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings, strategies as st
from profiles import share
from steps import begin_batch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accel
from accel.testing import Simulator


class Counting(nn.Module):
    """A layer that counts its forwards in a buffer, and remembers for whom torch.compile would have compiled them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1, bias=False, dtype=torch.float64)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.callers: list[object] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        cast(torch.Tensor, self.count).add_(1)
        self.callers.append(cast(Any, DistributedDataParallel)._get_active_ddp_module())
        return self.layer(inputs)


def inputs_of(rank: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + micro)
    return torch.randn(2, 3, dtype=torch.float64, generator=generator)


def train(ctx: accel.DistContext, steps: int, micros: int, *, bare: bool) -> tuple[list[int], torch.Tensor]:
    """Every forward's count, each rank having begun at its own, and the weight after training."""
    torch.manual_seed(0)
    model = accel.prepare_model(ctx, Counting())
    assert cast(Any, model).bare
    cast(Any, model).bare = bare
    inner = accel.unwrap_model(model)
    assert isinstance(inner, Counting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = list[int]()
    state = accel.train_state(ctx, accumulation=steps)
    for micro in range(micros):
        inner.get_buffer("count").add_(ctx.rank)  # drifts, until DDP sends rank 0's
        state = begin_batch(ctx, state, last=micro == micros - 1)
        with accel.accumulate(ctx, state, model):
            state = accel.backward(ctx, model(inputs_of(ctx.rank, micro)).square().mean(), state)
        counts.append(int(inner.get_buffer("count")))
        assert inner.callers[-1] is model
        if state.sync:
            state = accel.optimizer_step(ctx, optimizer, state)
    return counts, inner.layer.weight.detach()


@settings(max_examples=share(0.24), deadline=None)
@given(world=st.integers(2, 4), steps=st.integers(1, 4), micros=st.integers(1, 9))
def test_it_is_what_ddps_own_would_be(world: int, steps: int, micros: int) -> None:
    with Simulator() as simulator:
        bare = simulator.run(lambda ctx: train(ctx, steps, micros, bare=True), world)
        whole = simulator.run(lambda ctx: train(ctx, steps, micros, bare=False), world)
    assert [counts for counts, _ in bare] == [counts for counts, _ in whole]
    assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in zip(bare, whole, strict=True))


def test_ddp_does_nothing_in_it(ranks: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    own, calls = DistributedDataParallel.forward, list[object]()

    def forward(self: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return cast(Any, own)(self, *inputs, **kwargs)

    def rank(ctx: accel.DistContext) -> int:
        model = accel.prepare_model(ctx, nn.Linear(3, 1))
        state = accel.train_state(ctx, accumulation=4)
        before = sum(each is model for each in calls)
        for _ in range(4):
            state = begin_batch(ctx, state)
            with accel.accumulate(ctx, state, model):
                state = accel.backward(ctx, model(torch.ones(1, 3)).sum(), state)
        return sum(each is model for each in calls) - before

    monkeypatch.setattr(DistributedDataParallel, "forward", forward)
    assert ranks.run(rank, 2) == [1, 1]


class Either(nn.Module):
    """Two layers, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, inputs: torch.Tensor, *, which: int) -> torch.Tensor:
        return self.layers[which](inputs)


def test_it_does_not_end_an_exchange_that_another_forward_began(ranks: Simulator) -> None:
    """What the held backward gives would complete DDP's bucket, and travel to ranks that do not expect it."""

    def rank(ctx: accel.DistContext) -> float:
        model = accel.prepare_model(ctx, Either())
        state = accel.train_state(ctx)
        accel.backward(ctx, model(torch.ones(1, 2), which=0).sum(), begin_batch(ctx, state))
        if ctx.rank == 0:
            with (
                pytest.raises(RuntimeError, match="finished reduction in the prior iteration"),
                accel.no_sync(ctx, model),
            ):
                model(torch.ones(1, 2), which=1).sum().backward()
        return accel.reduce(ctx, torch.ones(())).item()

    assert ranks.run(rank, 2) == [2.0, 2.0]


def test_ranks_without_inputs_answer_windows_of_several(ranks: Simulator) -> None:
    micros = [4, 2]

    def rank(ctx: accel.DistContext) -> torch.Tensor:
        torch.manual_seed(0)
        model = accel.prepare_model(ctx, nn.Linear(3, 1, bias=False).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = accel.train_state(ctx, accumulation=2)
        with accel.join_uneven_inputs(ctx, model):
            for micro in range(micros[ctx.rank]):
                state = begin_batch(ctx, state)
                with accel.accumulate(ctx, state, model):
                    state = accel.backward(ctx, model(inputs_of(ctx.rank, micro)).square().mean(), state)
                if state.sync:
                    state = accel.optimizer_step(ctx, optimizer, state)
        return accel.unwrap_model(model).weight.detach()

    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False).double()
    for window in range(2):
        model.zero_grad()
        for own, count in enumerate(micros):
            for micro in range(2 * window, min(2 * window + 2, count)):
                (model(inputs_of(own, micro)).square().mean() / 4).backward()
        with torch.no_grad():
            model.weight -= 0.1 * cast(torch.Tensor, model.weight.grad)
    for weight in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(weight, model.weight.detach(), rtol=1e-12, atol=0)


class Meeting(nn.Module):
    """Its forward meets the other rank, after it and before."""

    def __init__(self, ctx: accel.DistContext) -> None:
        super().__init__()
        self.ctx, self.layer = ctx, nn.Linear(1, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            accel.wait_for_everyone(self.ctx)
        return self.layer(inputs)


def test_no_replica_stays_marked_behind_forwards_that_overlap(ranks: Simulator) -> None:
    """The first rank to begin is the first to end: a thread runs each simulated rank."""

    def rank(ctx: accel.DistContext) -> None:
        model = accel.prepare_model(ctx, Meeting(ctx))
        if ctx.rank:
            accel.wait_for_everyone(ctx)
        _ = model(torch.ones(1))
        if not ctx.rank:
            accel.wait_for_everyone(ctx)

    ranks.run(rank, 2, default_group=True)
    assert cast(Any, DistributedDataParallel)._active_ddp_module is None
