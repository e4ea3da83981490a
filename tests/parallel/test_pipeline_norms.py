# SPDX-License-Identifier: Apache-2.0
"""Norms in pipelines: statistics and weights are those of one process, or an error says why they are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from catching import caught
from steps import begin_batch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import accel
from accel.errors import PrepareError, StageError
from accel.parallel import Plan
from accel.testing import Simulator

Make = Callable[[], nn.Sequential]
WHOLE = Plan(schedule="GPipe", micro_batches=1)
PIECES = Plan(micro_batches=2)


def _net(norm: Callable[[], nn.Module] = lambda: nn.BatchNorm1d(4)) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(4, 4, bias=False), norm(), nn.Tanh()) for _ in range(4))
        return nn.Sequential(*blocks).double()


def _squares(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


def _frozen() -> nn.Sequential:
    net = _net()
    for each in net.modules():
        if isinstance(each, nn.BatchNorm1d):
            _ = each.eval()
    return net


def _of_weights() -> nn.Sequential:
    net = _net(nn.Identity)
    for each in net.modules():
        if isinstance(each, nn.Linear):
            _ = weight_norm(each)
    return net


def _prepared(ctx: accel.DistContext, model: nn.Module, plan: Plan | None) -> tuple[nn.Module, Any]:
    example = torch.ones(4, 4, dtype=torch.float64)
    ctx = accel.replace(ctx, mesh="pp=2") if ctx.world_size > 1 else ctx
    return accel.prepare(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan, example=example)


def _train(ctx: accel.DistContext, make: Make, plan: Plan | None, rows: int = 8) -> dict[str, torch.Tensor]:
    model, sgd = _prepared(ctx, make(), plan)
    state = accel.train_state(ctx)
    for step in range(2):
        given = torch.randn(rows, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        _ = accel.forward_backward(ctx, model, begin_batch(ctx, state), given, loss_fn=_squares, weight=rows)
        sgd.step()
        sgd.zero_grad()
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (_net, PIECES),
        (_net, Plan(micro_batches=2)),
        (_net, WHOLE),
        (_frozen, None),
        (lambda: _net(lambda: nn.GroupNorm(2, 4)), None),
        (_of_weights, None),
        (_of_weights, Plan()),
    ],
    ids=["told", "traced", "whole", "eval", "groups", "weights", "traced weights"],
)
def test_norms_train_as_in_one_process(ranks: Simulator, make: Make, plan: Plan | None) -> None:
    # without a number in the plan, one process takes the batch whole
    expected = _train(accel.single(), make, plan)
    found: dict[str, torch.Tensor] = {}
    for each in ranks.run(lambda ctx: _train(ctx, make, plan), 2, default_group=True):
        found |= each
    assert found.keys() == expected.keys()
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) < 1e-10


def test_statistics_of_micro_batches_are_announced(ranks: Simulator, caplog: pytest.LogCaptureFixture) -> None:
    for make, plan in ((_net, PIECES), (_net, WHOLE), (_frozen, PIECES)):
        _ = ranks.run(lambda ctx, make=make, plan=plan: len(_prepared(ctx, make(), plan)), 2, default_group=True)
    (told,) = (each for each in caplog.messages if "statistics" in each)
    assert told.startswith("4 batch norms (0.1 the first) take the statistics of each of the plan's 2 micro-batches")


@pytest.mark.parametrize(
    ("make", "plan", "told"),
    [
        (_net, None, ("0.1, a BatchNorm1d in training", "nn.GroupNorm", "Plan(micro_batches=2)")),
        (_net, Plan(), ("0.1, a BatchNorm1d in training", "Plan(micro_batches=2)")),
        (
            lambda: _net(lambda: nn.BatchNorm1d(4, track_running_stats=False)).eval(),
            None,
            ("a BatchNorm1d without running statistics", "nn.GroupNorm"),
        ),
        (lambda: _net(lambda: nn.SyncBatchNorm(4)), PIECES, ("a SyncBatchNorm in training", "process_group")),
    ],
)
def test_statistics_of_other_rows_are_refused_before_training(
    ranks: Simulator, make: Make, plan: Plan | None, told: tuple[str, ...]
) -> None:
    for error in ranks.run(lambda ctx: caught(lambda: _prepared(ctx, make(), plan)), 2, default_group=True):
        assert isinstance(error, PrepareError)
        assert all(each in str(error) for each in told)


def test_norms_that_train_later_and_batches_that_are_filled_up_are_refused(ranks: Simulator) -> None:
    def later(ctx: accel.DistContext) -> Any:
        model, _ = _prepared(ctx, _net().eval(), None)
        rows = torch.ones(4, 4, dtype=torch.float64)
        with accel.evaluating(model):
            assert accel.training.forward(ctx, model, rows[:3]).shape == (3, 4)  # filled up
        _ = model.train()
        state = accel.train_state(ctx)
        return caught(
            lambda: accel.forward_backward(ctx, model, begin_batch(ctx, state), rows, loss_fn=torch.sum, weight=4)
        )

    for error in ranks.run(later, 2, default_group=True):
        assert isinstance(error, StageError)
        assert "BatchNorm1d in training" in str(error)
    for error in ranks.run(lambda ctx: caught(lambda: _train(ctx, _net, PIECES, rows=7)), 2, default_group=True):
        assert isinstance(error, StageError)
        assert "drop_last=True" in str(error)
