# SPDX-License-Identifier: Apache-2.0
"""`optimizer_step`: one division, one norm, one multiplication, one decision that is the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar, get_args, overload

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from accel.comm import all_reduce_flat
from accel.context import DistContext
from accel.errors import ConfigError, NonFiniteError, StepError, check_choice
from accel.optim import Accumulation, first_nonfinite, gradients, scale_, total_norm
from accel.precision import LossScale

A = TypeVar("A")
NonFinite = Literal["raise", "skip", "ignore"]

_POLICIES = get_args(NonFinite)
_MOST_OVERFLOWS = 64  # in a row; halving that often takes any scale below what a float32 gradient can hold


class StepResult(NamedTuple, Generic[A]):
    """What `optimizer_step` did, and the records to go on with.

    Attributes:
        stepped: whether parameters were changed.
        accum: the accumulation, between two windows; None if none was passed.
        scaler: the loss scale for the next window.
        grad_norm: L2 norm of the gradients before clipping, shape []; None where nothing asked for it.
    """

    stepped: bool
    accum: A
    scaler: LossScale
    grad_norm: torch.Tensor | None


@overload
def optimizer_step(
    ctx: DistContext,
    optimizer: Optimizer | Sequence[Optimizer],
    scaler: LossScale,
    accum: None = None,
    *,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    max_norm: float | None = None,
    nonfinite: NonFinite = "raise",
) -> StepResult[None]: ...


@overload
def optimizer_step(
    ctx: DistContext,
    optimizer: Optimizer | Sequence[Optimizer],
    scaler: LossScale,
    accum: Accumulation,
    *,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    max_norm: float | None = None,
    nonfinite: NonFinite = "raise",
) -> StepResult[Accumulation]: ...


def optimizer_step(
    ctx: DistContext,
    optimizer: Optimizer | Sequence[Optimizer],
    scaler: LossScale,
    accum: Accumulation | None = None,
    *,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    max_norm: float | None = None,
    nonfinite: NonFinite = "raise",
) -> StepResult[Accumulation] | StepResult[None]:
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
            so need not wait for the device; a window without weight is then a step with zero gradients). Under a
            dynamic loss scale an overflow is always skipped.

    Returns:
        What happened, and the records to keep.

    Raises:
        StepError: calls out of order; nothing was changed.
        NonFiniteError: as `nonfinite` says, on every rank; parameters and gradients are left as they were.
        ConfigError: an option outside its range, or a scheduler or optimizer that needs more than a step.
        ContextClosedError: the context is closed.
    """
    ctx.comm.check_open()
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    schedulers = _check_options(optimizers, scheduler, nonfinite)
    _check_max_norm(max_norm)
    _check_window(scaler, accum)
    grads = _checked(gradients(optimizers))
    weight = _total_weight(ctx, accum or _plain_window(ctx, scaler))
    looks = nonfinite != "ignore" or scaler.dynamic
    norm = total_norm(grads) if looks or max_norm is not None else None
    finite, empty = _read(norm, weight) if looks and norm is not None else (True, False)
    if not finite and (nonfinite == "raise" or scaler.dynamic):
        _check_overflow(scaler, accum, optimizers, grads)
    if not finite or empty:
        _clear(optimizers)
        return _result(False, accum, scaler, None, finite=finite)
    factor = _factor(ctx, scaler, weight)
    norm = None if norm is None else norm * factor
    if max_norm is not None and norm is not None:
        factor = factor * _clipping(norm, max_norm)
    if isinstance(factor, torch.Tensor) or factor != 1.0:
        scale_(grads, factor)
    told = None if norm is None else _as_tensor(norm, grads)
    for each in optimizers:
        each.step()
    _clear(optimizers)
    for each in schedulers:
        each.step()
    return _result(True, accum, scaler, told, finite=True)


def clip_grad_norm_(
    ctx: DistContext,
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    scaler: LossScale,
    accum: Accumulation | None,
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
    ctx.comm.check_open()
    _check_max_norm(max_norm)
    _check_window(scaler, accum)
    grads = _checked([parameter.grad for parameter in parameters if parameter.grad is not None])
    factor = _factor(ctx, scaler, _total_weight(ctx, accum or _plain_window(ctx, scaler)))
    norm = total_norm(grads) * factor
    scale_(grads, _clipping(norm, max_norm))
    return _as_tensor(norm, grads)


def _plain_window(ctx: DistContext, scaler: LossScale) -> Accumulation:
    """What a script without accumulation did: one backward, every rank of equal weight."""
    return Accumulation(unit=1.0, world_weight=float(ctx.world_size), scale=scaler.scale)


def _total_weight(ctx: DistContext, window: Accumulation) -> float | torch.Tensor:
    """The window's weight over all ranks, in its unit: a number where the plan knows it, else summed on the device."""
    if window.own_weight is None:
        return window.world_weight / window.unit
    own = window.own_weight.clone()
    summed = all_reduce_flat(ctx.comm, own, "sum") if ctx.world_size > 1 else own
    weight = (summed + window.world_weight) / window.unit
    return weight.item() if weight.is_cpu else weight


def _factor(ctx: DistContext, scaler: LossScale, weight: float | torch.Tensor) -> float | torch.Tensor:
    if isinstance(weight, torch.Tensor):  # without weight all gradients are zero, and stay it
        return torch.where(weight > 0, ctx.world_size / (weight * scaler.scale), 0.0)
    if weight == 0.0:
        return 0.0
    return ctx.world_size / (weight * scaler.scale)  # data parallel has divided by the world size


def _clipping(norm: float | torch.Tensor, max_norm: float) -> float | torch.Tensor:
    """What gradients of a norm are multiplied by to be no longer than `max_norm`; torch.nn.utils has the same 1e-6."""
    if isinstance(norm, torch.Tensor):
        return (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return min(max_norm / (norm + 1e-6), 1.0)


def _as_tensor(norm: float | torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
    return torch.as_tensor(norm, dtype=torch.promote_types(grads[0].dtype, torch.float32))


def _read(norm: float | torch.Tensor, weight: float | torch.Tensor) -> tuple[bool, bool]:
    """Whether the gradients are finite and whether the window is empty, in one wait for the device."""
    length, total = norm, weight
    if isinstance(norm, torch.Tensor) and isinstance(weight, torch.Tensor):
        length, total = (float(value) for value in torch.stack([norm.to(weight), weight]).cpu())
    length, total = float(length), float(total)
    if not total >= 0:
        raise ConfigError("not a weight", expected="a sum of 0 or above", got=repr(total), where="backward(weight=)")
    return math.isfinite(length), total == 0


def _check_overflow(
    scaler: LossScale, accum: Accumulation | None, optimizers: list[Optimizer], grads: list[torch.Tensor]
) -> None:
    if scaler.dynamic and scaler.overflows < _MOST_OVERFLOWS:
        return
    raise NonFiniteError(
        "a gradient is not finite" if accum is None else f"a gradient of step {accum.updates} is not finite",
        expected="finite gradients" if not scaler.dynamic else f"a finite step within {_MOST_OVERFLOWS}",
        got=f"inf or NaN among {len(grads)} gradients",
        where=first_nonfinite(optimizers),
        fix="Lower the learning rate, clip with max_norm=, or pass nonfinite='skip' to leave such steps out.",
    )


def _result(
    stepped: bool, accum: Accumulation | None, scaler: LossScale, norm: torch.Tensor | None, *, finite: bool
) -> StepResult[Accumulation] | StepResult[None]:
    after = scaler.update(finite=finite) if stepped or not finite else scaler
    if accum is None:
        return StepResult(stepped, None, after, norm)
    return StepResult(stepped, accum.close(stepped=stepped, finite=finite), after, norm)


def _clear(optimizers: list[Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()


def _checked(grads: list[torch.Tensor]) -> list[torch.Tensor]:
    if not grads:
        raise StepError(
            "there are no gradients",
            expected="a backward before the step",
            got="every .grad is None",
            fix="Call accel.backward first, on a loss of these parameters.",
        )
    if any(grad.layout is not torch.strided for grad in grads):
        raise StepError(
            "a sparse gradient cannot be clipped and scaled",
            expected="dense gradients",
            got=f"{sum(grad.layout is not torch.strided for grad in grads)} sparse ones",
            fix="Build the embedding with sparse=False.",
        )
    return grads


def _check_window(scaler: LossScale, accum: Accumulation | None) -> None:
    if accum is None:
        return
    if not accum.sync:
        raise StepError(
            "the window has not ended",
            expected="optimizer_step when accum.sync",
            got=f"micro-batch {accum.micro} of {accum.steps}",
            fix="Guard the call with `if accum.sync:`.",
        )
    if accum.backwards < accum.micro:
        raise StepError(
            "the accumulation does not know of every backward",
            expected=f"{accum.micro} backward passes, one in each micro-batch",
            got=f"{accum.backwards}",
            fix="Keep what backward returns: accum = accel.backward(ctx, loss, scaler, accum, ...).",
        )
    if accum.scale != scaler.scale:
        raise StepError(
            "another loss scale than the gradients carry",
            expected=str(accum.scale),
            got=str(scaler.scale),
            fix="Step all optimizers of a window in one call: optimizer_step(ctx, [first, second], ...).",
        )


def _check_options(
    optimizers: list[Optimizer],
    scheduler: LRScheduler | Sequence[LRScheduler] | None,
    nonfinite: str,
) -> list[LRScheduler]:
    if any(isinstance(each, torch.optim.LBFGS) for each in optimizers):
        raise ConfigError(
            "LBFGS evaluates the loss within its step", where="optimizer_step", fix="Call optimizer.step(closure)."
        )
    check_choice(nonfinite, _POLICIES, "unknown policy", where="nonfinite=")
    single = isinstance(scheduler, LRScheduler)
    schedulers: list[LRScheduler] = [scheduler] if single else list(scheduler or ())
    if any(isinstance(each, ReduceLROnPlateau) for each in schedulers):
        raise ConfigError(
            "ReduceLROnPlateau needs a metric",
            where="scheduler=",
            fix="Call scheduler.step(metric) yourself, with a metric from accel.reduce, the same on every rank.",
        )
    return schedulers


def _check_max_norm(max_norm: float | None) -> None:
    if max_norm is not None and not max_norm > 0:
        raise ConfigError("not a norm to clip to", expected="above 0", got=repr(max_norm), where="max_norm=")
