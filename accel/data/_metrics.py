# SPDX-License-Identifier: Apache-2.0
"""`gather_for_metrics`: results of all ranks on a batch, without those of stand-ins and padding."""

from __future__ import annotations

from typing import TypeVar

import torch

from accel.collectives import gather
from accel.comm import Call, shared_failure
from accel.context import DistContext, context_first
from accel.data._batches import Batch
from accel.errors import DataError, TreeError
from accel.tree import leaves, map_tensors

T = TypeVar("T")


@context_first
def gather_for_metrics(ctx: DistContext, tree: T, batch: Batch, *, tag: str | None = None) -> T:
    """Gather per-sample tensors of all ranks, real samples only. A collective.

    Over an epoch, each sample of the dataset is gathered once, for every world size and tail policy.

    Args:
        ctx: the context.
        tree: nested containers of tensors of shape [batch.rows, ...]. A tensor of shape [] counts as one value of
            this rank; it is left out if the rank's batch holds no real sample.
        batch: the batch that the tensors were computed on.
        tag: name of the call, compared between ranks if any rank passes one; see `gather`.

    Returns:
        The same containers, tensors of shape [real samples of all ranks, ...].

    Raises:
        DataError: a tensor whose first dimension is not the batch's; on every rank.
        CollectiveMismatch, TreeError: as `gather`. Tensors that differ in another dimension than the first need
            `pad_across_processes` before.

    Example:
        >>> counted = 0
        >>> for batch in accel.batches(ctx, loader, accel.Cursor()):
        ...     inputs, targets = batch.data
        ...     counted += len(accel.gather_for_metrics(ctx, (model(inputs) - targets).square(), batch))
        >>> counted == len(dataset)
        True
    """
    with shared_failure(ctx.comm, Call("gather_for_metrics")):
        _check_rows(ctx, tree, batch)
    return gather(ctx, map_tensors(lambda leaf: _real_rows(leaf, batch), tree, ctx.containers), tag=tag)


def _check_rows(ctx: DistContext, tree: object, batch: Batch) -> None:
    for path, leaf in leaves(tree, ctx.containers):
        if isinstance(leaf, str | bytes):
            raise TreeError(
                "only tensors are gathered for metrics",
                expected="a tensor",
                got=f"{type(leaf).__name__} {leaf!r:.40}",
                where=f"gather_for_metrics, {path}",
                fix="Send texts with accel.gather_object(ctx, [] if batch.duplicate else texts[: batch.valid]).",
            )
        if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] != batch.rows:
            raise DataError(
                "a tensor that does not belong to the batch",
                expected=f"{batch.rows} rows",
                got=f"shape {list(leaf.shape)}",
                where=f"gather_for_metrics, {path}",
                fix="Pass values with one row a sample, or use gather.",
            )


def _real_rows(leaf: torch.Tensor, batch: Batch) -> torch.Tensor:
    counted = 0 if batch.duplicate else int(batch.valid)
    return leaf.reshape(1)[: min(counted, 1)] if leaf.ndim == 0 else leaf[:counted]
