# SPDX-License-Identifier: Apache-2.0
"""Parameters without a dimension or an element: whole on each rank of a sharded model, trained as in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from catching import caught
from steps import ByState, begin_batch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW

import accel
from accel.testing import Simulator

TOLERANCE = {"rtol": 0, "atol": 1e-10}
PLAN = accel.parallel.Plan(tensor={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
SPREADS = [
    ("fsdp", ""),
    ("fsdp", "dp_replicate=2,dp_shard=2"),
    ("ddp", "tp=2"),
    ("fsdp", "dp=2,tp=2"),
    pytest.param(("ddp", "dp=2,tp=2"), marks=pytest.mark.slow),
]


class Gated(nn.Module):
    """A block behind a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(4, 8), nn.Linear(8, 4), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.down(torch.tanh(self.up(x)))


class Times(nn.Module):
    """Multiplies by a scale that another module has too."""

    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Scaled(nn.Module):
    """Blocks, no tokens, and scales of the whole: trained, shared by two modules, frozen, and used if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated() for _ in range(2))
        self.head = nn.Linear(4, 2)
        self.tokens = nn.Parameter(torch.empty(0, 4))
        self.logit_scale = nn.Parameter(torch.tensor(1.5))
        self.same = Times(self.logit_scale)
        self.frozen = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.spare, self.uses = nn.Parameter(torch.tensor(2.0)), True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.tokens, x])
        for block in self.blocks:
            x = block(x)
        x = self.same(self.head(x) * self.logit_scale.exp() * self.frozen)
        return x * self.spare if self.uses else x


def _make(ctx: accel.DistContext, *, before: bool = False, **options: Any) -> nn.Module:
    with accel.seeding.seeded(ctx, 0):
        model = Scaled().double()
    if before:
        accel.checkpoint_activations(model, Gated)
    if ctx.rank:
        with torch.no_grad():  # rank 0's values count
            for each in model.parameters():
                each.fill_(9.0)
    return accel.prepare_model(ctx, model, **{"plan": PLAN, "find_unused_parameters": True} | options)


def _optimizer(model: nn.Module, kind: Any) -> Any:
    return kind([each for each in model.parameters() if each.requires_grad])


def _rows(ctx: accel.DistContext, seed: int) -> Tensor:
    place, places = ctx.data_parallel
    return torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))[place::places]


def _train(ctx: accel.DistContext, model: nn.Module, optimizer: Any, *, steps: int = 2) -> list[float]:
    """Steps of two micro-batches, the spare scale in the first of them alone; and their norms."""
    run = ByState(ctx, 2)
    norms = []
    for at in range(2 * steps):
        run.begin()
        accel.unwrap_model(model).uses = at == 0
        with run.accumulate(model):
            with accel.autocast(ctx):
                loss = model(_rows(ctx, at)).square().mean()
            run.backward(loss)
        if run.sync:
            run.step(optimizer, max_norm=0.5)
            norms.append(float(run.grad_norm))
    return norms


def _under(ranks: Simulator, fn: Any, spread: tuple[Any, str], **more: Any) -> Any:
    strategy, mesh = spread
    size = 4 if mesh.count("=") == 2 else 2
    return ranks.run(lambda ctx: fn(accel.replace(ctx, strategy=strategy, mesh=mesh, **more)), size, default_group=True)


HEAVY = partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("spread", [("ddp", ""), *SPREADS], ids=lambda each: " ".join(each))
def test_they_train_as_in_one_process(ranks: Simulator, spread: Any) -> None:
    def run(ctx: accel.DistContext) -> Any:
        model = _make(ctx)
        norms = _train(ctx, model, _optimizer(model, HEAVY))
        return dict(accel.get_state_dict(ctx, model, dst=None)), norms

    expected = ranks.run(run, 1)[0]
    assert expected[0]["logit_scale"].shape == ()
    for found in _under(ranks, run, spread):
        torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("kind", [partial(AdamW, foreach=True), partial(AdamW, fused=True)], ids=["foreach", "fused"])
@pytest.mark.parametrize(
    "plan",
    [PLAN, accel.parallel.Plan(offload=True), accel.parallel.Plan(units=("Gated",), reshard_after_forward=False)],
)
def test_optimizers_over_lists_take_them_beside_shards(ranks: Simulator, kind: Any, plan: accel.parallel.Plan) -> None:
    def run(ctx: accel.DistContext) -> Any:
        model = _make(ctx, plan=plan)
        norms = _train(ctx, model, _optimizer(model, kind))
        return dict(accel.get_state_dict(ctx, model, dst=None)), norms

    expected = ranks.run(run, 1)[0]
    for found in _under(ranks, run, ("fsdp", "")):
        torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize(
    "spread",
    [pytest.param(("fsdp", ""), marks=pytest.mark.slow), ("fsdp", "dp=2,tp=2")],
    ids=lambda each: " ".join(each),
)
def test_checkpoints_cross_from_and_to_one_process(ranks: Simulator, spread: Any, tmp_path: Any) -> None:
    def run(ctx: accel.DistContext, path: Any = None, into: str = "") -> Any:
        model = _make(ctx)
        optimizer = _optimizer(model, AdamW)
        items = {"model": model, "optimizer": optimizer}
        if path is not None:
            accel.load_state(ctx, path, items)
        _ = _train(ctx, model, optimizer)
        saved = accel.save_state(ctx, tmp_path / into, items, step=1) if into else None
        return saved, dict(accel.get_state_dict(ctx, model, dst=None))

    alone = ranks.run(partial(run, into="one"), 1)[0][0]
    spreads = _under(ranks, partial(run, into="several"), spread)[0][0]
    expected = ranks.run(partial(run, path=alone), 1)[0][1]
    for found in (ranks.run(partial(run, path=spreads), 1)[0], _under(ranks, partial(run, path=alone), spread)[0]):
        torch.testing.assert_close(found[1], expected, **TOLERANCE)


def test_an_empty_model_is_filled_by_a_load(ranks: Simulator, tmp_path: Any) -> None:
    def run(ctx: accel.DistContext) -> Any:
        full = _make(ctx)
        path = accel.save_state(ctx, tmp_path, {"model": full}, step=1)
        with torch.device("meta"):
            empty = Scaled().double()
        model = accel.prepare_model(ctx, empty)
        accel.load_state(ctx, path, {"model": model})
        return [_train(ctx, each, _optimizer(each, HEAVY), steps=1) for each in (full, model)]

    for full, empty in _under(ranks, run, ("fsdp", "")):
        assert full == empty


@pytest.mark.parametrize("before", [False, True])
def test_recomputation_the_fused_step_and_a_forward_that_fails(ranks: Simulator, before: bool) -> None:
    def run(ctx: accel.DistContext) -> Any:
        model = _make(ctx, before=before)
        if not before:
            accel.checkpoint_activations(model, Gated)
        optimizer = _optimizer(model, HEAVY)
        caught(lambda: model(torch.ones(2, 3, dtype=torch.float64)))
        stored = [type(each) for each in model.parameters() if each.ndim == 0]
        with torch.inference_mode():
            outputs = model(_rows(ctx, 0)[:1] * 0)
        for at in range(3):
            accel.training.fused_step(ctx, model(_rows(ctx, at)).square().mean(), optimizer)
        return stored, outputs.clone(), dict(accel.get_state_dict(ctx, model, dst=None))

    expected = ranks.run(run, 1)[0]
    for stored, *found in _under(ranks, run, ("fsdp", "")):
        assert set(stored) == {DTensor}
        torch.testing.assert_close(found, [*expected[1:]], **TOLERANCE)


def test_precision_and_compiled_blocks(ranks: Simulator) -> None:
    def run(ctx: accel.DistContext, compiled: bool) -> Any:
        model = _make(ctx, find_unused_parameters=False).float()
        if compiled:
            accel.compile_model(model, "repeated", backend="eager")
        accel.unwrap_model(model).uses = True
        loss = model(_rows(ctx, 0).float()).square().mean()
        accel.backward(ctx, loss, begin_batch(ctx))
        return loss.detach(), [each.grad.full_tensor() for each in model.parameters() if each.grad is not None]

    plain, compiled = (_under(ranks, partial(run, compiled=each), ("fsdp", "")) for each in (False, True))
    torch.testing.assert_close(compiled, plain)


def test_a_rank_that_did_not_use_one_is_told(ranks: Simulator) -> None:
    def run(ctx: accel.DistContext) -> Any:
        model = _make(ctx, find_unused_parameters=False)
        model.uses = ctx.rank == 0
        state = accel.backward(ctx, model(_rows(ctx, 0)).square().mean(), begin_batch(ctx))
        return accel.optimizer_step(ctx, _optimizer(model, HEAVY), state)

    error = caught(lambda: _under(ranks, run, ("fsdp", "")))
    assert isinstance(error, accel.errors.StepError)
    assert "no gradient for spare" in str(error)
