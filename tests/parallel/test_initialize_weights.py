# SPDX-License-Identifier: Apache-2.0
"""Empty models are initialised by a key: the same values on any mesh, and those that a module gives itself."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from catching import assert_raises
from language_models import make_objects, plan_of
from torch import nn

import accel
from accel.parallel import Axes
from accel.seeding import Key
from accel.tensors import full_tensor
from accel.testing import Simulator, simulate

EXPERTS = 4
KEY = Key(5)


def _initialised(ctx: accel.DistContext, axes: Axes, strategy: Any = "ddp") -> dict[str, torch.Tensor]:
    ctx = accel.replace(ctx, mesh=str(axes) or "dp=1", strategy=strategy)
    with torch.device("meta"):
        model, _ = make_objects(ctx, tied=True, experts=EXPERTS)
    model = accel.prepare_model(ctx, model, plan=plan_of(EXPERTS))
    assert accel.bigmodel.initialize_weights(ctx, model, KEY) is model
    held = accel.unwrap_model(model).named_parameters(remove_duplicate=False)
    return {name: full_tensor(each).clone() for name, each in held}


@functools.cache
def _alone() -> dict[str, torch.Tensor]:
    return simulate(lambda ctx: _initialised(ctx, Axes()), 1, default_group=True)[0]


@pytest.mark.parametrize(
    ("axes", "strategy"),
    [
        (Axes(dp=2, tp=2, ep=4), "fsdp"),
        (Axes(pp=2), "ddp"),
        pytest.param(Axes(dp=3), "fsdp", marks=pytest.mark.slow),
        pytest.param(Axes(pp=2, dp=2, tp=2, ep=2), "fsdp", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_values_are_the_same_on_any_mesh(ranks: Simulator, axes: Axes, strategy: Any) -> None:
    expected = _alone()
    found = ranks.run(lambda ctx: _initialised(ctx, axes, strategy), axes.world_size, default_group=True)
    assert {name for each in found for name in each} == expected.keys()
    for each in found:
        for name, value in each.items():
            assert torch.equal(value, expected[name]), name


def test_values_are_those_that_a_module_gives_itself() -> None:
    found = _alone()
    layer = nn.Linear(16, 32, dtype=torch.float64)
    with accel.seeding.seeded(accel.single(), KEY.fold_in("weights", "blocks.0.mlp.up")):
        layer.reset_parameters()
    assert torch.equal(found["blocks.0.mlp.up.weight"], layer.weight)
    assert torch.equal(found["norm.weight"], torch.ones(16, dtype=torch.float64))
    assert torch.equal(found["head.weight"], found["embed.tokens.weight"])
    assert float(found["blocks.1.mlp.experts.weight"].std()) == pytest.approx(0.25, rel=0.1)


class Statistics(nn.Module):
    """Attention, whose own initialisation reaches below it, and statistics that integers count."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        _ = nn.init.constant_(self.scale, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.attention(x, x, x)[0].mean(1)) * self.scale.sum()


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_layers_of_torch_begin_as_their_constructors_leave_them(ranks: Simulator, mesh: str) -> None:
    def rank(ctx: accel.DistContext, mesh: str) -> dict[str, torch.Tensor]:
        ctx = accel.replace(ctx, mesh=mesh, strategy="fsdp")
        with torch.device("meta"):
            model = Statistics()
        model = accel.prepare_model(ctx, model)
        accel.bigmodel.initialize_weights(ctx, model, KEY)
        return {name: full_tensor(each).clone() for name, each in model.state_dict().items()}

    alone = ranks.run(lambda ctx: rank(ctx, "dp=1"), 1, default_group=True)[0]
    assert alone["attention.out_proj.bias"].eq(0).all()
    assert alone["norm.running_var"].eq(1).all()
    for found in ranks.run(lambda ctx: rank(ctx, mesh), 2, default_group=True):
        assert found.keys() == alone.keys()
        assert all(torch.equal(value, alone[name]) for name, value in found.items())


def test_values_that_came_stay_and_a_function_gives_the_others() -> None:
    ctx = accel.single()
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = accel.prepare_model(ctx, model)
    with torch.no_grad():
        model[0].weight.fill_(3.0)
        model[0].bias.fill_(3.0)
    seen: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        seen.append(module)
        for each in module.parameters():
            _ = each.data.fill_(4.0)

    accel.bigmodel.initialize_weights(ctx, model, KEY, init=init)
    assert [float(each.detach().mean()) for each in model.parameters()] == [3.0, 3.0, 4.0, 4.0]
    assert [type(each) for each in seen] == [nn.Linear]


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))


def test_modules_that_nothing_initialises_are_named() -> None:
    ctx = accel.single()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Bare())
    model = accel.prepare_model(ctx, model)
    with assert_raises(accel.errors.PrepareError, expected="reset_parameters", got="1"):
        accel.bigmodel.initialize_weights(ctx, model, KEY)
    with assert_raises(accel.errors.PrepareError, problem="left values out", got=r"0\.weight"):
        accel.bigmodel.initialize_weights(ctx, model, KEY, init=lambda module: None)
