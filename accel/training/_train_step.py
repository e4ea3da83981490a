# SPDX-License-Identifier: Apache-2.0
"""`train_step`: the whole step of a loop with one model and one loss, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accel.context import DistContext, context_first
from accel.data._batches import Batch
from accel.errors import ConfigError, DataError
from accel.errors._checks import check_kind
from accel.training._forward_backward import forward_backward
from accel.training._loss_sums import LossFn
from accel.training._step import MaxNorm, optimizer_step
from accel.training._train_state import TrainState


@context_first
def train_step(
    ctx: DistContext,
    state: TrainState,
    batch: Batch,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loss_fn: LossFn,
    *,
    inputs: Any = None,
    targets: Any = None,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    max_norm: MaxNorm = None,
    weight: float | torch.Tensor | None = None,
    last: bool = False,
) -> tuple[TrainState, torch.Tensor]:
    """Train on one batch: `state.next`, `forward_backward` and, where the window ends, `optimizer_step`.

    The same on every mesh, pipelines among them. A collective where the window ends, and along a pipeline. Several
    models, a loss that reads the model, and several backward passes need the three calls themselves.

    Args:
        ctx: the context.
        state: the state before the batch.
        batch: the one that follows, from `batches(ctx, loader, state)`.
        model: from `prepare` or `prepare_model`.
        optimizer: an optimizer, or several that step together at the end of the window.
        loss_fn: maps the model's output and the targets to the **sum** of the losses of the real units, shape [].
        inputs: inputs of the model, as for `forward_backward`; by default the first of the pair `batch.data`.
        targets: targets of `loss_fn`; by default the second of the pair. Passed together with `inputs`.
        scheduler: scheduler or schedulers, stepped once after the optimizer.
        max_norm: largest norm of the gradients, as for `optimizer_step`; None does not clip.
        weight: number of real units in the batch; by default `batch.valid`.
        last: whether the window ends with this batch, full or not.

    Returns:
        The next state, to be kept, and the mean loss of this rank's batch, detached, shape [].

    Raises:
        DataError: `batch.data` is no pair, and neither inputs nor targets are given.
        ConfigError: one of inputs and targets without the other, or no `TrainState`.
        StepError: an earlier state was dropped, or as for `optimizer_step`.
        NonFiniteError: a gradient is inf or NaN, on every rank; parameters did not change.
        PeerError: another rank was lost.

    Examples:
        >>> loss_sum = lambda output, targets: (output - targets).square().sum()
        >>> state, loss = accel.train_step(ctx, state, batch, model, optimizer, loss_sum)
        >>> state.updates, loss.shape
        (1, torch.Size([]))
    """
    check_kind(
        state,
        TrainState,
        "train_step needs the full state",
        expected="a TrainState, from accel.train_state(ctx)",
        where="train_step, state",
        fix="For a loss scale and an accumulation without a state, see accel.training.parts.",
    )
    inputs, targets = _pair(batch, inputs, targets)
    state = state.next(batch, last=last)
    # Gradients stay on this rank, undivided, until the window's last batch: only then do ranks exchange them.
    loss, state = forward_backward(ctx, model, state, inputs, loss_fn=loss_fn, targets=targets, weight=weight)
    if state.sync:
        state = optimizer_step(ctx, optimizer, state, scheduler=scheduler, max_norm=max_norm)
    return state, loss


def _pair(batch: Batch, inputs: Any, targets: Any) -> tuple[Any, Any]:
    """Return the inputs and targets: both as given, or the pair `batch.data`."""
    if inputs is not None and targets is not None:
        return inputs, targets
    if inputs is not None or targets is not None:
        given, lacking = ("inputs", "targets") if targets is None else ("targets", "inputs")
        raise ConfigError(
            f"{given}= is given without {lacking}=",
            expected="both, or neither for a pair in batch.data",
            got=f"{given}= only",
            where="train_step",
            fix="A loss without targets needs the open loop: accel.forward_backward and accel.optimizer_step.",
        )
    fix = 'Pass both: train_step(..., inputs=batch.data["x"], targets=batch.data["y"]).'
    return pair_of(batch, where="train_step", fix=fix)


def pair_of(batch: Batch, *, where: str, fix: str) -> tuple[Any, Any]:
    """Return the pair `batch.data`."""
    data: object = batch.data
    items = cast("Sequence[object]", data) if isinstance(data, tuple | list) else ()
    if len(items) != 2:
        named = (
            f" with keys {', '.join(map(str, cast('dict[object, object]', data)))}" if isinstance(data, dict) else ""
        )
        raise DataError(
            "batch.data is not a pair of inputs and targets",
            expected="two items",
            got=f"{len(items)} items" if items else f"{type(cast('object', data)).__name__}{named}",
            where=f"{where}, batch.data",
            fix=fix,
        )
    return items[0], items[1]
