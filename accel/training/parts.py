# SPDX-License-Identifier: Apache-2.0
"""The verbs of the loop on the parts of a `TrainState`: a loss scale and an accumulation, as separate records.

For models that step in turn, data without accel's batches, and loops of other frameworks. A dropped `accum =` or
`step.scaler` is a `StepError` at a later call, as a dropped state is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accel.context import DistContext, context_first
from accel.errors import ConfigError, StepError
from accel.loop_state import Accumulation, LossScale
from accel.training._backward import Graph, add_loss, window_block
from accel.training._clip import clip_elements, clip_norm, divide
from accel.training._forward_backward import run_batch
from accel.training._loss_sums import LossFn
from accel.training._refused import refuse_in_closure
from accel.training._step import MaxNorm, NonFinite, StepOptions, StepResult, step_objects, step_window
from accel.training._window import StepWindow

__all__ = [
    "StepResult",
    "accumulate",
    "backward",
    "clip_grad_norm_",
    "clip_grad_value_",
    "forward_backward",
    "optimizer_step",
    "unscale_gradients",
]
__dir__ = __all__.copy


@context_first
def accumulate(ctx: DistContext, accum: Accumulation, *models: nn.Module) -> AbstractContextManager[None]:
    """Hold back the exchange of gradients until `accum.sync`, as `accel.accumulate`.

    Args:
        ctx: the context.
        accum: accumulation from `accum.next(...)`.
        models: all models that the block trains, from `prepare_model`.
    """
    ctx.comm.check_open()
    _check(LossScale(), accum, "accumulate")
    if accum.micro == 0:
        raise StepError(
            "no micro-batch has begun",
            expected="accum = accum.next(last=batch.is_last) before accumulate",
            got="an accum between two windows",
            where=f"rank {ctx.rank}, accumulate",
        )
    return window_block(ctx, accum, models)


@context_first
def backward(
    ctx: DistContext,
    loss: torch.Tensor,
    scaler: LossScale,
    accum: Accumulation | None = None,
    *,
    weight: float | torch.Tensor | None = None,
    same_units: bool = False,
    retain_graph: bool = False,
    create_graph: bool = False,
    inputs: Sequence[torch.Tensor] | torch.Tensor | None = None,
) -> Accumulation:
    """Add the gradients of `loss * weight` to the parameters, as `accel.backward`.

    Args:
        ctx: the context.
        loss: shape [], a mean over `weight` units on this rank.
        scaler: loss scale, from `loss_scale` or the latest step.
        accum: the current micro-batch; None for a step after each backward, in which every rank's loss counts the same.
        weight: number of real units behind the mean. By default every micro-batch of every rank counts the same, once,
            whatever its number of backward passes.
        same_units, retain_graph, create_graph, inputs: as for `accel.backward`.

    Returns:
        The accumulation with the weight added.

    Raises:
        ConfigError: `weight` or `retain_graph` without an accumulation; or as `accel.backward`.
        StepError, PeerError: as `accel.backward`.
    """
    _check(scaler, accum, "backward")
    if accum is None and (weight is not None or (retain_graph and ctx.world_size > 1)):
        raise ConfigError(
            "weight= and retain_graph= need an accumulation",
            expected="an Accumulation with weight= or retain_graph=",
            got="only a LossScale",
            where="backward",
            fix="accum = accel.training.parts.backward(ctx, loss, scaler, accel.Accumulation().next(), weight=weight)",
        )
    window = Accumulation().next() if accum is None else accum
    if ctx.comm.closure == "closure=" or (ctx.comm.closure and (accum is not None or scaler.scale != 1.0)):
        refuse_in_closure(ctx)
    graph = Graph(retain_graph, create_graph, inputs)
    return add_loss(ctx, loss, StepWindow(window, scaler, window), weight, graph, same_units=same_units)


@context_first
def forward_backward(
    ctx: DistContext,
    model: nn.Module,
    scaler: LossScale,
    accum: Accumulation | None,
    inputs: Any,
    /,
    *,
    loss_fn: LossFn,
    weight: float | torch.Tensor,
    targets: Any = None,
) -> tuple[torch.Tensor, Accumulation]:
    """Run forward and backward of a batch in micro-batches, as `accel.forward_backward`.

    Args:
        ctx: the context.
        model: from `prepare` or `prepare_model`.
        scaler, accum: as for `backward`.
        inputs, loss_fn, targets: as for `accel.forward_backward`.
        weight: number of real units in the batch.

    Returns:
        The mean loss of this rank's batch, detached, shape [], and the accumulation with the weight added.
    """
    _check(scaler, accum, "forward_backward")
    window = Accumulation().next() if accum is None else accum
    taken = StepWindow(window, scaler, window)
    return run_batch(ctx, model, taken, inputs, targets, loss_fn, weight, counts=accum is not None)


@context_first
def optimizer_step(
    ctx: DistContext,
    optimizer: Optimizer | Sequence[Optimizer],
    scaler: LossScale,
    accum: Accumulation | None = None,
    *,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    max_norm: MaxNorm = None,
    norm_type: float = 2.0,
    max_value: float | None = None,
    nonfinite: NonFinite = "raise",
) -> StepResult:
    """Divide, check, clip, step, and clear the gradients, as `accel.optimizer_step`.

    Args:
        ctx: the context.
        optimizer: an optimizer, or several that take this step together, with one norm and one decision.
        scaler: loss scale that `backward` used.
        accum: window that has ended; None if `backward` had none.
        scheduler, max_norm, norm_type, max_value, nonfinite: as for `accel.optimizer_step`.
    """
    options = StepOptions(scheduler, max_norm, norm_type, max_value, nonfinite)
    optimizers, schedulers = step_objects(ctx, optimizer, options)
    result, _ = step_window(ctx, optimizers, schedulers, _ended(ctx, scaler, accum, "optimizer_step"), options)
    return result


@context_first
def clip_grad_norm_(
    ctx: DistContext,
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    scaler: LossScale,
    accum: Accumulation | None = None,
    *,
    norm_type: float = 2.0,
) -> torch.Tensor:
    """Shorten gradients in place to a norm and return the norm before, as `accel.clip_grad_norm_`.

    Args:
        ctx: the context.
        parameters: all parameters that share the norm.
        max_norm: longest norm.
        scaler, accum: as for `optimizer_step`.
        norm_type: p of the p-norm, above 0; inf for the largest absolute value.
    """
    return clip_norm(ctx, parameters, max_norm, _ended(ctx, scaler, accum, "clip_grad_norm_"), norm_type)


@context_first
def clip_grad_value_(
    ctx: DistContext,
    parameters: Iterable[torch.Tensor],
    clip_value: float,
    scaler: LossScale,
    accum: Accumulation | None = None,
) -> None:
    """Clamp every element of gradients to [-clip_value, clip_value], in place, as `accel.clip_grad_value_`.

    Args:
        ctx: the context.
        parameters: replicated or sharded.
        clip_value: largest absolute value.
        scaler, accum: as for `optimizer_step`.
    """
    clip_elements(ctx, parameters, clip_value, _ended(ctx, scaler, accum, "clip_grad_value_"))


@context_first
def unscale_gradients(
    ctx: DistContext, optimizer: Optimizer | Sequence[Optimizer], scaler: LossScale, accum: Accumulation
) -> Accumulation:
    """Divide gradients by the window's weight and the loss scale now, as `accel.unscale_gradients`.

    Args:
        ctx: the context.
        optimizer: all optimizers that take the step; or some, if another step takes their gradients.
        scaler, accum: as for `optimizer_step`.

    Returns:
        The accumulation with nothing left to divide.
    """
    return divide(ctx, optimizer, _ended(ctx, scaler, accum, "unscale_gradients"))


def _check(scaler: object, accum: object, where: str) -> None:
    """Raise `ConfigError` where one record stands in the place of the other: both have a `scale`."""
    if not isinstance(scaler, LossScale) or not (accum is None or isinstance(accum, Accumulation)):
        raise ConfigError(
            "these are not the parts of a state",
            expected="a LossScale, then an Accumulation or None",
            got=f"{type(scaler).__name__}, {type(accum).__name__}",
            where=f"accel.training.parts.{where}",
            fix="A TrainState goes to the function of this name at the top of accel.",
        )


def _ended(ctx: DistContext, scaler: LossScale, accum: Accumulation | None, where: str) -> StepWindow:
    """Return a window that may be stepped with; for a script without accumulation, one of a single backward."""
    _check(scaler, accum, where)
    if accum is None:
        accum = Accumulation(unit=1.0, world_weight=float(ctx.world_size), scale=scaler.scale)
        return StepWindow(accum, scaler, accum)
    if not accum.sync:
        raise StepError(
            "the window has not ended",
            expected="optimizer_step when accum.sync",
            got=f"micro-batch {accum.micro} of {accum.steps}",
            fix="Guard the call with `if accum.sync:`.",
        )
    if accum.backwards < accum.micro:
        raise StepError(
            "the accumulation has no record of every backward",
            expected=f"{accum.micro} backward passes, one in each micro-batch",
            got=f"{accum.backwards}",
            fix="Keep what backward returns: accum = accel.training.parts.backward(ctx, loss, scaler, accum, ...).",
        )
    return StepWindow(accum, scaler, accum)
