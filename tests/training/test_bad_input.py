# SPDX-License-Identifier: Apache-2.0
"""A refused call of the training step changes nothing: the right call after it does what it would have done."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import accel
from accel.errors import ConfigError, NonFiniteError, PrepareError, StepError


class Run(NamedTuple):
    """A run with its gradients of one micro-batch of two."""

    ctx: accel.DistContext
    plain: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: StepLR
    scaler: accel.LossScale
    accum: accel.Accumulation

    def loss(self) -> torch.Tensor:
        return self.model(torch.full((4, 3), self.ctx.rank + 1.0)).square().mean()


def _begin(ctx: accel.DistContext) -> Run:
    plain = nn.Linear(3, 2)
    with torch.no_grad():
        for i, parameter in enumerate(plain.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) * 0.1 + i)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    model, optimizer, scheduler = accel.prepare(ctx, plain, optimizer, StepLR(optimizer, 1, 0.5))
    run = Run(ctx, plain, model, optimizer, scheduler, accel.loss_scale(ctx), accel.Accumulation(steps=2).next())
    with accel.training.parts.accumulate(ctx, run.accum, model):
        return run._replace(accum=accel.training.parts.backward(ctx, run.loss(), run.scaler, run.accum, weight=2.0))


def _end(run: Run) -> accel.training.parts.StepResult:
    accum = run.accum.next()
    with accel.training.parts.accumulate(run.ctx, accum, run.model):
        accum = accel.training.parts.backward(run.ctx, run.loss(), run.scaler, accum, weight=3.0)
    return accel.training.parts.optimizer_step(
        run.ctx, run.optimizer, run.scaler, accum, scheduler=run.scheduler, max_norm=1.0
    )


def _state(run: Run) -> dict[str, Any]:
    grads = [None if each.grad is None else each.grad.clone() for each in run.plain.parameters()]
    state = copy.deepcopy([run.plain.state_dict(), run.optimizer.state_dict(), run.scheduler.state_dict()])
    return {"grads": grads, "state": state, "rng": torch.get_rng_state()}


def _step(run: Run, **changes: Any) -> accel.training.parts.StepResult:
    given = {"optimizer": run.optimizer, "scaler": run.scaler, "accum": run.accum} | changes
    return accel.training.parts.optimizer_step(run.ctx, **given)


def _ended(run: Run) -> accel.Accumulation:
    return run.accum.next(last=True).add(scale=run.scaler.scale, unit=1.0, world=1.0)


def _backward(run: Run, loss: torch.Tensor, **changes: Any) -> object:
    return accel.training.parts.backward(run.ctx, loss, **({"scaler": run.scaler, "accum": run.accum.next()} | changes))


def _enter(block: Any) -> None:
    with block:
        pytest.fail("the block was entered")


MISTAKES: dict[str, tuple[Callable[[Run], object], type[Exception], str]] = {
    "step within the window": (_step, StepError, "micro-batch 1 of 2"),
    "step with a plateau": (
        lambda run: _step(run, accum=_ended(run), scheduler=[run.scheduler, ReduceLROnPlateau(run.optimizer)]),
        ConfigError,
        r"scheduler.step\(metric\)",
    ),
    "no norm": (lambda run: _step(run, accum=_ended(run), max_norm=0.0), ConfigError, "above 0"),
    "negative norm": (lambda run: _step(run, accum=_ended(run), max_norm=-1.0), ConfigError, "above 0"),
    "norm of NaN": (lambda run: _step(run, accum=_ended(run), max_norm=math.nan), ConfigError, "above 0"),
    "no norm of that kind": (
        lambda run: _step(run, accum=_ended(run), norm_type=0.0),
        ConfigError,
        "p above 0, or inf",
    ),
    "more norms than optimizers": (
        lambda run: _step(run, accum=_ended(run), max_norm=[1.0, 2.0]),
        ConfigError,
        "got 2",
    ),
    "one norm of none": (lambda run: _step(run, accum=_ended(run), max_norm=[0.0]), ConfigError, "above 0"),
    "no value": (lambda run: _step(run, accum=_ended(run), max_value=0.0), ConfigError, "above 0"),
    "norm and value": (
        lambda run: _step(run, accum=_ended(run), max_norm=1.0, max_value=1.0),
        ConfigError,
        "max_norm or max_value",
    ),
    "unknown policy": (lambda run: _step(run, accum=_ended(run), nonfinite="warn"), ConfigError, "raise, skip, ignore"),
    "other scale": (lambda run: _step(run, accum=_ended(run), scaler=accel.LossScale(8.0)), StepError, "8.0"),
    "no optimizer": (lambda run: _step(run, accum=_ended(run), optimizer=[]), StepError, "no gradients"),
    "optimizer without gradients": (
        lambda run: _step(run, accum=_ended(run), optimizer=torch.optim.SGD(nn.PReLU().parameters())),
        StepError,
        "no gradients",
    ),
    "clipping within the window": (
        lambda run: accel.training.parts.clip_grad_norm_(run.ctx, run.plain.parameters(), 1.0, run.scaler, run.accum),
        StepError,
        "micro-batch 1 of 2",
    ),
    "clipping to nothing": (
        lambda run: accel.training.parts.clip_grad_norm_(run.ctx, run.plain.parameters(), 0.0, run.scaler, _ended(run)),
        ConfigError,
        "above 0",
    ),
    "clipping no gradients": (
        lambda run: accel.training.parts.clip_grad_norm_(
            run.ctx, nn.PReLU().parameters(), 1.0, run.scaler, _ended(run)
        ),
        StepError,
        "no gradients",
    ),
    "clipping values to nothing": (
        lambda run: accel.training.parts.clip_grad_value_(
            run.ctx, run.plain.parameters(), 0.0, run.scaler, _ended(run)
        ),
        ConfigError,
        "above 0",
    ),
    "clipping values within the window": (
        lambda run: accel.training.parts.clip_grad_value_(run.ctx, run.plain.parameters(), 1.0, run.scaler, run.accum),
        StepError,
        "micro-batch 1 of 2",
    ),
    "dividing within the window": (
        lambda run: accel.training.parts.unscale_gradients(run.ctx, run.optimizer, run.scaler, run.accum),
        StepError,
        "micro-batch 1 of 2",
    ),
    "another scheduler's kind": (
        lambda run: _step(run, accum=_ended(run), scheduler="cosine"),
        ConfigError,
        "a torch LRScheduler, got str",
    ),
    "a model for an optimizer": (
        lambda run: _step(run, accum=_ended(run), optimizer=run.plain),
        ConfigError,
        "a torch Optimizer, got Linear",
    ),
    "an optimizer twice": (
        lambda run: _step(run, accum=_ended(run), optimizer=[run.optimizer] * 2),
        ConfigError,
        "each Optimizer once",
    ),
    "a scheduler twice": (
        lambda run: _step(run, accum=_ended(run), scheduler=[run.scheduler] * 2),
        ConfigError,
        "each LRScheduler once",
    ),
    "the accumulation for the scale of a step": (
        lambda run: _step(run, scaler=_ended(run), accum=None),
        ConfigError,
        "got Accumulation, NoneType",
    ),
    "the accumulation for the scale of a backward": (
        lambda run: _backward(run, run.plain(torch.zeros(3)).sum(), scaler=run.accum.next(), accum=None),
        ConfigError,
        "got Accumulation, NoneType",
    ),
    "records in the other order": (
        lambda run: _backward(run, run.plain(torch.zeros(3)).sum(), scaler=run.accum.next(), accum=run.scaler),
        ConfigError,
        "a LossScale, then an Accumulation or None, got Accumulation, LossScale",
    ),
    "weights in a list": (
        lambda run: _backward(run, run.plain(torch.zeros(3)).sum(), weight=[2, 3]),
        ConfigError,
        r"got \[2, 3\]",
    ),
    "weights in a tensor": (
        lambda run: _backward(run, run.plain(torch.zeros(3)).sum(), weight=torch.ones(2)),
        ConfigError,
        r"shape \[2\]",
    ),
    "weight in words": (
        lambda run: _backward(run, run.plain(torch.zeros(3)).sum(), weight="2"),
        ConfigError,
        "got '2'",
    ),
    "units that nothing counted": (
        lambda run: _backward(run, run.plain(torch.zeros(3)).sum(), weight=2, same_units=True),
        StepError,
        "from its second backward on",
    ),
    "a window without its last backward": (
        lambda run: _step(run, accum=msgspec.structs.replace(run.accum.next(), backwards=1)),
        StepError,
        "2 backward passes, one in each micro-batch, got 1",
    ),
    "loss of two dimensions": (
        lambda run: _backward(run, run.plain(torch.zeros(4, 3))),
        StepError,
        r"shape \[4, 2\]",
    ),
    "loss of one element": (lambda run: _backward(run, run.plain(torch.zeros(1, 3))[0, :1]), StepError, r"shape \[1\]"),
    "negative weight": (
        lambda run: _backward(run, run.plain(torch.zeros(3)).sum(), weight=-1),
        ConfigError,
        "not a weight",
    ),
    "weight of NaN": (
        lambda run: _backward(run, run.plain(torch.zeros(3)).sum(), weight=math.nan),
        ConfigError,
        "got nan",
    ),
    "weight without accum": (
        lambda run: _backward(run, run.plain(torch.zeros(3)).sum(), weight=2, accum=None),
        ConfigError,
        "an Accumulation with weight= or retain_graph=",
    ),
    "scale changed within the window": (
        lambda run: _backward(run, run.plain(torch.zeros(3)).sum(), weight=2, scaler=accel.LossScale(8.0)),
        StepError,
        "got 8.0",
    ),
    "backward between windows": (
        lambda run: _backward(run, run.plain(torch.zeros(3)).sum(), accum=accel.Accumulation()),
        StepError,
        "between two windows",
    ),
    "accumulate between windows": (
        lambda run: _enter(accel.training.parts.accumulate(run.ctx, accel.Accumulation(), run.model)),
        StepError,
        "no micro-batch was begun",
    ),
    "another window before the step": (lambda run: _ended(run).next(), StepError, "Call optimizer_step"),
    "a checkpoint within the window": (lambda run: run.accum.check_saveable(), ConfigError, "Save after"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_refused_call_changes_nothing_and_the_right_one_goes_on(ranks, name, world_size):
    mistake, error, said = MISTAKES[name]

    def rank(ctx):
        run, reference = _begin(ctx), _begin(ctx)
        before = _state(run)
        with pytest.raises(error, match=said):
            mistake(run)
        torch.testing.assert_close(_state(run), before, rtol=0, atol=0)
        step, expected = _end(run), _end(reference)
        assert step.stepped
        assert step.accum == expected.accum
        torch.testing.assert_close(_state(run), _state(reference), rtol=0, atol=0)
        assert not torch.equal(run.plain.weight, before["state"][0]["weight"])
        return True

    assert ranks.run(rank, world_size) == [True] * world_size


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_reaches_no_parameter_on_any_rank(ranks, value):
    def rank(ctx):
        run = _begin(ctx)
        accum = run.accum.next()
        with accel.training.parts.accumulate(ctx, accum, run.model):
            loss = run.loss() * (value if ctx.rank == 1 else 1.0)
            accum = accel.training.parts.backward(ctx, loss, run.scaler, accum, weight=3.0)
        before = _state(run)
        with pytest.raises(NonFiniteError, match=r"a gradient of step 0 is not finite"):
            _step(run, accum=accum, scheduler=run.scheduler)
        torch.testing.assert_close(_state(run), before, rtol=0, atol=0, equal_nan=True)
        assert bool(torch.isfinite(run.plain.weight).all())
        return True

    assert ranks.run(rank, 2) == [True, True]


@pytest.mark.parametrize(
    "block",
    [
        accel.no_sync,
        lambda ctx, model: accel.training.parts.accumulate(ctx, _micro(1), model),
        lambda ctx, model: accel.training.parts.accumulate(ctx, _micro(2), model),
    ],
)
def test_a_model_that_was_not_prepared_is_refused_where_ranks_would_drift_apart(ranks, block):
    def rank(ctx):
        with pytest.raises(PrepareError, match=r"model = accel.prepare_model\(ctx, model\).*a plain Linear on 2 ranks"):
            _enter(block(ctx, nn.Linear(1, 1)))
        return True

    assert ranks.run(rank, 2) == [True, True]
    with block(accel.single(), nn.Linear(1, 1)):  # alone there is nobody to drift from
        pass


def _micro(steps: int) -> accel.Accumulation:
    return accel.Accumulation(steps=steps).next()
