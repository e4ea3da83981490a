# SPDX-License-Identifier: Apache-2.0
"""Division and clipping before `optimizer_step`, for scripts that read gradients.

`optimizer_step` does both in its passes; these functions make additional ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import torch
from torch.optim import Optimizer

from accel.context import DistContext, context_first
from accel.errors import ConfigError
from accel.loop_state import Accumulation
from accel.optim import clamp_, norm_dtype, scale_, total_norm
from accel.parallel._engines import engine_of
from accel.parallel._modules import memory_of, note_tensor
from accel.tensors import local_parts, parameters_of
from accel.training._train_state import TrainState, after_backward, carries_state, ended_window
from accel.training._window import (
    StepWindow,
    as_tensor,
    check_limit,
    check_norm_type,
    check_real,
    check_window,
    division,
    mark_followed,
    refused_alike,
    shortening,
    total_weight,
    whole_norm,
    window_gradients,
)


@carries_state(3, "norm = {}")
@context_first
def clip_grad_norm_(
    ctx: DistContext,
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    state: TrainState,
    *,
    norm_type: float = 2.0,
) -> torch.Tensor:
    """Shorten gradients in place to a norm and return the norm before. A collective if some are sharded.

    The norm belongs to the gradient after the division by weight and loss scale, which `optimizer_step` makes later. It
    counts every element of every rank once, for any parameters: some or all of a model, of one model or several,
    replicated or sharded. Nothing is clipped if the norm is not finite; the policy of `optimizer_step` then decides.

    Args:
        ctx: the context.
        parameters: all parameters that share the norm.
        max_norm: longest norm.
        state: as for `optimizer_step`.
        norm_type: p of the p-norm, above 0; inf for the largest absolute value.

    Returns:
        The norm before clipping, shape [].

    Raises:
        StepError: the window has not ended, or there are no gradients.
        ConfigError: max_norm or norm_type is not above 0.

    Reference: Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", arXiv:1211.5063.
    """
    return clip_norm(ctx, parameters, max_norm, ended_window(state, "accel.clip_grad_norm_"), norm_type)


def clip_norm(
    ctx: DistContext, parameters: Iterable[torch.Tensor], max_norm: float, window: StepWindow, norm_type: float
) -> torch.Tensor:
    """Shorten the gradients of a window in place to a norm, as `clip_grad_norm_`."""
    check_limit(max_norm, "max_norm=")
    check_norm_type(norm_type)
    check_window(ctx, window)
    factor = division(ctx, window.accum, total_weight(window.accum))
    engine = engine_of(ctx)
    if engine is not None:
        return engine.clip_norm(ctx, list(parameters), max_norm, norm_type, factor)
    listed = list(parameters)
    with refused_alike(ctx, listed, "clip_grad_norm_"):
        [grads] = window_gradients(ctx, window.accum, listed)
    norm = whole_norm(ctx, grads, listed, norm_type) * factor
    if isinstance(norm, torch.Tensor):
        # Without reading the norm, so that the host does not wait; a norm that is not finite scales by 1.
        scale_(grads, torch.where(norm.isfinite(), shortening(norm, max_norm), 1.0))
    elif math.isfinite(norm):
        scale_(grads, shortening(norm, max_norm))
    return as_tensor(norm, norm_dtype(grads or listed))  # a stage may only hold frozen parameters


@carries_state(3)
@context_first
def clip_grad_value_(
    ctx: DistContext, parameters: Iterable[torch.Tensor], clip_value: float, state: TrainState
) -> None:
    """Clamp every element of gradients to [-clip_value, clip_value], in place. A pipeline's first call communicates.

    The value belongs to the gradient after division, as for `clip_grad_norm_`. Nothing is clipped if a gradient of this
    rank is not finite; the policy of `optimizer_step` then decides.

    Args:
        ctx: the context.
        parameters: replicated or sharded.
        clip_value: largest absolute value.
        state: as for `optimizer_step`.

    Raises:
        StepError: the window has not ended, or there are no gradients.
        ConfigError: clip_value is not above 0, or gradients are complex.
    """
    clip_elements(ctx, parameters, clip_value, ended_window(state, "accel.clip_grad_value_"))


def clip_elements(ctx: DistContext, parameters: Iterable[torch.Tensor], clip_value: float, window: StepWindow) -> None:
    """Clamp the elements of a window's gradients in place, as `clip_grad_value_`."""
    check_limit(clip_value, "clip_value=")
    check_window(ctx, window)
    factor = division(ctx, window.accum, total_weight(window.accum))
    engine = engine_of(ctx)
    if engine is not None:
        engine.clip_value(ctx, list(parameters), clip_value, factor)
        return
    listed = list(parameters)
    with refused_alike(ctx, listed, "clip_grad_value_"):
        [grads] = window_gradients(ctx, window.accum, listed)
        check_real(grads, "clip_grad_value_")
    if not isinstance(factor, torch.Tensor) and factor == 0.0:
        return  # the window is empty, and all gradients are zero
    # Gradients are not divided yet, so the limit is scaled in their place: one pass over them fewer.
    norm, bound = total_norm(local_parts(grads)), clip_value / factor
    if isinstance(norm, torch.Tensor):
        limit = bound if isinstance(bound, torch.Tensor) else norm.new_full((), bound)
        clamp_(grads, torch.where(norm.isfinite(), limit, math.inf))
    elif math.isfinite(norm):
        clamp_(grads, bound)


@carries_state(2, "accum = {}")
@context_first
def unscale_gradients(ctx: DistContext, optimizer: Optimizer | Sequence[Optimizer], state: TrainState) -> TrainState:
    """Divide gradients by the window's weight and the loss scale now, to read them before `optimizer_step`.

    Args:
        ctx: the context.
        optimizer: all optimizers that take the step.
        state: as for `optimizer_step`.

    Returns:
        The state with nothing left to divide. The step refuses other gradients than these.

    Raises:
        StepError: the window has not ended, or there are no gradients.
        ConfigError: the strategy of an engine.
    """
    window = ended_window(state, "accel.unscale_gradients")
    divided = divide(ctx, optimizer, window)
    mark_followed(ctx, window, "state = accel.unscale_gradients(ctx, optimizer, state)")
    return after_backward(state, divided)


def divide(ctx: DistContext, optimizer: Optimizer | Sequence[Optimizer], window: StepWindow) -> Accumulation:
    """Divide the gradients of a window's optimizers; return the window with nothing left to divide."""
    if engine_of(ctx) is not None:
        raise ConfigError(
            "an engine divides its gradients within the step",
            expected="a strategy of accel",
            got=ctx.settings.strategy,
            where="unscale_gradients",
            fix="Leave the call out: clipping and the step divide what they need.",
        )
    check_window(ctx, window)
    accum = window.accum
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    parameters = parameters_of(optimizers)
    with refused_alike(ctx, parameters, "unscale_gradients", optimizers):
        [grads] = window_gradients(ctx, accum, parameters)
    scale_(grads, division(ctx, accum, total_weight(accum)))
    for each in parameters:
        if each.grad is not None:
            note_tensor(each.grad, memory=memory_of(each.grad))
    # Noted in the window: a step that divided once more would go unseen.
    return msgspec.structs.replace(accum, divided=len(grads) or -1, retained=False)
