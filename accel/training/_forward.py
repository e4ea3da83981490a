# SPDX-License-Identifier: Apache-2.0
"""`forward`: outputs of a batch without gradients, through a pipeline or in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import nn

from accel.comm import Call, broadcast_flat, exchange_values
from accel.context import DistContext, context_first
from accel.errors import ConfigError
from accel.parallel import micro_batches_of, unwrap_model
from accel.parallel.pipeline import MicroBatch, Pipeline, Work, first_rows, first_tensor, pipeline_of, split_batch
from accel.precision import autocast
from accel.storage import dtype_name


class _Found(msgspec.Struct, frozen=True):
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
        inputs: as of `forward_backward`.
        select: maps the model's output to the tensor to return, with the batch in dimension 0; the first tensor of the
            output by default, such as the logits of Hugging Face's models.

    Returns:
        The outputs of all rows, on every rank along `pp`.

    Raises:
        StageError: a stage failed, or the model is no chain of modules.
        ConfigError: `select` returned no tensor with the batch in dimension 0.
        DataError: inputs without rows, or with different numbers of rows.
        PeerError: another rank was lost.

    Example:
        >>> accel.forward(accel.single(), nn.Linear(2, 3), torch.ones(4, 2)).shape
        torch.Size([4, 3])
    """
    ctx.comm.check_open()
    pipeline = pipeline_of(unwrap_model(model))
    count = micro_batches_of(model) if pipeline is None else pipeline.layout.micro_batches
    micro = split_batch(inputs, None, count, equal=pipeline is not None, containers=ctx.containers)
    found: list[torch.Tensor] = []

    def keep(output: Any, batch: MicroBatch) -> torch.Tensor:
        own = _checked(select(output), batch)
        found.append(first_rows(own, batch.rows) if batch.rows.real else own[:0])
        return first_tensor(output)

    with torch.no_grad():
        if pipeline is not None:
            work = Work(micro, keep, lambda: autocast(ctx), ctx.containers)
            _ = pipeline.run(ctx, unwrap_model(model), work, trains=False)
            return _shared(ctx, pipeline, found)
        for each in micro:
            with autocast(ctx):
                _ = keep(model(*each.args, **each.kwargs), each)
    return torch.cat(found)


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
    mine = _Found() if whole is None else _Found(dtype_name(whole.dtype), tuple(whole.shape))
    facts = exchange_values(pipeline.comm, Call("forward"), mine, _Found)[pipeline.last_rank]
    if whole is None:
        whole = torch.empty(facts.shape, dtype=getattr(torch, facts.dtype), device=ctx.device)
    if whole.numel():
        broadcast_flat(pipeline.comm, whole, source=pipeline.last_rank)
    return whole
