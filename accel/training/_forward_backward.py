# SPDX-License-Identifier: Apache-2.0
"""`forward_backward` and `forward`: micro-batches, one after another or through the stages of a pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from torch import nn

from accel.comm import Call, broadcast_flat, exchange_values
from accel.context import DistContext, context_first
from accel.errors import ConfigError
from accel.loop_state import Accumulation, LossScale, check_scale
from accel.parallel._engines import engine_of
from accel.parallel._labels import micro_batches_of
from accel.parallel._micro_batches import ByStage, MicroBatch, first_rows, first_tensor, split_batch
from accel.parallel._modules import unwrap_model
from accel.parallel._sync import no_sync
from accel.parallel.axes.pipeline import Pipeline, Work, keep_one_sum, pipeline_of, sum_tied_gradients
from accel.precision._amp import autocast, matmul_precision
from accel.storage import dtype_name
from accel.training._backward import on_device, own_weight, run_backward, start_sharing, weigh, window_block
from accel.training._loss_sums import LossFn, LossProbe, LossSums
from accel.training._train_state import TrainState, after_backward, carries_state, weight_of, window_of
from accel.training._window import StepWindow, mark_followed, with_loss


@carries_state(2, "loss, accum = {}")
@context_first
def forward_backward(
    ctx: DistContext,
    model: nn.Module,
    state: TrainState,
    inputs: Any,
    /,
    *,
    loss_fn: LossFn,
    targets: Any = None,
    weight: float | torch.Tensor | None = None,
) -> tuple[torch.Tensor, TrainState]:
    """Run forward and backward of a batch in micro-batches, and add the gradients. A collective along the pipeline.

    On a mesh with `pp` the micro-batches run through the stages by the plan's schedule; elsewhere they run one after
    another. Gradients and the loss are the same. The context's autocast holds inside, and gradients are held back as in
    `accumulate`, so neither is needed around the call.

    Args:
        ctx: the context.
        model: from `prepare` or `prepare_model`; its plan has the number of micro-batches.
        state: the state within a batch.
        inputs: a tensor; a tuple of the model's arguments; or a mapping of keyword arguments. Tensors have
            the batch in dimension 0; tensors of one row, and other values, go to every micro-batch. Behind the first
            stage of a pipeline hidden states take the place of the first input, which is a tensor; a forward with an
            argument `inputs_embeds` takes them there. All ranks along `pp` pass the same batch.
        loss_fn: maps the model's output, and the targets if there are some, to the sum of the losses of the
            micro-batch's real units, shape []. Its first call is preceded by two on the halves of that micro-batch,
            without gradient, which distinguish a sum from a mean.
        targets: tensors with the batch in dimension 0, split as the inputs are.
        weight: number of real units in the batch, as for `backward`; by default `batch.valid`.

    Returns:
        The mean loss of this rank's batch, detached, shape [], the same on all ranks along `pp`; and the next state, to
        be kept.

    Raises:
        StageError: a stage failed, with its number, micro-batch and rank; or stages cannot play the forward back.
        StepError: the loss is not a scalar with a gradient, or a mean, or calls are out of order.
        ConfigError: a weight that is no number from 0; no `TrainState`; an engine's strategy.
        DataError: inputs without rows, or with different numbers of rows.
        PeerError: another rank was lost.

    Examples:
        >>> state = state.next(batch)
        >>> loss_sum = lambda output: output.square().sum()
        >>> loss, state = accel.forward_backward(ctx, model, state, batch.data[0], loss_fn=loss_sum)
        >>> state.sync, loss.shape
        (True, torch.Size([]))

    Reference: Huang et al. 2019, GPipe, arXiv:1811.06965; torch.distributed.pipelining.
    """
    weight = weight_of(state, weight, same_units=False)
    loss, accum = run_batch(ctx, model, window_of(state), inputs, targets, loss_fn, weight)
    return loss, after_backward(state, accum)


def run_batch(
    ctx: DistContext,
    model: nn.Module,
    window: StepWindow,
    inputs: Any,
    targets: Any,
    loss_fn: LossFn,
    weight: float | torch.Tensor | None,
    *,
    counts: bool = True,
) -> tuple[torch.Tensor, Accumulation]:
    """Run forward and backward of a batch, as `forward_backward`; return the loss and the window with its weight.

    Without `counts` the loss is a mean that counts the same on every rank, for a step that knows of no window.
    """
    ctx.comm.check_open()
    if engine_of(ctx) is not None:
        raise ConfigError(
            "an engine runs its own micro-batches",
            got=f"strategy {ctx.strategy}",
            where="forward_backward",
            fix="Call accel.backward, or take the strategy ddp or fsdp.",
        )
    if weight is None:
        raise ConfigError(
            "the number of units in the batch is not known",
            expected="weight=, the number of units that loss_fn sums over in all micro-batches",
            got="none",
            where="forward_backward, weight=",
        )
    known = own_weight(ctx, weight)
    pipeline = pipeline_of(unwrap_model(model))
    has_loss = pipeline is None or pipeline.last_rank == pipeline.comm.rank
    micro = split_for(ctx, model, inputs, targets, has_loss=has_loss)
    accum, scaler = window.accum, window.scaler
    check_scale(accum, scaler)
    if accum.latest == accum.micro:
        mark_followed(ctx, window, "loss, state = accel.forward_backward(ctx, model, state, ...)")
    added, _ = weigh(ctx, scaler, accum, weight if counts else None, same_units=False)
    block = window_block(ctx, accum, [model])
    probe = LossProbe(ctx, unwrap_model(model), loss_fn, known, count_for(model))
    sums = LossSums(ctx, loss_fn, _factor(known, scaler, added.unit if counts else known), probe)
    # Sent now, waited for at the end: the weights of ranks are sent during the micro-batches.
    shared = start_sharing(ctx, added)
    with block, matmul_precision(ctx):
        if pipeline is None:
            _run_here(ctx, model, micro, sums, holds=accum.sync or accum.sync_each_batch)
        else:
            whole = {"inputs": inputs} if targets is None else {"inputs": inputs, "targets": targets}
            _run_stages(ctx, unwrap_model(model), pipeline, micro, sums, accum, whole)
    mean = _mean(ctx, pipeline, sums.found, known)
    return mean, with_loss(shared(), mean)


def count_for(model: nn.Module) -> int:
    """Return the number of micro-batches by the plan of a model."""
    pipeline = pipeline_of(unwrap_model(model))
    return micro_batches_of(model) if pipeline is None else pipeline.layout.micro_batches


def split_for(
    ctx: DistContext, model: nn.Module, inputs: Any, targets: Any = None, *, has_loss: bool = True
) -> list[MicroBatch]:
    """Split a batch into the micro-batches of a model; a pipeline needs equal sizes."""
    equal = pipeline_of(unwrap_model(model)) is not None
    containers = ctx.containers
    return split_batch(inputs, targets, count_for(model), equal=equal, containers=containers, has_loss=has_loss)


def run_forward(ctx: DistContext, model: nn.Module, work: Work) -> None:
    """Run micro-batches without gradients; `work.finish` takes the outputs. A collective along the pipeline."""
    pipeline = pipeline_of(unwrap_model(model))
    with torch.no_grad():
        if pipeline is not None:
            _ = pipeline.run(ctx, unwrap_model(model), work, trains=False)
            return
        for each in work.micro_batches:
            named = {name: value.of(0) if isinstance(value, ByStage) else value for name, value in each.kwargs.items()}
            with work.around():
                _ = work.finish(model(*each.args, **named), each)


def _factor(known: float | torch.Tensor, scaler: LossScale, unit: float | torch.Tensor) -> float | torch.Tensor:
    """Factor of the sums of losses; 0 for a batch without real units."""
    if isinstance(known, torch.Tensor):
        return torch.where(known > 0, scaler.scale / unit, 0.0)
    return scaler.scale / unit if known else 0.0


def _run_here(ctx: DistContext, model: nn.Module, micro: Sequence[MicroBatch], sums: LossSums, *, holds: bool) -> None:
    """Run micro-batches of a model without a pipeline in turn; with `holds`, only the last exchanges gradients."""
    for at, each in enumerate(micro):
        # One exchange a batch; if the call is held back, the block around it decides.
        held = holds and at + 1 < len(micro)
        with no_sync(ctx, model) if held else contextlib.nullcontext():
            with autocast(ctx):
                found = sums.of(model(*each.args, **each.kwargs), each)
            run_backward(ctx, found, sums.factor)


def _run_stages(
    ctx: DistContext,
    model: nn.Module,
    pipeline: Pipeline,
    micro: Sequence[MicroBatch],
    sums: LossSums,
    accum: Accumulation,
    whole: Mapping[str, Any],
) -> None:
    """Run micro-batches through the stages; where the window ends, sum the gradients of tied parameters."""
    if accum.sync and accum.latest == accum.micro:  # an earlier pass of this batch has summed tied gradients
        keep_one_sum(pipeline.ties)
    work = Work(micro, sums.scaled, lambda: autocast(ctx), ctx.containers, whole=whole)
    _ = pipeline.run(ctx, model, work, trains=True)
    if accum.sync:
        sum_tied_gradients(pipeline.ties, may_be_unused=pipeline.may_be_unused)


def _mean(
    ctx: DistContext, pipeline: Pipeline | None, sums: Sequence[torch.Tensor], known: float | torch.Tensor
) -> torch.Tensor:
    """The mean loss of a batch, on every rank along the pipeline."""
    # Ranks without the last stage have no losses: they take part in the broadcast with a tensor of the same form.
    mean = on_device(ctx, 0.0)
    if sums:
        total = torch.stack(list(sums)).sum(dtype=mean.dtype).to(mean.device)
        if isinstance(known, torch.Tensor):
            mean = torch.where(known > 0, total / known.to(mean.device), 0.0).to(mean.dtype)
        elif known:
            mean = total if known == 1.0 else total / known
    if pipeline is not None:
        broadcast_flat(pipeline.comm, mean, source=pipeline.last_rank)
    return mean


class _OutputForm(msgspec.Struct, frozen=True):
    """Dtype and shape of the outputs; no dtype where a rank has none."""

    dtype: str = ""
    shape: tuple[int, ...] = ()


@context_first
def forward(
    ctx: DistContext, model: nn.Module, inputs: Any, *, select: Callable[[Any], torch.Tensor] = first_tensor
) -> torch.Tensor:
    """Return the model's outputs for a batch, without gradients. A collective along the pipeline.

    The batch runs in the micro-batches of the model's plan, under the context's autocast. The mode of the model is the
    caller's: see `evaluating`.

    Args:
        ctx: the context.
        model: from `prepare` or `prepare_model`.
        inputs: as for `forward_backward`.
        select: maps the model's output to the tensor to return, with the batch in dimension 0; the first tensor of the
            output by default, such as the logits of Hugging Face's models.

    Returns:
        The outputs of all rows, on every rank along `pp`.

    Raises:
        StageError: a stage failed, or stages cannot play the forward back.
        ConfigError: `select` returned no tensor with the batch in dimension 0.
        DataError: inputs without rows, or with different numbers of rows.
        PeerError: another rank was lost.

    Examples:
        >>> accel.training.forward(accel.single(), nn.Linear(2, 3), torch.ones(4, 2)).shape
        torch.Size([4, 3])
    """
    ctx.comm.check_open()
    if select is first_tensor:
        select = partial(first_tensor, containers=ctx.containers)
    found: list[torch.Tensor] = []

    def keep(output: Any, batch: MicroBatch) -> torch.Tensor:
        own = _checked(select(output), batch)
        found.append(first_rows(own, batch.rows) if batch.rows.real else own[:0])
        return first_tensor(output, ctx.containers)

    micro = split_for(ctx, model, inputs)
    run_forward(ctx, model, Work(micro, keep, lambda: autocast(ctx), ctx.containers, whole={"inputs": inputs}))
    pipeline = pipeline_of(unwrap_model(model))
    return torch.cat(found) if pipeline is None else _shared(ctx, pipeline, found)


def _checked(found: object, batch: MicroBatch) -> torch.Tensor:
    if isinstance(found, torch.Tensor) and found.ndim and found.shape[0] == batch.rows.size:
        return found
    raise ConfigError(
        "outputs without the batch in dimension 0",
        expected=f"a tensor of {batch.rows.size} rows",
        got=f"shape {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__,
        where="forward, select=",
    )


def _shared(ctx: DistContext, pipeline: Pipeline, found: list[torch.Tensor]) -> torch.Tensor:
    """Give all ranks along the pipeline the outputs of the last stage."""
    whole = torch.cat(found).contiguous() if found else None
    mine = _OutputForm() if whole is None else _OutputForm(dtype_name(whole.dtype), tuple(whole.shape))
    # Only the last stage knows dtype and shape; the others need them to receive.
    facts = exchange_values(pipeline.comm, Call("forward"), mine, _OutputForm)[pipeline.last_rank]
    if whole is None:
        whole = torch.empty(facts.shape, dtype=getattr(torch, facts.dtype), device=ctx.device)
    if whole.numel():
        broadcast_flat(pipeline.comm, whole, source=pipeline.last_rank)
    return whole
