# SPDX-License-Identifier: Apache-2.0
"""`optimizer_step`: one division, one norm, one multiplication, one decision that is the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from accel.comm import all_reduce_flat
from accel.context import DistContext
from accel.errors import ConfigError, NonFiniteError, StepError, check_choice
from accel.optim import Accumulation, first_nonfinite, gradients, scale_, total_norm
from accel.precision import LossScale

NonFinite = Literal["raise", "skip", "ignore"]

_MOST_OVERFLOWS = 64  # in a row; halving that often takes any scale below what a float32 gradient can hold


class StepResult(NamedTuple):
    """What `optimizer_step` did, and the records to go on with.

    Attributes:
        stepped: whether parameters were changed.
        accum: the accumulation, between two windows.
        scaler: the loss scale for the next window.
        grad_norm: L2 norm of the gradients before clipping, shape []; None where nothing asked for it.
    """

    stepped: bool
    accum: Accumulation
    scaler: LossScale
    grad_norm: torch.Tensor | None


def optimizer_step(
    ctx: DistContext,
    optimizer: Optimizer | Sequence[Optimizer],
    scaler: LossScale,
    accum: Accumulation | None = None,
    *,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    max_norm: float | None = None,
    nonfinite: NonFinite = "raise",
) -> StepResult:
    """Divide, check, clip, step, and clear the gradients. Mutates parameters; a collective if weights need summing.

    The gradients of the window are divided by its weight over ranks and micro-batches and by the loss scale, in one
    pass together with clipping. A step that is left out changes no parameter, scheduler or optimizer state.

    Args:
        ctx: the context.
        optimizer: one, or all that take this step together: they share one norm and one decision.
        scaler: the loss scale that `backward` used.
        accum: the window that has ended; None if `backward` had none.
        scheduler: stepped once after the optimizer, whatever the world size.
        max_norm: longest L2 norm of the gradients; longer ones are shortened to it. None does not clip.
        nonfinite: what inf or NaN in a gradient does: `raise`, `skip` the step, or `ignore`, which does not look (and
            so need not wait for the device). Under a dynamic loss scale an overflow is always skipped.

    Returns:
        What happened, and the records to keep.

    Raises:
        StepError: calls out of order; nothing was changed.
        NonFiniteError: as `nonfinite` says, on every rank; parameters and gradients are left as they were.
        ConfigError: an option outside its range, or a scheduler that needs a metric.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    schedulers = _check_options(scheduler, max_norm, nonfinite)
    _check_window(scaler, accum)
    grads = gradients(optimizers)
    if not grads:
        raise StepError("there are no gradients", expected="a backward before the step", got="every .grad is None")
    window = accum or _plain_window(ctx, scaler)
    weight = _total_weight(ctx, window)
    looks = nonfinite != "ignore" or scaler.dynamic
    norm = total_norm(grads) if looks or max_norm is not None else None
    finite, empty = _read(norm, weight) if looks and norm is not None else (True, weight == 0.0)
    if not finite and (nonfinite == "raise" or scaler.dynamic):
        _check_overflow(scaler, window, optimizers, grads)
    if not finite or (isinstance(empty, bool) and empty):
        _clear(optimizers)
        after = window.close(stepped=False, finite=finite)
        return StepResult(False, after, scaler.update(finite=False) if not finite else scaler, None)
    factor = _factor(ctx, scaler, weight)
    norm = None if norm is None else norm * factor
    if max_norm is not None and norm is not None:
        factor = factor * (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if isinstance(factor, torch.Tensor) or factor != 1.0:
        scale_(grads, factor)
    for each in optimizers:
        each.step()
    _clear(optimizers)
    for each in schedulers:
        each.step()
    return StepResult(True, window.close(stepped=True), scaler.update(finite=True), norm)


def clip_grad_norm_(
    ctx: DistContext,
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    scaler: LossScale | None = None,
    accum: Accumulation | None = None,
) -> torch.Tensor:
    """Shorten gradients in place to a norm and return the norm before. A collective if weights need summing.

    For scripts that clip apart from `optimizer_step`, which clips with `max_norm=` in the same pass. The norm is that
    of the true gradient: the division by weight and loss scale that `optimizer_step` will make is reckoned with.

    Args:
        ctx: the context.
        parameters: whose gradients are clipped together.
        max_norm: longest L2 norm.
        scaler, accum: as for `optimizer_step`.

    Returns:
        The L2 norm before clipping, shape [].

    Raises:
        StepError: the window has not ended, or there are no gradients.
        ConfigError: max_norm is not above 0.
    """
    _check_options(None, max_norm, "raise")
    scale = scaler or LossScale()
    _check_window(scale, accum)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        raise StepError("there are no gradients", expected="a backward before clipping", got="every .grad is None")
    factor = _factor(ctx, scale, _total_weight(ctx, accum or _plain_window(ctx, scale)))
    norm = total_norm(grads) * factor
    scale_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _plain_window(ctx: DistContext, scaler: LossScale) -> Accumulation:
    """What a script without accumulation did: one backward, every rank of equal weight."""
    return Accumulation(micro=1, sync=True, unit=1.0, world_weight=float(ctx.world_size), scale=scaler.scale)


def _total_weight(ctx: DistContext, window: Accumulation) -> float | torch.Tensor:
    """The window's weight over all ranks, in its unit: a number where the plan knows it, else summed on the device."""
    if window.own_weight is None:
        return window.world_weight / window.unit
    own = window.own_weight.clone()
    summed = all_reduce_flat(ctx.comm, own, "sum") if ctx.world_size > 1 else own
    return (summed + window.world_weight) / window.unit


def _factor(ctx: DistContext, scaler: LossScale, weight: float | torch.Tensor) -> float | torch.Tensor:
    if isinstance(weight, torch.Tensor):  # without weight all gradients are zero, and stay it
        return torch.where(weight > 0, ctx.world_size / (weight * scaler.scale), 0.0)
    return ctx.world_size / (weight * scaler.scale)  # data parallel has divided by the world size


def _read(norm: torch.Tensor, weight: float | torch.Tensor) -> tuple[bool, bool]:
    """Whether the gradients are finite and whether the window is empty, in one wait for the device."""
    if isinstance(weight, torch.Tensor):
        values = torch.stack([norm.to(weight.dtype), weight.to(norm.device)])
        return bool(torch.isfinite(values[0])), bool(values[1] == 0)
    return math.isfinite(norm.item()), weight == 0.0


def _check_overflow(
    scaler: LossScale, window: Accumulation, optimizers: list[Optimizer], grads: list[torch.Tensor]
) -> None:
    if scaler.dynamic and scaler.overflows < _MOST_OVERFLOWS:
        return
    raise NonFiniteError(
        f"a gradient of step {window.updates} is not finite",
        expected="finite gradients" if not scaler.dynamic else f"a finite step within {_MOST_OVERFLOWS}",
        got=f"inf or NaN among {len(grads)} gradients",
        where=first_nonfinite(optimizers),
        fix="Lower the learning rate, clip with max_norm=, or pass nonfinite='skip' to leave such steps out.",
    )


def _clear(optimizers: list[Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()


def _check_window(scaler: LossScale, accum: Accumulation | None) -> None:
    if accum is None:
        return
    if not accum.sync:
        raise StepError(
            "the window has not ended",
            expected="optimizer_step when accum.sync",
            got=f"micro-batch {accum.micro} of {accum.steps}",
        )
    if accum.scale == 0.0:
        raise StepError(
            "the accumulation knows of no backward",
            expected="accum = accel.backward(ctx, loss, scaler, accum, ...)",
            got="an accum that no backward returned",
            fix="Keep what backward returns.",
        )
    if accum.scale != scaler.scale:
        raise StepError(
            "another loss scale than the gradients carry",
            expected=str(accum.scale),
            got=str(scaler.scale),
            fix="Step all optimizers of a window in one call: optimizer_step(ctx, [first, second], ...).",
        )


def _check_options(
    scheduler: LRScheduler | Sequence[LRScheduler] | None, max_norm: float | None, nonfinite: str
) -> list[LRScheduler]:
    if max_norm is not None and not max_norm > 0:
        raise ConfigError("not a norm to clip to", expected="above 0", got=repr(max_norm), where="max_norm=")
    check_choice(nonfinite, get_args(NonFinite), "unknown policy", where="nonfinite=")
    single = isinstance(scheduler, LRScheduler)
    schedulers: list[LRScheduler] = [scheduler] if single else list(scheduler or ())
    if any(isinstance(each, ReduceLROnPlateau) for each in schedulers):
        raise ConfigError(
            "ReduceLROnPlateau needs a metric",
            where="scheduler=",
            fix="Call scheduler.step(metric) yourself, with a metric from accel.reduce, the same on every rank.",
        )
    return schedulers
