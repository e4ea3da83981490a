# SPDX-License-Identifier: Apache-2.0
"""Stages of a pipeline along cp: they compute with plain positions, so attention as written is refused."""

from __future__ import annotations

import pytest
import torch
from catching import assert_raises
from handwritten import Handwritten, named
from steps import ByState
from torch import Tensor, nn

import accel
from accel.errors import ConfigError
from accel.testing import Simulator

MESH = "pp=2,cp=2"
LENGTH = 8


class Crossing(nn.Module):
    """A block of attention that crosses the ranks, or of a layer for each position."""

    def __init__(self, ctx: accel.DistContext, *, attends: bool) -> None:
        super().__init__()
        self.ctx, self.attends = ctx, attends
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if self.attends:
            q = h.unflatten(2, (2, -1)).transpose(1, 2)
            h = accel.parallel.context_attention(self.ctx, q, q, q).transpose(1, 2).flatten(2)
        return x + h


def step(ctx: accel.DistContext, model: nn.Module, inputs: Tensor) -> None:
    plan = accel.parallel.Plan(micro_batches=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spread, optimizer = accel.prepare(ctx, model, optimizer, plan=plan, example=[inputs])
    own = accel.parallel.split_sequence(ctx, {"x": inputs})["x"]
    run = ByState(ctx)
    run.begin()
    _, run.state = accel.forward_backward(
        ctx, spread, run.state, own, targets=own, loss_fn=lambda out, _: out.square().sum(), weight=len(own)
    )
    run.step(optimizer)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", named("min_gpt"), ids=lambda each: each.name)
def test_attention_as_written_is_refused_in_stages(ranks: Simulator, entry: Handwritten) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh=MESH)
        with assert_raises(ConfigError, problem="did not see each other's positions", fix="Leave pp out of the mesh"):
            step(ctx, entry.make(), entry.batch(5, 4, LENGTH).inputs)

    _ = ranks.run(rank, 4, default_group=True)


@pytest.mark.filterwarnings("ignore")
def test_a_stage_may_have_no_attention(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh=MESH)
        torch.manual_seed(0)
        model = nn.Sequential(*(Crossing(ctx, attends=at == 0) for at in range(4)))
        step(ctx, model, torch.randn(4, LENGTH, 8))

    _ = ranks.run(rank, 4, default_group=True)
