# SPDX-License-Identifier: Apache-2.0
"""`backward` and `accumulate`: losses become weighted sums of gradients, exchanged once a window.

A mean loss over `weight` units is multiplied by that weight, so gradients add up to the gradient of the sum over all
units; `optimizer_step` divides once, by the weight of all micro-batches and ranks. Any split of the same units into
ranks and micro-batches therefore gives the same gradient.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from time import perf_counter
from typing import overload

import msgspec
import torch
from torch import nn

from accel.context import DistContext, context_first
from accel.errors import ConfigError, StepError
from accel.optim import Accumulation
from accel.parallel import check_kept, engine_of, exchanging, no_sync, note_gradients, raise_lost_peer
from accel.precision import LossScale, matmul_precision
from accel.training._call_order import begun_window
from accel.training._loss_weights import on_device, start_sharing, weigh
from accel.training._train_state import TrainState, after_backward, weight_of
from accel.training._window import check_alone, check_records


@context_first
def accumulate(ctx: DistContext, state: TrainState | Accumulation, *models: nn.Module) -> AbstractContextManager[None]:
    """Hold back the exchange of gradients in this block's forward and backward until `state.sync`.

    At the start of a window it looks for gradients left by an earlier one; `optimizer_step` refuses to step with them.

    Args:
        ctx: the context.
        state: state from `state.next(batch)`, or an accumulation from `accum.next(...)`.
        models: all models that the block trains, from `prepare_model`.

    Returns:
        A context manager for one block.

    Raises:
        StepError: no micro-batch was begun; the window's gradients were cleared; at the end of a window's last block, a
            parameter took no part in the loss.
        PrepareError: a trainable model that is not prepared, on more ranks than one.
        PeerError: another rank was lost within the block.
        ContextClosedError: the context is closed.

    Example:
        >>> state = state.next(batch)
        >>> with accel.accumulate(ctx, state, model):
        ...     state = accel.backward(ctx, model(batch.data[0]).square().mean(), state)
    """
    ctx.comm.check_open()
    accum = begun_window(state.accum, "accel.accumulate") if isinstance(state, TrainState) else state
    if accum.micro == 0:
        raise StepError(
            "no micro-batch was begun",
            expected="accum = accum.next(last=batch.is_last) before accumulate",
            got="an accum between two windows",
            where=f"rank {ctx.rank}, accumulate",
        )
    block = exchanging(ctx, *models) if accum.sync or accum.sync_each_batch else no_sync(ctx, *models)
    if accum.micro == 1 and not accum.backwards:
        note_gradients(models)
    elif accum.micro == 2 and accum.backwards and not accum.sync_each_batch and engine_of(ctx) is None:
        check_kept(models)
    return block


@overload
def backward(
    ctx: DistContext,
    loss: torch.Tensor,
    state: TrainState,
    /,
    *,
    weight: float | torch.Tensor | None = None,
    same_units: bool = False,
    retain_graph: bool = False,
) -> TrainState: ...


@overload
def backward(
    ctx: DistContext, loss: torch.Tensor, scaler: LossScale, accum: None = None, *, retain_graph: bool = False
) -> None: ...


@overload
def backward(
    ctx: DistContext,
    loss: torch.Tensor,
    scaler: LossScale,
    accum: Accumulation,
    *,
    weight: float | torch.Tensor | None = None,
    same_units: bool = False,
    retain_graph: bool = False,
) -> Accumulation: ...


@context_first
def backward(
    ctx: DistContext,
    loss: torch.Tensor,
    scaler: TrainState | LossScale,
    accum: Accumulation | None = None,
    *,
    weight: float | torch.Tensor | None = None,
    same_units: bool = False,
    retain_graph: bool = False,
) -> TrainState | Accumulation | None:
    """Add the gradients of `loss * weight` to the parameters. Exchanges gradients when the window ends.

    `backward(ctx, loss, state)` takes and returns the `TrainState`. By its parts it is `backward(ctx, loss, scaler,
    accum)`, or `backward(ctx, loss, scaler)` with a step after each backward.

    Args:
        ctx: the context.
        loss: shape [], a mean over `weight` units on this rank.
        scaler: a `TrainState` within a batch; or a loss scale, from `loss_scale` or the latest step.
        accum: beside a loss scale, the current micro-batch; None with a step after each backward.
        weight: number of real units behind the mean: samples (`batch.valid`) or valid tokens. 0 adds nothing, if the
            loss's own gradient is finite: divide by tokens.clamp(min=1). The default beside a `TrainState` is
            `batch.valid`. By default beside its parts every micro-batch of every rank counts the same, once, whatever
            its number of backward passes.
        same_units: whether an earlier backward of this micro-batch was over the same units; the losses are then added,
            and their weight counts once.
        retain_graph: as in torch.autograd.backward.

    Returns:
        The state, or the accumulation, with the weight added; None without either.

    Raises:
        StepError: not a scalar loss with a gradient, or calls out of order.
        ConfigError: a weight that is no number from 0, or a weight without an accumulation; a record in the place of
            another.
        PeerError: another rank was lost while gradients were exchanged.

    Example:
        >>> state = accel.backward(ctx, model(batch.data[0]).square().mean(), state.next(batch))
        >>> state.sync
        True
    """
    if isinstance(scaler, TrainState):
        check_alone(accum, "backward")
        began = perf_counter()
        weight = weight_of(scaler, weight, same_units=same_units)
        window = backward(
            ctx,
            loss,
            scaler.scaler,
            scaler.accum,
            weight=weight,
            same_units=same_units,
            retain_graph=retain_graph,
        )
        return after_backward(scaler, window, began)
    ctx.comm.check_open()
    check_records(scaler, accum, "backward")
    check_loss(loss, "backward", "Take the mean over what `weight=` counts: loss.mean().")
    if loss.dtype in (torch.float16, torch.bfloat16):
        loss = loss.float()  # weight times scale does not fit into 16 bits
    if accum is None:
        if weight is not None:
            raise ConfigError(
                "a weight needs an accumulation",
                expected="an Accumulation beside weight=",
                got="weight alone",
                where="backward",
                fix="Pass accum, or leave weight out.",
            )
        _check_retained(ctx, retain_graph)
        run_backward(ctx, loss, scaler.scale, retain_graph=retain_graph)
        return None
    accum.check_scale(scaler)
    if accum.latest == accum.micro:  # a further pass of this batch, whose weight no later call would miss
        accum.follow("state = accel.backward(ctx, loss, state, ...), or accum = accel.backward(...)")
    added, factor = weigh(ctx, scaler, accum, weight, same_units=same_units)
    if retain_graph and accum.sync and ctx.world_size > 1:
        added = msgspec.structs.replace(added, retained=True)
    shared = start_sharing(ctx, added)
    run_backward(ctx, loss, factor, retain_graph=retain_graph)
    return shared()


def run_backward(
    ctx: DistContext, loss: torch.Tensor, factor: float | torch.Tensor, *, retain_graph: bool = False
) -> None:
    """Run backward of a loss times a factor.

    Args:
        ctx: the context.
        loss: shape [].
        factor: a number, or a tensor of shape [].
        retain_graph: as in torch.autograd.backward.

    Raises:
        PeerError: another rank was lost.
        StepError: DDP saw gradients twice.
    """
    if ctx.device.type == "xla" and not isinstance(factor, torch.Tensor):
        factor = on_device(ctx, factor)
    if isinstance(factor, torch.Tensor):
        loss = loss * factor.detach().reshape(()).to(loss.device, loss.dtype)
    elif factor != 1.0:
        loss = loss * factor  # torch takes three times as long to check a gradient that it is given
    engine = engine_of(ctx)
    try:
        with matmul_precision(ctx):
            if engine is None:
                torch.autograd.backward(loss, retain_graph=retain_graph)
            else:
                engine.backward(ctx, loss, retain_graph)
    except RuntimeError as error:
        raise_lost_peer(error, "backward")
        _raise_marked_twice(error)
        raise


def _raise_marked_twice(error: RuntimeError) -> None:
    if "ready only once" in str(error):
        raise StepError(
            "DDP saw some gradients twice and others not at all in one forward",
            expected="all of them in each backward",
            got=str(error).partition(". ")[0],
            where="backward",
            fix="Add the losses and call backward once: (first + second).",
        ) from error


def _check_retained(ctx: DistContext, retain_graph: bool) -> None:
    if retain_graph and ctx.world_size > 1:
        raise ConfigError(
            "retain_graph needs an accumulation, which notes that gradients of a second backward follow",
            expected="an Accumulation beside retain_graph=True",
            got="retain_graph alone",
            where="backward",
            fix="Pass accum, or add the losses and call backward once.",
        )


def check_loss(loss: torch.Tensor, where: str, fix: str) -> None:
    """Raise `StepError` unless a loss is a scalar with a gradient.

    Args:
        loss: as the user gave it.
        where: call, for errors.
        fix: way from a loss of several elements to a scalar.
    """
    if not isinstance(loss, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass what models return
        hint = "Pass it without .item()." if isinstance(loss, float) else "Pass the tensor itself, such as output.loss."
        raise StepError("a loss must be a tensor", got=type(loss).__name__, where=where, fix=hint)
    if loss.ndim:
        raise StepError(
            "a loss must be a scalar",
            expected="shape []",
            got=f"shape {list(loss.shape)}",
            where=where,
            fix=fix,
        )
    if not loss.requires_grad:
        raise StepError(
            "the loss has no gradient",
            expected="a loss computed from trainable parameters",
            got="requires_grad=False",
            where=where,
            fix="Look for no_grad, detach() or item() on its way, and for a model that is frozen.",
        )
