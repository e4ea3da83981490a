# SPDX-License-Identifier: Apache-2.0
"""Settings of sharding in a plan: units, ignored modules, resharding, prefetch, offload; a run is the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from catching import assert_raises
from planned_parts import fsdp_units
from steps import ByState
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW

import accel
from accel.errors import ConfigError, PrepareError
from accel.parallel import Plan
from accel.parallel.axes.shard._options import reshard_setting
from accel.testing import Simulator

EXACT = {"rtol": 0, "atol": 1e-13}


class Block(nn.Module):
    """Two products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.down(torch.tanh(self.up(inputs)))


class Net(nn.Module):
    """Blocks in a list, between two ends and beside a frozen scale."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.LayerNorm(4).requires_grad_(False)
        self.last = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return torch.tanh(self.last(self.scale(hidden)))


def _net(seed: int = 4) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net().double()


def _whole(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [each.full_tensor() if isinstance(each, DTensor) else each.detach().clone() for each in tensors]


def _train(ctx: accel.DistContext, plan: Plan | None, seed: int = 4) -> Any:
    """Two clipped steps of two micro-batches, with an evaluation before each."""
    model = _net(seed)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = AdamW(trained, lr=0.01) if plan == PLANS["offload"] else SGD(trained, lr=0.5)
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan)
    run = ByState(ctx, 2)
    seen = []
    share, count = ctx.data_parallel
    for micro in range(4):
        rows = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(micro)).chunk(count)[
            share
        ]
        with torch.no_grad():
            seen.append(float(accel.reduce(ctx, model(rows).square().mean(), op="mean")))
        run.begin()
        with run.accumulate(model):
            run.backward(model(rows).square().mean(), weight=len(rows))
        if run.sync:
            run.step(optimizer, max_norm=0.05)
            seen.append(run.grad_norm)
    assert all(each.is_cpu for state in optimizer.state.values() for each in state.values())
    return torch.tensor(seen), _whole(model.parameters())


PLANS = {
    "plain": Plan(),
    "offload": Plan(offload=True),
    "kept after forward": Plan(reshard_after_forward=False),
    "all put apart": Plan(reshard_after_forward=True),
    "put apart over two": Plan(reshard_after_forward=2),
    "over all": Plan(reshard_after_forward=4),
    "over one": Plan(reshard_after_forward=1),
    "prefetch": Plan(prefetch=2),
    "products as units": Plan(units=("blocks.*.up", "first", "Block")),
    "units by size": Plan(units=30),
    "one alone": Plan(ignored=("scale",)),
    "all": Plan(offload=True, reshard_after_forward=False, prefetch=1, units=("Linear",), ignored=("LayerNorm",)),
}


QUICK = ("plain", "offload", "put apart over two", "all")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in PLANS]
)
def test_a_run_is_that_of_one_process_under_every_plan(ranks: Simulator, name: str) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        return _train(accel.replace(ctx, strategy="fsdp"), PLANS[name], seed=4 + ctx.rank)

    alone = _train(accel.single(), PLANS[name])
    for got in ranks.run(rank, 4, default_group=True):
        torch.testing.assert_close(got, alone, **EXACT)


@pytest.mark.parametrize("mesh", ["dp_replicate=2,dp_shard=2", "dp=2,tp=2"])
def test_one_plan_serves_all_meshes(ranks: Simulator, mesh: str) -> None:
    tensor = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    plan = Plan(offload=True, reshard_after_forward=2, prefetch=1, units=("Block",), tensor=tensor)

    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh=mesh, strategy="fsdp" if "shard" in mesh else "ddp")
        return _train(accel.replace(ctx, mesh=ctx.mesh), plan)

    alone = _train(accel.single(), plan)
    for got in ranks.run(rank, 4, default_group=True):
        torch.testing.assert_close(got, alone, **EXACT)


def test_units_are_those_that_the_plan_names() -> None:
    model = _net()
    blocks = tuple(f"blocks.{at}" for at in range(3))
    assert fsdp_units(model, units=("Block",)) == fsdp_units(model, units=("blocks.*",)) == (*blocks, "")
    assert fsdp_units(model, units=("blocks.1.up", "last")) == ("blocks.1.up", "last", "")
    assert fsdp_units(model, units=()) == ("",)
    products = [f"{block}.{part}" for block in blocks for part in ("down", "up")]
    assert fsdp_units(model, units=1) == (*products, "first", "last", "scale", "")
    assert fsdp_units(model, units=50) == (*blocks, "")
    assert fsdp_units(model, units=10_000) == ("",)
    model.last.weight = model.first.weight
    assert "first" not in fsdp_units(model, units=1)


REFUSED = {
    "no such module": (
        Plan(units=("blocks.*.middle", "Blok")),
        PrepareError,
        {"got": r"^'blocks\.\*\.middle', 'Blok'$", "where": r"^Plan\.units"},
    ),
    "no such class": (Plan(ignored=("LayerNrm",)), PrepareError, {"where": r"Plan\.ignored", "fix": "`LayerNorm`"}),
    "a list": (
        Plan(units=("blocks",)),
        PrepareError,
        {"got": "blocks: a ModuleList has no forward$", "where": r"^Plan\.units"},
    ),
    "trainable": (
        Plan(ignored=("blocks.0",)),
        PrepareError,
        {"problem": "trainable", "got": r"^blocks\.0\.up\.weight$", "where": r"^Plan\.ignored"},
    ),
    "divisor": (
        Plan(reshard_after_forward=3),
        ConfigError,
        {"expected": "a number that divides 4", "got": "^3$", "where": r"^Plan\.reshard_after_forward"},
    ),
    "several": (
        Plan(gather_dtype="bf16", units=("a",), ignored=("b",), reshard_after_forward=3),
        PrepareError,
        {
            "problem": "refused for several reasons",
            "got": r"(?s)\n- .*gather_dtype.*\n- .*'b'.*\n- .*'a'.*\n- .*divides 4",
        },
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_told_before_anything_moves(ranks: Simulator, name: str) -> None:
    plan, error, fields = REFUSED[name]

    def rank(ctx: accel.DistContext) -> bool:
        model = _net()
        with assert_raises(error, **fields):
            accel.prepare(accel.replace(ctx, strategy="fsdp"), model, plan=plan)
        return any(isinstance(each, FSDPModule) for each in model.modules())

    assert ranks.run(rank, 4, default_group=True) == [False] * 4


def test_parts_of_a_mesh_are_not_resharded_by_number(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="dp=4,tp=2", strategy="fsdp")
        with assert_raises(PrepareError, got="a mesh of 4 of 8 ranks"):
            accel.prepare_model(ctx, _net(), plan=Plan(reshard_after_forward=2))

    ranks.run(rank, 8, default_group=True)


def test_parameters_stay_whole_for_the_backward_where_the_plan_says_so(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext, plan: Plan) -> Any:
        model = accel.prepare(accel.replace(ctx, strategy="fsdp"), _net(), plan=plan)
        model(torch.ones(1, 4, dtype=torch.float64)).sum()
        inner = [not isinstance(each, DTensor) for each in model.blocks[0].parameters()]
        with torch.no_grad():
            model(torch.ones(1, 4, dtype=torch.float64))
        assert all(isinstance(each, DTensor) for each in model.parameters())
        return all(inner)

    for reshard, whole in ((None, False), (True, False), (False, True), (1, True)):
        plan = Plan(reshard_after_forward=reshard)
        assert ranks.run(lambda ctx, plan=plan: rank(ctx, plan), 2, default_group=True) == [whole] * 2


@pytest.mark.parametrize(
    ("option", "shards", "expected"),
    [(None, 4, None), (True, 4, True), (False, 1, False), (1, 4, False), (4, 4, True), (2, 4, 2), (2, 1, None)],
)
def test_a_number_of_ranks_that_means_a_bool_is_one(option: Any, shards: int, expected: Any) -> None:
    assert reshard_setting(option, shards) is expected or reshard_setting(option, shards) == expected == 2


def test_ignored_modules_begin_with_the_first_ranks_values_and_may_be_of_any_shape(ranks: Simulator) -> None:
    class Scaled(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.product = nn.Linear(2, 2)
            self.factor = nn.Module()
            self.factor.value = nn.Parameter(torch.tensor(value), requires_grad=False)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.product(inputs) * self.factor.value

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, strategy="fsdp")
        model = accel.prepare(ctx, Scaled(1.0 + ctx.rank), plan=Plan(ignored=("factor",)))
        assert not isinstance(model.factor.value, DTensor)
        return float(model.factor.value)

    assert ranks.run(rank, 2, default_group=True) == [1.0, 1.0]
