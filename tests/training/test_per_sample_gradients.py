# SPDX-License-Identifier: Apache-2.0
"""Gradients of each sample by torch.func, as private training clips them: alike on replicas, refused on shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from catching import assert_raises
from torch import Tensor, nn

import accel
from accel.errors import AccelError, ConfigError, PrepareError
from accel.testing import Simulator


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def clipped(model: nn.Module, rows: Tensor) -> dict[str, Tensor]:
    """The sum of the rows' gradients, each with a norm of at most one."""

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (row[None],)).square().sum()

    values = {name: each.detach() for name, each in model.named_parameters()}
    grads: dict[str, Tensor] = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, rows)
    norm = torch.stack([each.flatten(1).square().sum(1) for each in grads.values()]).sum(0).sqrt()
    return {name: torch.einsum("b,b...->...", 1 / norm.clamp(min=1), each) for name, each in grads.items()}


def rows_of(ctx: accel.DistContext) -> Tensor:
    return torch.linspace(-2, 2, 32, dtype=torch.float64).view(8, 4)[ctx.rank :: ctx.world_size]


def test_replicas_step_with_clipped_gradients_of_each_sample(ranks: Simulator) -> None:
    def train(ctx: accel.DistContext) -> dict[str, Tensor]:
        net = make()
        model, optimizer = accel.prepare(ctx, net, torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in range(2):
            for name, each in accel.reduce(ctx, clipped(net, rows_of(ctx)), "sum").items():
                net.get_parameter(name).grad = each
            optimizer.step()
        return accel.get_state_dict(ctx, model, dst=None)

    alone = train(accel.single())
    for each in ranks.run(train, 2):
        torch.testing.assert_close(each, alone)


@pytest.mark.parametrize(
    ("mesh", "strategy", "kind", "fields"),
    [
        ("dp=2", "fsdp", ConfigError, {"problem": "other parameters", "fix": r"plain\.load_state_dict"}),
        ("tp=2", "ddp", PrepareError, {"got": r"torch\.func"}),
    ],
)
def test_shards_refuse_them(
    ranks: Simulator, mesh: str, strategy: Any, kind: type[AccelError], fields: dict[str, str]
) -> None:
    def refused(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh=mesh, strategy=strategy)
        model = accel.prepare_model(ctx, make())
        with assert_raises(kind, **fields):
            _ = clipped(model, torch.ones(2, 4, dtype=torch.float64))

    ranks.run(refused, 2, default_group=True)
