# SPDX-License-Identifier: Apache-2.0
"""What one stage of a pipeline refuses about its gradients, all ranks raise at once: the others would wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from steps import begin_batch
from torch import Tensor, nn
from torch.optim import SGD

import accel
from accel.testing import Simulator

BATCH = torch.arange(16.0).view(4, 4) / 16


class Block(nn.Module):
    def __init__(self, *, spare: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.spare = nn.Linear(4, 4) if spare else None  # which nothing calls

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class Net(nn.Module):
    def __init__(self, spare: int | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(spare=at == spare) for at in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.blocks:
            x = each(x)
        return x


Finish = Callable[[accel.DistContext, Any, Any, accel.TrainState], object]


def _in_stage(ctx: accel.DistContext, stage: int) -> bool:
    return ctx.axis("pp").rank == stage


def _window(ctx: accel.DistContext, model: Any, state: accel.TrainState | None = None) -> accel.TrainState:
    begun = begin_batch(ctx, state)
    _, state = accel.forward_backward(ctx, model, begun, BATCH, loss_fn=lambda output: output.square().sum(), weight=4)
    return state


def _stage_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.grad is not None]


def _step(ctx: accel.DistContext, _model: Any, optimizer: Any, state: accel.TrainState) -> object:
    return accel.optimizer_step(ctx, optimizer, state).stepped


def _step_without_a_look(ctx: accel.DistContext, _model: Any, optimizer: Any, state: accel.TrainState) -> object:
    return accel.optimizer_step(ctx, optimizer, state, nonfinite="ignore").stepped


def _clip(ctx: accel.DistContext, model: Any, _optimizer: Any, state: accel.TrainState) -> object:
    return accel.clip_grad_norm_(ctx, model.parameters(), 1.0, state)


def _clip_values(ctx: accel.DistContext, model: Any, _optimizer: Any, state: accel.TrainState) -> object:
    return accel.clip_grad_value_(ctx, model.parameters(), 1.0, state)


def _unscale(ctx: accel.DistContext, _model: Any, optimizer: Any, state: accel.TrainState) -> object:
    return accel.unscale_gradients(ctx, optimizer, state)


def _cleared(ctx: accel.DistContext, model: Any, optimizer: Any, state: accel.TrainState) -> object:
    if _in_stage(ctx, 1):
        accel.training.clear_gradients(model)
    return accel.optimizer_step(ctx, optimizer, state)


def _divided_in_part(ctx: accel.DistContext, model: Any, optimizer: Any, state: accel.TrainState) -> object:
    held = _stage_parameters(model) if _in_stage(ctx, 0) else _stage_parameters(model)[:1]
    state = accel.unscale_gradients(ctx, SGD(held, lr=0.1), state)
    return accel.optimizer_step(ctx, optimizer, state)


def _unprepared(ctx: accel.DistContext, _model: Any, optimizer: Any, state: accel.TrainState) -> object:
    given: list[Any] = [optimizer]
    if _in_stage(ctx, 1):
        factor = nn.Parameter(torch.ones(2))
        factor.grad = torch.ones_like(factor)
        given.append(SGD([factor], lr=0.1))
    return accel.optimizer_step(ctx, given, state)


def _alike(
    ranks: Simulator,
    world_size: int,
    mesh: str,
    strategy: str,
    finish: Finish,
    spare: int | None = None,
    others: int = 0,
) -> str:
    """Return what all ranks have raised in a model's first step, or "stepped". `others`: models that step before."""

    def prepared(ctx: accel.DistContext, spare: int | None) -> tuple[Any, Any]:
        net = Net(spare)
        plan = accel.parallel.Plan(micro_batches=2)
        return accel.prepare(ctx, net, SGD(net.parameters(), lr=0.1), plan=plan)

    def run(ctx: accel.DistContext) -> str:
        torch.manual_seed(0)
        ctx = accel.replace(ctx, mesh=mesh, strategy=strategy)
        for _ in range(others):
            model, optimizer = prepared(ctx, None)
            assert _step(ctx, model, optimizer, _window(ctx, model))
        model, optimizer = prepared(ctx, spare)
        state = _window(ctx, model)
        try:
            _ = finish(ctx, model, optimizer, state)
        except accel.AccelError as error:
            return f"{type(error).__name__}: {error.problem}"
        return "stepped"

    [found] = set(ranks.run(run, world_size, default_group=True))
    return found


@pytest.mark.parametrize(
    ("finish", "strategy"),
    [
        (_step, "ddp"),
        (_step_without_a_look, "ddp"),
        (_clip, "fsdp"),
        pytest.param(_step, "fsdp", marks=pytest.mark.slow),
        pytest.param(_clip_values, "ddp", marks=pytest.mark.slow),
        pytest.param(_unscale, "fsdp", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("spare", "rank"), [(0, 0), (3, 2)])
def test_a_parameter_without_a_gradient_in_one_stage_is_an_error_of_all_ranks(
    ranks: Simulator, finish: Finish, strategy: str, spare: int, rank: int
) -> None:
    told = f"StepError: rank {rank}: parameters took no part in the loss, so gradients were not exchanged"
    assert _alike(ranks, 4, "dp=2,pp=2", strategy, finish, spare) == told


@pytest.mark.parametrize("spare", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_stages_agree_in_the_first_step_of_each_model(ranks: Simulator, spare: int) -> None:
    found = _alike(ranks, 4, "dp=2,pp=2", "ddp", _step, spare, others=1)
    assert found.startswith(f"StepError: rank {spare and 2}: parameters took no part in the loss")


@pytest.mark.parametrize(
    ("finish", "told"),
    [
        (_cleared, "StepError: rank 1: there are no gradients"),
        (
            _divided_in_part,
            "StepError: rank 1: some of the gradients were divided by weight and loss scale",
        ),
        (_unprepared, "PrepareError: rank 1: a parameter is not prepared, so its gradient stays on each rank"),
        (_step, "stepped"),
    ],
)
def test_what_one_stage_refuses_is_an_error_of_all_ranks(ranks: Simulator, finish: Finish, told: str) -> None:
    assert _alike(ranks, 2, "pp=2", "ddp", finish).startswith(told)
