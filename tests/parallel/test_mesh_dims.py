# SPDX-License-Identifier: Apache-2.0
"""A mesh along which nothing gives ranks experts of their own is refused before a model changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import msgspec
import pytest
import torch
from catching import assert_raises
from planned_parts import ModelView
from torch import nn
from torch.optim import SGD

import accel
from accel.errors import PrepareError
from accel.parallel import Plan
from accel.parallel._prepare_model import _ORDER, _SPREADS, composition
from accel.parallel._spread import SpreadOptions
from accel.testing import Simulator
from accel.topology import AXIS_NAMES, Dimension


def _stage(ctx: accel.DistContext) -> nn.Module:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(float(ctx.rank))
    return model


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("mesh", ["dp=4,ep=2", "dp=4,ep=4"])
def test_experts_that_no_plan_names_keep_their_values(ranks: Simulator, mesh: str, strategy: str) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh=mesh, strategy=strategy)
        model = _stage(ctx)
        with assert_raises(PrepareError, got="a model that names none"):
            _ = accel.prepare(ctx, model, SGD(model.parameters(), lr=0.1))
        with assert_raises(PrepareError, got="a model that names none"):
            _ = accel.prepare_model(ctx, model)
        with assert_raises(PrepareError, problem="rank 0's experts"):
            _ = accel.parallel.prepare_local_model(ctx, model)
        assert model.weight.eq(ctx.rank).all()

    _ = ranks.run(rank, 4, default_group=True)


def test_every_dimension_has_a_turn_and_is_spread_as_the_strategy_says(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> list[str]:
        return [
            each.dimension
            for mesh, strategy in (("dp=4", "ddp"), ("dp=4", "fsdp"), ("dp_replicate=2,dp_shard=2", "fsdp"))
            for each in composition(accel.replace(ctx, mesh=mesh, strategy=strategy))
        ]

    assert ranks.run(rank, 4, default_group=True) == [["replicate", "shard", "shard"]] * 4
    assert {*_ORDER, "data"} == set(get_args(Dimension)) == AXIS_NAMES.keys()


@pytest.mark.parametrize("name", ["pp", "ep"])
def test_a_dimension_of_one_rank_is_no_dimension(ranks: Simulator, name: str) -> None:
    def rank(ctx: accel.DistContext) -> bool:
        model = accel.unwrap_model(accel.prepare(accel.replace(ctx, mesh=f"{name}=1,dp=2"), _stage(ctx)))
        return bool(model.weight.eq(0).all())

    assert ranks.run(rank, 2, default_group=True) == [True, True]


def test_what_is_no_plan_is_refused() -> None:
    with assert_raises(
        accel.errors.ConfigError,
        problem="the plan is not valid",
        expected=r"an accel\.parallel\.Plan, or None",
        got="dict",
        where="plan=",
    ):
        accel.prepare(accel.single(), nn.Linear(2, 2), plan={"sequence": True})  # type: ignore[call-overload]


def test_refusals_of_several_dimensions_and_of_the_model_are_reported_together(
    ranks: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_ctx: accel.DistContext, _view: ModelView, options: SpreadOptions) -> list[PrepareError]:
        return [PrepareError(f"{type(options).__name__} cannot take it")]

    both = [msgspec.structs.replace(each, refusals=refuse) for each in _SPREADS.values()]
    monkeypatch.setattr("accel.parallel._prepare_model.composition", lambda _ctx: both)
    monkeypatch.setattr("accel.parallel._prepare_model.unspread", lambda _ctx, _view: both)

    def rank(ctx: accel.DistContext) -> str:
        model = nn.ModuleDict({"on": nn.Linear(2, 2, device="meta"), "off": nn.Embedding(2, 2, sparse=True)})
        model["off"].weight.data = model["off"].weight.data.clone()
        ctx = accel.replace(ctx, precision=accel.precision.Precision(params="bf16", master_weights="fp32"))
        with assert_raises(PrepareError, problem="the model is refused for several reasons") as caught:
            accel.prepare_model(ctx, model)
        return caught.value.got

    for got in ranks.run(rank, 2):
        assert got.count("\n- ") == len(both) + 2
        assert all("Options cannot take it" in line for line in got.splitlines()[-len(both) :])
        assert "master weights are for replicated parameters" in got
        assert "sparse gradients are exchanged by DDP only" in got


def compiled() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    vars(model)["_compiled_call_impl"] = model.forward  # as model.compile() does, which imports the compiler
    return model


SEVERAL: dict[str, tuple[int, Callable[[], nn.Module], Plan, tuple[str, ...]]] = {
    "pp=2": (
        2,
        compiled,
        Plan(stages=(("0",), ("1",), ())),
        ("a model that is compiled as one", "another number of stages than the mesh"),
    ),
    "tp=2": (
        2,
        compiled,
        Plan(overlap=True, tensor={"other": "colwise"}),
        ("overlap messages and matmuls", "cannot be spread by this tensor-parallel plan"),
    ),
}


@pytest.mark.parametrize("mesh", SEVERAL)
def test_all_refusals_of_a_dimension_are_in_one_error(ranks: Simulator, mesh: str) -> None:
    size, make, plan, problems = SEVERAL[mesh]

    def rank(ctx: accel.DistContext) -> str:
        with assert_raises(PrepareError, problem="the model is refused for several reasons") as caught:
            accel.prepare_model(accel.replace(ctx, mesh=mesh), make(), plan=plan)
        return caught.value.got

    for got in ranks.run(rank, size, default_group=True):
        lines = [line for line in got.splitlines() if line.startswith("- ")]
        assert len(lines) == len(problems), got
        for line, problem in zip(lines, problems, strict=True):
            assert problem in line
