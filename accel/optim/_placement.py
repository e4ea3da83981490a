# SPDX-License-Identifier: Apache-2.0
"""Where the elements of a gradient lie: whole on this rank, or spread over a mesh as a DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Spread = tuple["DeviceMesh", tuple[int, ...]]  # a mesh, and its dimensions over which elements are split


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a plain one. Asks nothing of torch.distributed.tensor, whose import takes long."""
    return type(tensor) is torch.Tensor or not hasattr(tensor, "placements")


def spread_of(tensor: torch.Tensor) -> Spread:
    """Return the mesh of a DTensor and its dimensions over which elements are split; copies need no sum."""
    placed = cast(Any, tensor)
    split = (at for at, placement in enumerate(placed.placements) if not placement.is_replicate())
    return placed.device_mesh, tuple(at for at in split if placed.device_mesh.size(at) > 1)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements that this rank holds, sharing their memory."""
    if is_whole(tensor):
        return tensor
    with torch.no_grad():
        return cast(Any, tensor).to_local()


def local_parts(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the elements of each that this rank holds; a list of plain tensors as it is."""
    return tensors if all(map(is_whole, tensors)) else [local_part(tensor) for tensor in tensors]


def settled_gradient(parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return a parameter's gradient; if each rank holds a summand, as tensor parallelism leaves some, sum it first."""
    if is_whole(grad):
        return grad
    placed = cast(Any, grad)
    if not any(placement.is_partial() for placement in placed.placements):
        return grad
    from torch.distributed.tensor import Replicate

    whole = [Replicate() if placement.is_partial() else placement for placement in placed.placements]
    parameter.grad = placed.redistribute(placements=whole)
    return cast(torch.Tensor, parameter.grad)
