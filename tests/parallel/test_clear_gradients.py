# SPDX-License-Identifier: Apache-2.0
"""`clear_gradients` leaves nothing, wherever torch keeps it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import accel


class Nested(nn.Module):
    """Parameters in each kind of container, one of them shared, one None, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.layers = nn.ModuleList([self.first, nn.ModuleDict({"norm": nn.LayerNorm(3)})])
        self.scales = nn.ParameterList([torch.ones(3), torch.ones(3)])
        self.bias = nn.Parameter(torch.zeros(3))
        self.none = None
        self.register_parameter("missing", None)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)


@pytest.mark.parametrize("compiled", [False, True])
def test_every_parameter_of_every_model_loses_its_gradient(compiled):
    models = [torch.compile(Nested(), backend="eager") if compiled else Nested() for _ in range(2)]
    parameters = [each for model in models for each in model.parameters()]
    assert len(parameters) == 14
    for each in parameters:
        each.grad = torch.ones_like(each)
    accel.training.clear_gradients(*models)
    assert [each.grad for each in parameters] == [None] * 14


def _spread(layout: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (2,))}
    if layout == "mixed precision":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if layout == "replicas of shards":
        options["mesh"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(model[0], **options)
    fully_shard(model, **options)
    return model


def _backward(model: Any, inputs: torch.Tensor, *, holds: str = "") -> None:
    model.set_requires_gradient_sync(holds != "sync")
    model.set_requires_all_reduce(holds != "all-reduce")
    model(inputs).square().mean().backward()


@pytest.mark.parametrize(
    ("layout", "holds"),
    [("shards", "sync"), ("mixed precision", "sync"), ("replicas of shards", "all-reduce")],
)
@pytest.mark.parametrize("clears", [True, False], ids=["cleared", "left"])
def test_what_fully_shard_holds_is_dropped(ranks, layout, holds, clears):
    """If this fails with another torch, look at `accel.parallel._leftovers`: its private names have changed."""

    def rank(ctx):
        inputs = torch.ones(2, 4) * (1 + ctx.rank)
        fresh, model = _spread(layout), _spread(layout)
        _backward(model, 100 * inputs, holds=holds)
        if clears:
            accel.training.clear_gradients(model)
        else:
            model.zero_grad()
        for each in (fresh, model):
            _backward(each, inputs)
        return all(
            torch.equal(one.grad.to_local(), other.grad.to_local())
            for one, other in zip(fresh.parameters(), model.parameters(), strict=True)
        )

    assert ranks.run(rank, 2, default_group=True) == [clears, clears]


@pytest.mark.parametrize("grad_mode", [True, False])
def test_a_forward_without_a_backward_hides_no_gradient(ranks, grad_mode):
    def rank(ctx):
        model = _spread("shards")
        sharded = list(model.parameters())
        _backward(model, torch.ones(2, 4))
        with torch.set_grad_enabled(grad_mode):
            model(torch.ones(2, 4))  # leaves the outermost parameters whole
        accel.training.clear_gradients(model)
        return [each.grad for each in sharded]

    assert ranks.run(rank, 2, default_group=True) == [[None] * 4] * 2
