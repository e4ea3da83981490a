# SPDX-License-Identifier: Apache-2.0
"""Tensors that are to be alike on all ranks: rank 0's, or their mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from accel.comm import Comm, adopt, all_reduce_flat, alone, broadcast_flat
from accel.context import DistContext, group_of
from accel.tensors import packed_weights
from accel.topology import dimension_of


def average_(ctx: DistContext, tensors: Iterable[torch.Tensor]) -> None:
    """Replace tensors by their mean over all ranks. A collective of one message for each dtype.

    Args:
        ctx: the context.
        tensors: plain ones, of the same shapes and dtypes in the same order on every rank; changed in place.
    """
    average_along_(ctx.comm, tensors)


def average_along_(comm: Comm, tensors: Iterable[torch.Tensor]) -> None:
    """Replace tensors by their mean over the ranks of a handle; see `average_`."""
    _in_flat(tensors, lambda flat: all_reduce_flat(comm, flat, "sum").div_(comm.size))


def stage_comm(ctx: DistContext) -> Comm:
    """Return a handle of the ranks of this rank's pipeline stage; of all without a pipeline. A collective at first."""
    names = ctx.mesh.mesh_dim_names if ctx.mesh is not None else None
    if names is None or all(dimension_of(name) != "pipeline" or ctx.axis(name).size == 1 for name in names):
        return ctx.comm
    group = group_of(ctx, *(name for name in names if dimension_of(name) != "pipeline"))
    return alone() if group is None else adopt(group, ctx.device)


def follow_first_(comm: Comm, tensors: Iterable[torch.Tensor]) -> None:
    """Replace tensors by those of a handle's first rank. A collective of one message for each dtype.

    Args:
        comm: handle of the ranks.
        tensors: plain ones, of the same shapes and dtypes in the same order on every rank; changed in place.
    """

    def receive(flat: torch.Tensor) -> torch.Tensor:
        broadcast_flat(comm, flat, source=0)
        return flat

    _in_flat(tensors, receive)


def begin_with_rank_0_(ctx: DistContext, tensors: Iterable[torch.Tensor]) -> None:
    """Replace tensors by rank 0's. A collective of one message for each, which needs no memory for a second copy."""
    for tensor in tensors:
        broadcast_flat(ctx.comm, tensor.detach(), source=0)


def replicated_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return what replicas of a model begin with alike: parameters, parts of quantizers' weights, buffers."""
    weights = packed_weights(model)
    plain = [each for name, each in model.named_parameters() if name not in weights]
    parts = [part for weight in weights.values() for part in weight.parts.values()]
    small = [part.view(torch.uint8) if part.is_floating_point() and part.itemsize == 1 else part for part in parts]
    return [*plain, *small, *model.buffers()]


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
