# SPDX-License-Identifier: Apache-2.0
"""Steps with a closure: the optimizer evaluates the loss, as LBFGS does, and each evaluation is a window."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple, cast

import torch
from torch.optim import Optimizer

from accel.comm import all_reduce_flat
from accel.context import DistContext
from accel.data import SampleCount
from accel.devices import wide_dtype
from accel.errors import ConfigError, StepError
from accel.loop_state import Accumulation, check_latest
from accel.optim import CLOSURE_LINE, scale_, within_closure
from accel.parallel._engines import engine_of
from accel.parallel._labels import has_state_on_host, steps_alone
from accel.tensors import is_dtensor, parameters_of
from accel.training._backward import check_loss, on_device, own_weight, run_backward, start_sharing, weigh
from accel.training._deferred import mark_deferred
from accel.training._refused import check_overflow, check_settings, refuse_in_closure
from accel.training._train_state import TrainState, after_backward, begun_window, is_begun, window_of
from accel.training._window import (
    Policy,
    StepWindow,
    clear_here,
    division,
    mark_followed,
    read_outcome,
    refused_alike,
    total_weight,
    whole_norm,
    window_gradients,
    with_loss,
)

Closure = Callable[[], torch.Tensor | tuple[torch.Tensor, float | torch.Tensor]]

_WHERE = "optimizer_step, closure="


class _Evaluation(NamedTuple):
    """An evaluation of a closure."""

    loss: torch.Tensor  # mean loss over the units of all ranks, detached
    window: Accumulation
    norm: float | torch.Tensor | None  # norm of its gradient; None if gradients are not checked


def _evaluated(
    ctx: DistContext, optimizer: Optimizer, state: TrainState, closure: Closure, policy: Policy
) -> _Evaluation:
    """Compute the mean loss of all ranks and its gradient, equal on all of them to the last bit. A collective."""
    clear_here([optimizer])
    parameters = parameters_of([optimizer])
    with torch.enable_grad():
        found = closure()
        loss, weight = found if isinstance(found, tuple) else (found, state.valid)
        check_loss(loss, _WHERE, "Return the mean loss, or the loss and its weight.")
        if any(each.grad is not None for each in parameters):
            refuse_in_closure(ctx)
        loss = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
        assert weight is not None  # of a batch that has begun
        added, factor = weigh(ctx, state.scaler, state.accum, weight, same_units=False)
        shared = start_sharing(ctx, added)
        run_backward(ctx, loss, factor)
    window = with_loss(shared(), loss)
    with refused_alike(ctx, parameters, _WHERE, [optimizer]):
        [grads] = window_gradients(ctx, window, parameters)
    units, norm = total_weight(window), None
    if policy.reads:
        norm = whole_norm(ctx, grads, parameters, 2.0)
        figures = read_outcome([norm], units)
        if not figures.finite:
            check_overflow(ctx, StepWindow(window, state.scaler, state), [optimizer], independent=False)
        units = figures.weight
        norm = norm * division(ctx, window, units)
    factor = division(ctx, window, units)
    if isinstance(factor, torch.Tensor) or factor != 1.0:
        scale_(grads, factor)
    return _Evaluation(_mean(ctx, loss, weight), window, norm)


def _mean(ctx: DistContext, loss: torch.Tensor, weight: float | torch.Tensor) -> torch.Tensor:
    """Return the mean loss over the units of all ranks, detached, shape []. A collective."""
    loss = loss.detach()
    if ctx.world_size == 1:
        return loss
    own = float(weight) if isinstance(weight, SampleCount) else own_weight(ctx, weight)
    units = own if isinstance(own, torch.Tensor) else on_device(ctx, own)
    wide = wide_dtype(ctx.device)
    units = units.to(ctx.device, wide)
    total = torch.where(units > 0, loss.to(ctx.device, wide) * units, 0.0)  # a rank without units may have NaN
    sums = all_reduce_flat(ctx.comm, torch.stack([total, units]), "sum")
    return torch.where(sums[1] > 0, sums[0] / sums[1], 0.0)


def _checked(
    ctx: DistContext, optimizers: list[Optimizer], state: TrainState, *, clips: bool, policy: Policy
) -> Accumulation:
    """Return the window of a step with a closure; raise for what such a step does not support."""
    parameters = parameters_of(optimizers)
    refused = {
        "the strategy of an engine": engine_of(ctx) is not None,
        f"{len(optimizers)} optimizers": len(optimizers) != 1,
        'a plan with offload="optimizer"': any(map(has_state_on_host, optimizers)),
        "parameters that ranks divide": any(map(is_dtensor, parameters)),
        "a pipeline": ctx.axis("pp").size > 1,
        "ranks that step separately": any(map(steps_alone, parameters)),
        "a loss scale, as with fp16": state.scaler.dynamic or state.scaler.scale != 1.0,
        "master weights": ctx.precision.master_weights is not None,
    }
    if found := [each for each, holds in refused.items() if holds]:
        mesh = f'mesh="dp={ctx.world_size}", ' if ctx.world_size > 1 else ""
        raise ConfigError(
            "a step with a closure is for one optimizer of parameters that each rank holds in full",
            expected='strategy="ddp" or one rank, in fp32, fp64 or bf16',
            got=", ".join(found),
            where=_WHERE,
            fix=f'Before prepare: ctx = accel.replace(ctx, {mesh}strategy="ddp", precision="fp32", '
            "plan=accel.parallel.Plan())",
        )
    if clips or policy.defers or policy.reads != policy.raises:
        raise ConfigError(
            "the optimizer would not get the gradients of the loss",
            expected='no max_norm= or max_value=, and nonfinite="raise" or "ignore"',
            got="clipping" if clips else "a policy that may leave the step out",
            where=_WHERE,
            fix=f'Leave it out: {CLOSURE_LINE} To bound the steps of LBFGS: line_search_fn="strong_wolfe".',
        )
    window = begun_window(state.accum, "accel.optimizer_step")
    if window.backwards or not is_begun(window):
        raise StepError(
            "the closure's gradients would be added to the gradients of an earlier backward",
            expected="a state from state.next(batch)",
            got=f"a window with {window.backwards} backward passes",
            where=_WHERE,
            fix="Leave accel.backward out, and return the loss from the closure.",
        )
    if not window.sync:
        raise StepError(
            "each evaluation of a closure is a full window",
            expected="a window of one batch",
            got=f"micro-batch {window.micro} of {window.steps}",
            where=_WHERE,
            fix="state = accel.train_state(ctx, accumulation=1); a closure may add losses of several micro-batches.",
        )
    return window


def step_by_closure(
    ctx: DistContext,
    optimizers: list[Optimizer],
    state: TrainState,
    closure: Closure,
    *,
    clips: bool,
    policy: Policy,
) -> tuple[TrainState, torch.Tensor | None]:
    """Let one optimizer evaluate a closure within its step. Mutates parameters; a collective.

    Args:
        ctx: the context.
        optimizers: the single optimizer.
        state: a state within a batch.
        closure: the user's.
        clips: whether `optimizer_step` is to clip, which is refused.
        policy: for gradients with inf or NaN.

    Returns:
        The state with the window of the latest evaluation, and the norm of its gradient; None without a check.
    """
    check_latest(state, "optimizer_step")
    window = _checked(ctx, optimizers, state, clips=clips, policy=policy)
    if ctx.launched or ctx.position.opened:
        check_settings(ctx, window, optimizers)
    if ctx.comm.defers:
        mark_deferred(ctx, optimizers, defers=False)
    began = perf_counter()
    latest: list[_Evaluation] = []

    def evaluate() -> torch.Tensor:
        latest[:] = [_evaluated(ctx, optimizers[0], state, closure, policy)]
        return latest[0].loss

    try:
        with within_closure(ctx.comm, "closure="):
            cast(Any, optimizers[0]).step(evaluate)
    finally:
        clear_here(optimizers)
    if not latest:
        raise StepError(
            "the optimizer has not called the closure",
            expected="an optimizer that evaluates the loss in step(closure)",
            got=type(optimizers[0]).__name__,
            where=_WHERE,
        )
    mark_followed(ctx, window_of(state), CLOSURE_LINE)
    norm = None if latest[0].norm is None else torch.as_tensor(latest[0].norm)
    return after_backward(state, latest[0].window, began), norm
