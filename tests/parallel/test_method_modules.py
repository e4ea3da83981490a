# SPDX-License-Identifier: Apache-2.0
"""Modules without a forward, which a model uses by their methods, train on meshes as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from steps import begin_batch
from torch import Tensor, nn

import accel
from accel.parallel import Plan
from accel.testing import Simulator

WIDTH, STREAMS = 8, 3


class Connection(nn.Module):
    """Mixes streams of hidden states before and after a block, by two methods."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.gate = nn.Parameter(torch.randn(STREAMS, STREAMS + 1) * 0.3), nn.Linear(WIDTH, STREAMS + 1)
        self.scale = nn.Parameter(torch.ones(STREAMS))

    def before(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        mixed = torch.einsum("bnm,bnd->bmd", self.mix + self.gate(streams).tanh(), streams)
        return mixed[:, 0], mixed[:, 1:]

    def after(self, streams: Tensor, out: Tensor) -> Tensor:
        return streams + torch.einsum("bd,n->bnd", out, self.scale)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.connections = nn.ModuleList(Connection() for _ in range(2))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        streams = x[:, None].repeat(1, STREAMS, 1)
        for connection, block in zip(self.connections, self.blocks, strict=True):
            hidden, streams = connection.before(streams)
            streams = connection.after(streams, block(hidden))
        return streams.sum(1)


def train(ctx: accel.DistContext, mesh: str, plan: Plan) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps, with batches of several sizes; the norms and the parameters."""
    ctx = accel.replace(ctx, mesh=mesh, strategy="fsdp") if mesh else ctx
    torch.manual_seed(3)
    model: Any = Model().double()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan, example=rows[:4])
    state, norms = accel.train_state(ctx), list[float]()
    share, shares = ctx.data_parallel
    for whole in rows.split([16, 4, 4]):
        own = whole[share::shares]
        state = begin_batch(ctx, state)
        _, state = accel.forward_backward(
            ctx, model, state, own, loss_fn=lambda out: (out - 0.5).square().sum(), weight=len(own)
        )
        state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.5)
        assert state.grad_norm is not None
        norms.append(float(state.grad_norm))
    return norms, dict(accel.get_state_dict(ctx, model, dst=None))


@pytest.mark.parametrize(
    ("mesh", "size", "units"),
    [
        ("dp=2,tp=2", 4, "auto"),
        ("pp=2", 2, "auto"),
        ("dp=2,pp=2", 4, ("connections.*.gate", "blocks.*")),  # of which each stage has some
    ],
)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_modules_used_by_methods_train_as_in_one_process(ranks: Simulator, mesh: str, size: int, units: Any) -> None:
    plan = Plan(units=units, micro_batches=2) if "pp" in mesh else Plan(units=units)
    expected = train(accel.single(), "", Plan())
    for got in ranks.run(lambda ctx: train(ctx, mesh, plan), size, default_group=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
