# SPDX-License-Identifier: Apache-2.0
"""Division and clipping apart from `optimizer_step`, for scripts that read gradients before it.

`optimizer_step` does both in its own passes; these functions make additional ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import overload

import msgspec
import torch
from torch.optim import Optimizer

from accel.context import DistContext, context_first
from accel.errors import ConfigError
from accel.optim import Accumulation, clamp_, keep_losses, norm_dtype, parameters_of, scale_, total_norm
from accel.parallel._engines import engine_of
from accel.precision._amp import LossScale
from accel.tensors import local_parts
from accel.training._train_state import TrainState, after_backward, ended_window
from accel.training._window import (
    as_tensor,
    check_alone,
    check_limit,
    check_norm_type,
    check_real,
    checked_window,
    division,
    mark_followed,
    shortening,
    total_weight,
    whole_norm,
    window_gradients,
)


@context_first
def clip_grad_norm_(
    ctx: DistContext,
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    scaler: TrainState | LossScale,
    accum: Accumulation | None = None,
    *,
    norm_type: float = 2.0,
) -> torch.Tensor:
    """Shorten gradients in place to a norm and return the norm before. A collective if some are sharded.

    The norm is that of the gradient after the division by weight and loss scale, which `optimizer_step` makes later. It
    counts every element of every rank once, for any parameters: some or all of a model, of one model or several,
    replicated or sharded. Nothing is clipped if the norm is not finite; the policy of `optimizer_step` then decides.

    Args:
        ctx: the context.
        parameters: all parameters that share the norm.
        max_norm: longest norm.
        scaler, accum: as for `optimizer_step`.
        norm_type: p of the p-norm, above 0; inf for the largest absolute value.

    Returns:
        The norm before clipping, shape [].

    Raises:
        StepError: the window has not ended, or there are no gradients.
        ConfigError: max_norm or norm_type is not above 0.

    Reference: Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", arXiv:1211.5063.
    """
    check_limit(max_norm, "max_norm=")
    check_norm_type(norm_type)
    given, scaler, accum = _parts(scaler, accum, "accel.clip_grad_norm_")
    window = checked_window(ctx, scaler, accum, given)
    factor = division(ctx, window, total_weight(window))
    engine = engine_of(ctx)
    if engine is not None:
        return engine.clip_norm(ctx, list(parameters), max_norm, norm_type, factor)
    listed = list(parameters)
    [grads] = window_gradients(ctx, window, listed)
    norm = whole_norm(ctx, grads, listed, norm_type) * factor
    if isinstance(norm, torch.Tensor):
        # Without reading the norm, so that the host does not wait; a norm that is not finite scales by 1.
        scale_(grads, torch.where(norm.isfinite(), shortening(norm, max_norm), 1.0))
    elif math.isfinite(norm):
        scale_(grads, shortening(norm, max_norm))
    return as_tensor(norm, norm_dtype(grads or listed))  # a stage may hold frozen parameters alone


@context_first
def clip_grad_value_(
    ctx: DistContext,
    parameters: Iterable[torch.Tensor],
    clip_value: float,
    scaler: TrainState | LossScale,
    accum: Accumulation | None = None,
) -> None:
    """Clamp every element of gradients to [-clip_value, clip_value], in place. No communication.

    The value is that of the gradient after division, as for `clip_grad_norm_`. Nothing is clipped if a gradient of this
    rank is not finite; the policy of `optimizer_step` then decides.

    Args:
        ctx: the context.
        parameters: replicated or sharded.
        clip_value: largest absolute value.
        scaler, accum: as for `optimizer_step`.

    Raises:
        StepError: the window has not ended, or there are no gradients.
        ConfigError: clip_value is not above 0, or gradients are complex.
    """
    check_limit(clip_value, "clip_value=")
    given, scaler, accum = _parts(scaler, accum, "accel.clip_grad_value_")
    window = checked_window(ctx, scaler, accum, given)
    factor = division(ctx, window, total_weight(window))
    engine = engine_of(ctx)
    if engine is not None:
        engine.clip_value(ctx, list(parameters), clip_value, factor)
        return
    [grads] = window_gradients(ctx, window, parameters)
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


@overload
def unscale_gradients(
    ctx: DistContext, optimizer: Optimizer | Sequence[Optimizer], state: TrainState, /
) -> TrainState: ...


@overload
def unscale_gradients(
    ctx: DistContext, optimizer: Optimizer | Sequence[Optimizer], scaler: LossScale, accum: Accumulation
) -> Accumulation: ...


@context_first
def unscale_gradients(
    ctx: DistContext,
    optimizer: Optimizer | Sequence[Optimizer],
    scaler: TrainState | LossScale,
    accum: Accumulation | None = None,
) -> TrainState | Accumulation:
    """Divide gradients by the window's weight and the loss scale now, to read them before `optimizer_step`.

    Args:
        ctx: the context.
        optimizer: all optimizers that take the step.
        scaler, accum: as for `optimizer_step`.

    Returns:
        The state or the window, with nothing left to divide. The step refuses other gradients than these.

    Raises:
        StepError: the window has not ended, or there are no gradients.
        ConfigError: a loss scale without its accumulation.
    """
    given, scaler, accum = _parts(scaler, accum, "accel.unscale_gradients")
    if accum is None:
        raise ConfigError(
            "dividing gradients needs an accumulation, which notes it",
            expected="a TrainState; or a LossScale, then an Accumulation",
            got="a LossScale alone",
            where="unscale_gradients",
        )
    if engine_of(ctx) is not None:
        raise ConfigError(
            "an engine divides its gradients within the step",
            expected="a strategy of accel",
            got=ctx.settings.strategy,
            where="unscale_gradients",
            fix="Leave the call out: clipping and the step divide what they need.",
        )
    window = checked_window(ctx, scaler, accum, given)
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    [grads] = window_gradients(ctx, window, parameters_of(optimizers))
    scale_(grads, division(ctx, window, total_weight(window)))
    # Noted in the window: a step that divided once more would go unseen.
    divided = keep_losses(window, msgspec.structs.replace(window, divided=len(grads) or -1, retained=False))
    if not isinstance(given, TrainState):
        return divided
    mark_followed(ctx, given, accum, "state = accel.unscale_gradients(ctx, optimizer, state)")
    return after_backward(given, divided)


def _parts(
    given: TrainState | LossScale, accum: Accumulation | None, call: str
) -> tuple[TrainState | Accumulation | None, LossScale, Accumulation | None]:
    """Return the record that the caller passed, and its loss scale and window."""
    if not isinstance(given, TrainState):
        return accum, given, accum
    check_alone(accum, call)
    return given, given.scaler, ended_window(given.accum, call)
