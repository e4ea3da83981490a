# SPDX-License-Identifier: Apache-2.0
"""`tensor.data = values` has no effect on a DTensor, and takes a gradient out of DDP's buckets: refused by forwards,
steps and saves. Changes in place go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from torch import Tensor, nn

import accel
from accel.errors import StepError
from accel.testing import Simulator
from accel.training import Ema

MESHES = [
    ("dp=2", "fsdp", 2),
    ("tp=2", "ddp", 2),
    pytest.param("dp=2,tp=2", "ddp", 4, marks=pytest.mark.slow),
]
NAMES = "0.weight, 0.bias, 2.weight and 1 more"


class Assigns(torch.optim.SGD):
    """An optimizer that assigns, as many short ones do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - 0.1 * parameter.grad


def _prepared(ctx: accel.DistContext, mesh: str, strategy: Any, kind: Any) -> tuple[accel.DistContext, Any, Any]:
    torch.manual_seed(0)
    ctx = accel.replace(ctx, mesh=mesh, strategy=strategy) if ctx.world_size > 1 else ctx
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    return ctx, *accel.prepare(ctx, net, kind(net.parameters(), lr=0.1))


def _step(ctx: accel.DistContext, model: nn.Module, optimizer: Any, state: accel.TrainState) -> accel.TrainState:
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
    state = accel.backward(ctx, model(x.to(next(model.parameters()).dtype)).square().mean(), state.next(), weight=4)
    return accel.optimizer_step(ctx, optimizer, state)


def _halve(model: nn.Module) -> None:
    for each in model.parameters():
        each.data = each.data * 0.5


@pytest.mark.parametrize(("mesh", "strategy", "size"), MESHES)
def test_an_assignment_is_refused_by_the_next_forward_or_step_and_by_saves(
    ranks: Simulator, tmp_path: Path, mesh: str, strategy: str, size: int
) -> None:
    def halved(ctx: accel.DistContext) -> None:
        ctx, model, optimizer = _prepared(ctx, mesh, strategy, torch.optim.SGD)
        state = _step(ctx, model, optimizer, accel.train_state(ctx))
        _halve(model)
        calls: list[Callable[[], object]] = [
            lambda: model(torch.ones(2, 4, dtype=torch.float64)),
            lambda: _step(ctx, model, optimizer, state),
            lambda: accel.save_state(ctx, tmp_path, {"model": model, "state": state}, step=1),
            lambda: accel.get_state_dict(ctx, model, dst=None),
        ]
        for call in calls:
            with assert_raises(StepError, problem="has no effect", got=NAMES, fix=r"parameter.copy_\(values\)"):
                call()

    ranks.run(halved, size, default_group=True)


def test_an_optimizer_that_assigns_is_refused_at_its_second_step(ranks: Simulator) -> None:
    def train(ctx: accel.DistContext) -> None:
        ctx, model, optimizer = _prepared(ctx, "dp=2", "fsdp", Assigns)
        state = _step(ctx, model, optimizer, accel.train_state(ctx))
        with assert_raises(StepError, problem="has no effect", got=NAMES):
            _step(ctx, model, optimizer, state)

    ranks.run(train, 2, default_group=True)


@pytest.mark.parametrize(("mesh", "strategy", "size"), [("dp=2", "ddp", 2), *MESHES])
@pytest.mark.parametrize("assigns", [True, False])
def test_an_assignment_to_a_gradient_is_refused_and_a_change_in_place_taken(
    ranks: Simulator, mesh: str, strategy: str, size: int, assigns: bool
) -> None:
    def train(ctx: accel.DistContext) -> Tensor:
        ctx, model, optimizer = _prepared(ctx, mesh, strategy, torch.optim.SGD)
        state = accel.train_state(ctx)
        for _ in range(2):
            loss = model(torch.ones(4, 4, dtype=torch.float64)).square().mean()
            state = accel.backward(ctx, loss, state.next(), weight=4)
            state = accel.unscale_gradients(ctx, optimizer, state)
            for each in model.parameters():
                if assigns and ctx.world_size > 1:
                    each.grad.data = each.grad.data * 0.5
                else:
                    each.grad.data *= 0.5
            state = accel.optimizer_step(ctx, optimizer, state)
        return accel.get_state_dict(ctx, model, dst=None)["0.weight"]

    def refused(ctx: accel.DistContext) -> None:
        with assert_raises(StepError, fix=r"parameter.grad.copy_\("):
            train(ctx)

    if assigns:
        ranks.run(refused, size, default_group=True)
        return
    for each in ranks.run(train, size, default_group=True):
        torch.testing.assert_close(each, train(accel.single()))


@pytest.mark.parametrize(("mesh", "strategy", "size"), MESHES)
def test_changes_in_place_and_conversions_are_taken(
    ranks: Simulator, tmp_path: Path, mesh: str, strategy: str, size: int
) -> None:
    def changed(ctx: accel.DistContext) -> dict[str, Tensor]:
        ctx, model, optimizer = _prepared(ctx, mesh, strategy, torch.optim.SGD)
        average = Ema(model, decay=0.5)
        state = _step(ctx, model, optimizer, accel.train_state(ctx))
        for each in model.parameters():
            each.data *= 0.5  # in place, and then an assignment of the same memory
            with torch.no_grad():
                each.copy_(each * 2)
        average.update_(model)
        with average.applied_to(model):
            _ = model(torch.ones(2, 4, dtype=torch.float64))
        model.load_state_dict(model.state_dict())
        accel.save_state(ctx, tmp_path, {"model": model, "state": state}, step=1)
        state = accel.load_state(ctx, tmp_path, {"model": model, "state": state})["state"]
        state = _step(ctx, model, optimizer, state)
        model.to(torch.float32).to(torch.float64)
        state = _step(ctx, model, optimizer, state)
        return accel.get_state_dict(ctx, model, dst=None)

    alone = changed(accel.single())
    for each in ranks.run(changed, size, default_group=True):
        torch.testing.assert_close(each, alone, atol=1e-6, rtol=0)


def test_a_part_that_a_load_fills_trains(ranks: Simulator, tmp_path: Path) -> None:
    """The load gives parameters other memory, in place."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    def filled(ctx: accel.DistContext) -> dict[str, Tensor]:
        ctx = accel.replace(ctx, mesh="tp=2" if ctx.world_size > 1 else "")
        model = accel.prepare_model(ctx, accel.init_empty_weights(make), allocate=False)
        accel.bigmodel.load_checkpoint_in_model(ctx, model, tmp_path)
        optimizer = accel.prepare_optimizer(ctx, torch.optim.SGD(model.parameters(), lr=0.1))
        _step(ctx, model, optimizer, accel.train_state(ctx))
        return accel.get_state_dict(ctx, model, dst=None)

    accel.save_model(accel.single(), make(), tmp_path)
    alone = filled(accel.single())
    for each in ranks.run(filled, 2, default_group=True):
        torch.testing.assert_close(each, alone)
