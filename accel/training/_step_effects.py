# SPDX-License-Identifier: Apache-2.0
"""Effects of an optimizer step on gradients and parameters: one norm, one wait for the device, one multiplication."""

from __future__ import annotations

import itertools
import math

import torch
from torch.optim import Optimizer

from accel.context import DistContext
from accel.devices import wide_dtype
from accel.errors import ConfigError, StepError
from accel.optim import Accumulation, clamp_, parameters_of, scale_, step_masters
from accel.parallel import Engine, StepOutcome, StepRequest
from accel.training._pipeline_norm import whole_norm
from accel.training._window import as_tensor, check_real, shortening, window_gradients


def step_here(
    ctx: DistContext,
    optimizers: list[Optimizer],
    window: Accumulation,
    weight: float | torch.Tensor,
    request: StepRequest,
) -> StepOutcome:
    """Divide, clip, step and clear the gradients. A collective if some are sharded.

    Gradients and parameters do not change if the window is empty, or if a checked gradient is not finite.

    Args:
        ctx: the context.
        optimizers: all optimizers of this step.
        window: the window that has ended.
        weight: its weight over all ranks.
        request: factor, limits and policy.

    Raises:
        StepError: there are no gradients, or not those of a step.
        ConfigError: value clipping of complex gradients, or a weight that is no number.
    """
    parts = _parts(ctx, optimizers, window, joint=request.joint)
    if request.max_value is not None:
        check_real(itertools.chain(*parts), "max_value=")
    clips = any(limit is not None for limit in request.max_norms)
    every = parameters_of(optimizers)
    norms = [whole_norm(ctx, part, every, request.norm_type) for part in parts] if request.check_finite or clips else []
    if request.check_finite:
        finite, empty = _read(norms, weight)
        if empty or not finite:
            return StepOutcome(stepped=False, finite=finite, grad_norm=None)
    norms = [norm * request.factor for norm in norms]
    _apply(parts, request, norms)
    grad_norm = _joined(norms, parts, joint=request.joint)
    for each in optimizers:
        if ctx.precision.master_weights is None:
            each.step()
        else:
            step_masters(each)
    clear_here(optimizers)
    return StepOutcome(stepped=True, finite=True, grad_norm=grad_norm)


def step_by(
    engine: Engine,
    ctx: DistContext,
    optimizers: list[Optimizer],
    weight: float | torch.Tensor,
    request: StepRequest,
) -> StepOutcome:
    """Let an engine step, unless the window is known to be empty."""
    if request.check_finite:
        _, empty = _read([], weight)
        if empty:
            return StepOutcome(stepped=False, finite=True, grad_norm=None)
    return engine.step(ctx, optimizers, request)


def clear_here(optimizers: list[Optimizer]) -> None:
    """Clear gradients as `zero_grad` does, without its records for the profiler, which take most of its time."""
    for optimizer in optimizers:
        if getattr(optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad:  # overridden, or wrapped
            optimizer.zero_grad()
            continue
        for each in parameters_of([optimizer]):
            each.grad = None


def _parts(
    ctx: DistContext, optimizers: list[Optimizer], window: Accumulation, *, joint: bool
) -> list[list[torch.Tensor]]:
    """Group gradients by norm: all, or those of each optimizer; a parameter of two counts for the first."""
    groups = [parameters_of(optimizers)] if joint else _disjoint([parameters_of([each]) for each in optimizers])
    parts = window_gradients(ctx, window, *groups)
    if window.divided and window.divided != sum(map(len, parts)):
        raise StepError(
            "some of the gradients were divided by weight and loss scale, and others not",
            expected="unscale_gradients of all optimizers that take the step",
            got=f"{window.divided} gradients divided, {sum(map(len, parts))} in the step",
            fix="Pass both the same optimizers: accum = accel.unscale_gradients(ctx, [first, second], scaler, accum).",
        )
    return parts


def _disjoint(groups: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    seen: set[int] = set()
    left: list[list[torch.Tensor]] = []
    for group in groups:
        left.append([each for each in group if id(each) not in seen])
        seen.update(map(id, group))
    return left


def _read(norms: list[float | torch.Tensor], weight: float | torch.Tensor) -> tuple[bool, bool]:
    """Return whether the gradients are finite and whether the window is empty, in one wait for the device."""
    values = [*norms, weight]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if tensors:
        first = tensors[0]
        wide = wide_dtype(first.device)
        read = iter(torch.stack([value.to(first.device, wide) for value in tensors]).cpu())
        values = [next(read) if isinstance(value, torch.Tensor) else value for value in values]
    *lengths, total = map(float, values)
    if not 0 <= total < math.inf:
        raise ConfigError(
            "a weight of this window is none",
            expected="finite numbers, 0 or above",
            got=f"a sum of {total}",
            where="backward, weight=",
            fix="The window's gradients are invalid: drop them by accel.discard or accel.clear_gradients.",
        )
    return all(map(math.isfinite, lengths)), total == 0


def _apply(parts: list[list[torch.Tensor]], request: StepRequest, norms: list[float | torch.Tensor]) -> None:
    """Divide and clip, in one pass over the gradients that share a norm."""
    for at, part in enumerate(parts):
        if not part:
            continue  # an optimizer none of whose parameters took part
        factor, limit = request.factor, request.max_norms[at]
        if limit is not None:
            factor = factor * shortening(norms[at], limit)
        if isinstance(factor, torch.Tensor) or factor != 1.0:
            scale_(part, factor)
        if request.max_value is not None:
            clamp_(part, request.max_value)


def _joined(norms: list[float | torch.Tensor], parts: list[list[torch.Tensor]], *, joint: bool) -> torch.Tensor | None:
    """Return the norms as one tensor: of shape [] for all together, else of one norm for each optimizer."""
    if not norms:
        return None
    if joint:
        return as_tensor(norms[0], parts[0])
    device = next((norm.device for norm in norms if isinstance(norm, torch.Tensor)), None)
    return torch.stack([as_tensor(norm, part, device) for norm, part in zip(norms, parts, strict=True)])
