# SPDX-License-Identifier: Apache-2.0
"""Weights of losses: the number of units behind each mean, in the unit of its window."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

import torch

from accel.comm import start_all_reduce
from accel.context import DistContext
from accel.data import SampleCount
from accel.devices import wide_dtype
from accel.errors import ConfigError, StepError
from accel.optim import Accumulation
from accel.precision import LossScale


def weigh(
    ctx: DistContext,
    scaler: LossScale,
    accum: Accumulation,
    weight: float | torch.Tensor | None,
    *,
    same_units: bool,
) -> tuple[Accumulation, float | torch.Tensor]:
    """Add the weight of a backward pass to its window. No communication.

    Args:
        ctx: the context.
        scaler: loss scale of the window.
        accum: window within a micro-batch.
        weight: number of units behind the loss, a mean; None where every micro-batch counts the same.
        same_units: whether an earlier backward of the micro-batch has counted the same units.

    Returns:
        The window with the weight, and the factor of the loss.

    Raises:
        StepError: a first backward with `same_units`, or a window with weights in some backward passes only.
        ConfigError: the weight is no finite number from 0.
    """
    unit = accum.unit or _unit(ctx, weight, accum.steps)
    again = accum.latest == accum.micro
    if same_units and not again:
        raise StepError(
            "no backward of this micro-batch has counted these units",
            expected="same_units=True from its second backward on",
            got="it in the first",
            where="backward",
        )
    _check_alike(accum, weight)
    weighted = weight is not None
    if weight is None:
        world = 0.0 if again else float(ctx.world_size)
        return accum.add(scale=scaler.scale, unit=unit, weighted=weighted, world=world), scaler.scale / unit
    if isinstance(weight, SampleCount):
        own = None
        world = 0.0 if same_units else float(weight.world * weight.copies)
        factor = weight / unit * scaler.scale
    else:
        known = own_weight(ctx, weight)
        factor = known / unit * scaler.scale
        world, own = 0.0, None
        if not same_units and ctx.world_size == 1:
            world = known
        elif not same_units:
            own = known
    return accum.add(scale=scaler.scale, unit=unit, weighted=weighted, world=world, own=own), factor


def start_sharing(ctx: DistContext, added: Accumulation) -> Callable[[], Accumulation]:
    """Begin to sum a window's weights over ranks where it ends; return a function that waits for it. A collective.

    The message travels while backward computes. None is sent for weights that every rank knows.

    Args:
        ctx: the context.
        added: window with the weight of this backward pass.
    """
    own = added.own_weight
    if not added.sync or ctx.world_size == 1 or own is None:
        return lambda: added
    total = own.clone() if isinstance(own, torch.Tensor) else on_device(ctx, own)
    wait = start_all_reduce(ctx.comm, total, "sum")

    def end() -> Accumulation:
        wait()
        return added.share(total.item() if total.is_cpu else total)

    return end


def own_weight(ctx: DistContext, weight: float | torch.Tensor) -> float | torch.Tensor:
    """Return a weight that only this rank knows: a number where reading it does not wait for a device.

    A wrong weight on a device becomes NaN, which the step reads together with the total weight.

    Raises:
        ConfigError: the weight is no finite number from 0.
    """
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1 or weight.is_complex():
            raise _no_weight(f"a tensor of shape {list(weight.shape)} and {weight.dtype}")
        if not weight.is_cpu:
            there = weight.detach().reshape(()).to(ctx.device, _weight_dtype(ctx))
            return torch.where(there >= 0, there, math.nan)
        weight = weight.item()
    try:
        number = float(weight) if isinstance(weight, Real) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not 0 <= number < math.inf:
        raise _no_weight("a number too large" if number == math.inf else repr(weight))
    return number


def on_device(ctx: DistContext, number: float) -> torch.Tensor:
    """Return a number as a tensor of shape [] on the context's device.

    For XLA it is data: a constant would be part of the graph, which must be the same on all ranks.
    """
    if ctx.device.type == "xla":
        return torch.tensor(number, dtype=_weight_dtype(ctx), device="cpu").to(ctx.device)
    return torch.full((), number, dtype=_weight_dtype(ctx), device=ctx.device)


def _check_alike(accum: Accumulation, weight: float | torch.Tensor | None) -> None:
    """Raise `StepError` where a window has backward passes with a weight and without."""
    if accum.weighted is None or accum.weighted == (weight is not None):
        return
    raise StepError(
        "some backward passes of this window have a weight, and others not",
        expected="weight= in all of them, or in none",
        got=f"{'none' if weight is None else 'one'} in micro-batch {accum.micro} of {accum.steps}",
        where="backward, weight=",
        fix="Pass weight= each time, such as batch.valid; beside same_units=True too.",
    )


def _unit(ctx: DistContext, weight: float | torch.Tensor | None, steps: int) -> float:
    """Return the unit of the window's weights: a full window of equal parts then needs no division at its end."""
    if isinstance(weight, SampleCount):
        return weight.world * weight.copies / ctx.world_size * steps or 1.0
    return float(steps) if weight is None else 1.0


def _weight_dtype(ctx: DistContext) -> torch.dtype:
    return wide_dtype(ctx.device)


def _no_weight(got: str) -> ConfigError:
    return ConfigError("not a weight", expected="a finite number, 0 or above", got=got, where="backward, weight=")
