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
from catching import assert_raises
from steps import begin_batch
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
    state: accel.TrainState

    def loss(self) -> torch.Tensor:
        return self.model(torch.full((4, 3), self.ctx.rank + 1.0)).square().mean()


def _begin(ctx: accel.DistContext) -> Run:
    plain = nn.Linear(3, 2)
    with torch.no_grad():
        for i, parameter in enumerate(plain.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) * 0.1 + i)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    model, optimizer, scheduler = accel.prepare(ctx, plain, optimizer, StepLR(optimizer, 1, 0.5))
    begun = begin_batch(ctx, accel.train_state(ctx, accumulation=2))
    run = Run(ctx, plain, model, optimizer, scheduler, begun)
    with accel.accumulate(ctx, begun, model):
        return run._replace(state=accel.backward(ctx, run.loss(), begun, weight=2.0))


def _end(run: Run) -> accel.TrainState:
    state = begin_batch(run.ctx, run.state)
    with accel.accumulate(run.ctx, state, run.model):
        state = accel.backward(run.ctx, run.loss(), state, weight=3.0)
    return accel.optimizer_step(run.ctx, run.optimizer, state, scheduler=run.scheduler, max_norm=1.0)


def _state(run: Run) -> dict[str, Any]:
    grads = [None if each.grad is None else each.grad.clone() for each in run.plain.parameters()]
    state = copy.deepcopy([run.plain.state_dict(), run.optimizer.state_dict(), run.scheduler.state_dict()])
    return {"grads": grads, "state": state, "rng": torch.get_rng_state()}


def _step(run: Run, **changes: Any) -> accel.TrainState:
    return accel.optimizer_step(run.ctx, **({"optimizer": run.optimizer, "state": run.state} | changes))


def _ended(run: Run, **changes: Any) -> accel.TrainState:
    begun = begin_batch(run.ctx, run.state, last=True)
    accum = begun.accum.add(scale=run.state.scaler.scale, unit=1.0, world=1.0)
    return msgspec.structs.replace(begun, accum=accum, **changes)


def _backward(run: Run, loss: torch.Tensor, **changes: Any) -> object:
    return accel.backward(run.ctx, loss, **({"state": begin_batch(run.ctx, run.state)} | changes))


def _enter(block: Any) -> None:
    with block:
        pytest.fail("the block was entered")


MISTAKES: dict[str, tuple[Callable[[Run], object], type[Exception], str]] = {
    "step within the window": (_step, StepError, {"got": "micro-batch 1 of 2"}),
    "step with a plateau": (
        lambda run: _step(run, state=_ended(run), scheduler=[run.scheduler, ReduceLROnPlateau(run.optimizer)]),
        ConfigError,
        {"fix": r"scheduler.step\(metric\)"},
    ),
    "no norm": (lambda run: _step(run, state=_ended(run), max_norm=0.0), ConfigError, {"expected": "above 0"}),
    "negative norm": (lambda run: _step(run, state=_ended(run), max_norm=-1.0), ConfigError, {"expected": "above 0"}),
    "norm of NaN": (lambda run: _step(run, state=_ended(run), max_norm=math.nan), ConfigError, {"expected": "above 0"}),
    "no norm of that kind": (
        lambda run: _step(run, state=_ended(run), norm_type=0.0),
        ConfigError,
        {"expected": "p above 0, or inf"},
    ),
    "more norms than optimizers": (
        lambda run: _step(run, state=_ended(run), max_norm=[1.0, 2.0]),
        ConfigError,
        {"got": "^2$"},
    ),
    "one norm of none": (
        lambda run: _step(run, state=_ended(run), max_norm=[0.0]),
        ConfigError,
        {"expected": "above 0"},
    ),
    "no value": (lambda run: _step(run, state=_ended(run), max_value=0.0), ConfigError, {"expected": "above 0"}),
    "norm and value": (
        lambda run: _step(run, state=_ended(run), max_norm=1.0, max_value=1.0),
        ConfigError,
        {"expected": "max_norm or max_value"},
    ),
    "unknown policy": (
        lambda run: _step(run, state=_ended(run), nonfinite="warn"),
        ConfigError,
        {"expected": "raise, skip, ignore"},
    ),
    "other scale": (lambda run: _step(run, state=_ended(run, scaler=accel.LossScale(8.0))), StepError, {"got": "8.0"}),
    "no optimizer": (lambda run: _step(run, state=_ended(run), optimizer=[]), StepError, {"problem": "no gradients"}),
    "optimizer without gradients": (
        lambda run: _step(run, state=_ended(run), optimizer=torch.optim.SGD(nn.PReLU().parameters())),
        StepError,
        {"problem": "no gradients"},
    ),
    "clipping within the window": (
        lambda run: accel.clip_grad_norm_(run.ctx, run.plain.parameters(), 1.0, run.state),
        StepError,
        {"got": "micro-batch 1 of 2"},
    ),
    "clipping to nothing": (
        lambda run: accel.clip_grad_norm_(run.ctx, run.plain.parameters(), 0.0, _ended(run)),
        ConfigError,
        {"expected": "above 0"},
    ),
    "clipping no gradients": (
        lambda run: accel.clip_grad_norm_(run.ctx, nn.PReLU().parameters(), 1.0, _ended(run)),
        StepError,
        {"problem": "no gradients"},
    ),
    "clipping values to nothing": (
        lambda run: accel.clip_grad_value_(run.ctx, run.plain.parameters(), 0.0, _ended(run)),
        ConfigError,
        {"expected": "above 0"},
    ),
    "clipping values within the window": (
        lambda run: accel.clip_grad_value_(run.ctx, run.plain.parameters(), 1.0, run.state),
        StepError,
        {"got": "micro-batch 1 of 2"},
    ),
    "dividing within the window": (
        lambda run: accel.unscale_gradients(run.ctx, run.optimizer, run.state),
        StepError,
        {"got": "micro-batch 1 of 2"},
    ),
    "another scheduler's kind": (
        lambda run: _step(run, state=_ended(run), scheduler="cosine"),
        ConfigError,
        {"expected": "a torch LRScheduler", "got": "str"},
    ),
    "a model for an optimizer": (
        lambda run: _step(run, state=_ended(run), optimizer=run.plain),
        ConfigError,
        {"expected": "a torch Optimizer", "got": "Linear"},
    ),
    "an optimizer twice": (
        lambda run: _step(run, state=_ended(run), optimizer=[run.optimizer] * 2),
        ConfigError,
        {"expected": "each Optimizer once"},
    ),
    "a scheduler twice": (
        lambda run: _step(run, state=_ended(run), scheduler=[run.scheduler] * 2),
        ConfigError,
        {"expected": "each LRScheduler once"},
    ),
    "the accumulation for the state of a step": (
        lambda run: _step(run, state=_ended(run).accum),
        ConfigError,
        {"expected": "a TrainState, from"},
    ),
    "the loss scale for the state of a backward": (
        lambda run: _backward(run, run.plain(torch.zeros(3)).sum(), state=run.state.scaler),
        ConfigError,
        {"expected": "a TrainState, from"},
    ),
    "weights in a list": (
        lambda run: _backward(run, run.plain(torch.zeros(3)).sum(), weight=[2, 3]),
        ConfigError,
        {"got": r"\[2, 3\]"},
    ),
    "weights in a tensor": (
        lambda run: _backward(run, run.plain(torch.zeros(3)).sum(), weight=torch.ones(2)),
        ConfigError,
        {"got": r"shape \[2\]"},
    ),
    "weight in words": (
        lambda run: _backward(run, run.plain(torch.zeros(3)).sum(), weight="2"),
        ConfigError,
        {"got": "'2'"},
    ),
    "units that nothing counted": (
        lambda run: _backward(run, run.plain(torch.zeros(3)).sum(), weight=2, same_units=True),
        StepError,
        {"expected": "from its second backward on"},
    ),
    "a window without its last backward": (
        lambda run: _step(run, state=begin_batch(run.ctx, run.state)),
        StepError,
        {"problem": "the state has no record of the backward of this batch"},
    ),
    "loss of two dimensions": (
        lambda run: _backward(run, run.plain(torch.zeros(4, 3))),
        StepError,
        {"got": r"shape \[4, 2\]"},
    ),
    "loss of one element": (
        lambda run: _backward(run, run.plain(torch.zeros(1, 3))[0, :1]),
        StepError,
        {"got": r"shape \[1\]"},
    ),
    "negative weight": (
        lambda run: _backward(run, run.plain(torch.zeros(3)).sum(), weight=-1),
        ConfigError,
        {"problem": "the weight is not valid"},
    ),
    "weight of NaN": (
        lambda run: _backward(run, run.plain(torch.zeros(3)).sum(), weight=math.nan),
        ConfigError,
        {"got": "nan"},
    ),
    "scale changed within the window": (
        lambda run: _backward(
            run,
            run.plain(torch.zeros(3)).sum(),
            weight=2,
            state=msgspec.structs.replace(begin_batch(run.ctx, run.state), scaler=accel.LossScale(8.0)),
        ),
        StepError,
        {"got": "8.0"},
    ),
    "backward between windows": (
        lambda run: _backward(run, run.plain(torch.zeros(3)).sum(), state=accel.train_state(run.ctx)),
        StepError,
        {"got": "between two windows"},
    ),
    "accumulate between windows": (
        lambda run: _enter(accel.accumulate(run.ctx, accel.train_state(run.ctx), run.model)),
        StepError,
        {"problem": "no batch has begun"},
    ),
    "another window before the step": (
        lambda run: begin_batch(run.ctx, _ended(run)),
        StepError,
        {"fix": "Keep the result: state = accel.optimizer_step"},
    ),
    "a checkpoint within the window": (lambda run: run.state.check_saveable(), ConfigError, {"fix": "Save after"}),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_refused_call_changes_nothing_and_the_right_one_goes_on(ranks, name, world_size):
    mistake, error, fields = MISTAKES[name]

    def rank(ctx):
        run, reference = _begin(ctx), _begin(ctx)
        before = _state(run)
        with assert_raises(error, **fields):
            mistake(run)
        torch.testing.assert_close(_state(run), before, rtol=0, atol=0)
        step, expected = _end(run), _end(reference)
        assert step.stepped
        assert step == expected
        torch.testing.assert_close(_state(run), _state(reference), rtol=0, atol=0)
        assert not torch.equal(run.plain.weight, before["state"][0]["weight"])
        return True

    assert ranks.run(rank, world_size) == [True] * world_size


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_reaches_no_parameter_on_any_rank(ranks, value):
    def rank(ctx):
        run = _begin(ctx)
        state = begin_batch(ctx, run.state)
        with accel.accumulate(ctx, state, run.model):
            loss = run.loss() * (value if ctx.rank == 1 else 1.0)
            state = accel.backward(ctx, loss, state, weight=3.0)
        before = _state(run)
        with assert_raises(NonFiniteError, problem="a gradient of step 0 is not finite"):
            _step(run, state=state, scheduler=run.scheduler)
        torch.testing.assert_close(_state(run), before, rtol=0, atol=0, equal_nan=True)
        assert bool(torch.isfinite(run.plain.weight).all())
        return True

    assert ranks.run(rank, 2) == [True, True]


@pytest.mark.parametrize(
    "block",
    [
        accel.no_sync,
        lambda ctx, model: accel.accumulate(ctx, _micro(ctx, 1), model),
        lambda ctx, model: accel.accumulate(ctx, _micro(ctx, 2), model),
    ],
)
def test_a_model_that_was_not_prepared_is_refused_where_ranks_would_drift_apart(ranks, block):
    def rank(ctx):
        with assert_raises(
            PrepareError, expected=r"model = accel.prepare_model\(ctx, model\)", got="a plain Linear on 2 ranks"
        ):
            _enter(block(ctx, nn.Linear(1, 1)))
        return True

    assert ranks.run(rank, 2) == [True, True]
    with block(accel.single(), nn.Linear(1, 1)):  # alone there is nobody to drift from
        pass


def _micro(ctx: accel.DistContext, steps: int) -> accel.TrainState:
    return begin_batch(ctx, accel.train_state(ctx, accumulation=steps))
