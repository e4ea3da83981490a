# SPDX-License-Identifier: Apache-2.0
"""Tensors that are to be alike on all ranks: rank 0's, or their mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from accel.comm import all_reduce_flat, broadcast_flat
from accel.context import DistContext


def average_(ctx: DistContext, tensors: Iterable[torch.Tensor]) -> None:
    """Replace tensors by their mean over all ranks. A collective of one message for each dtype.

    Args:
        ctx: the context.
        tensors: plain ones, of the same shapes and dtypes in the same order on every rank; changed in place.
    """
    _in_flat(tensors, lambda flat: all_reduce_flat(ctx.comm, flat, "sum").div_(ctx.world_size))


def follow_rank_0_(ctx: DistContext, tensors: Iterable[torch.Tensor]) -> None:
    """Replace tensors by rank 0's. A collective of one message for each dtype; arguments as for `average_`."""

    def receive(flat: torch.Tensor) -> torch.Tensor:
        broadcast_flat(ctx.comm, flat, source=0)
        return flat

    _in_flat(tensors, receive)


def begin_with_rank_0_(ctx: DistContext, tensors: Iterable[torch.Tensor]) -> None:
    """Replace tensors by rank 0's. A collective of one message for each, which needs no memory for a second copy."""
    for tensor in tensors:
        broadcast_flat(ctx.comm, tensor.detach(), source=0)


def _in_flat(tensors: Iterable[torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change tensors as one flat tensor for each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for same in kinds.values():
        changed = change(torch.cat([tensor.flatten() for tensor in same]))
        parts = torch.split(changed, [tensor.numel() for tensor in same])
        for tensor, values in zip(same, parts, strict=True):
            _ = tensor.copy_(values.view_as(tensor))
