# SPDX-License-Identifier: Apache-2.0
"""DTensors, asked for what this rank holds of them; plain tensors are held whole."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

import torch
from typing_extensions import TypeIs

from accel import xla
from accel.checkpoint._boxes import Box, Split, local_box, whole
from accel.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: torch.Tensor) -> TypeIs[DTensor]:
    """Whether a tensor is a DTensor. No communication."""
    if type(tensor) is torch.Tensor or "torch.distributed.tensor" not in sys.modules:  # its import takes long
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements that this rank holds; the live memory, without a gradient. No communication."""
    return cast("torch.Tensor", cast("Any", tensor.detach()).to_local()) if is_sharded(tensor) else tensor.detach()


def held_box(tensor: torch.Tensor, path: str) -> Box | None:
    """Return which part of a tensor this rank holds, None for none. No communication.

    Args:
        tensor: plain, or a DTensor that is split by `Shard`, by `fully_shard` after tensor parallelism, or copied.
        path: its name, for errors.

    Raises:
        CheckpointError: it awaits a sum over ranks, or lies in a way that is not known here.
    """
    if not is_sharded(tensor):
        return whole(tensor.shape)
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise CheckpointError(
            "a DTensor that awaits a sum over ranks cannot be stored",
            got=str(placements),
            where=path,
            fix="Redistribute it to Shard or Replicate first.",
        )
    place = mesh.get_coordinate()
    if place is None:
        return None
    if not tensor.numel():
        return whole(tensor.shape)
    splits = [_split(placement) for placement in placements]
    box, local = local_box(tensor.shape, mesh.shape, place, splits), tuple(tensor.to_local().shape)
    if box is None or ((box.size or tensor.to_local().numel()) and box.shape != local):
        raise CheckpointError(
            "a DTensor that lies in a way that cannot be told from its placements",
            expected=f"this rank's part of {list(tensor.shape)} on a mesh of {tuple(mesh.shape)} by {placements}",
            got=f"a part of {list(local)}",
            where=path,
            fix="Shard it by distribute_tensor, fully_shard or parallelize_module, or store tensor.full_tensor().",
        )
    return box if box.size else None


def like(part: torch.Tensor, template: DTensor, shape: torch.Size | None = None) -> torch.Tensor:
    """Return a DTensor on the template's mesh, beside the template's own part in memory. No communication.

    Args:
        part: what this rank holds of it.
        template: a DTensor, which tells mesh, device and placements.
        shape: of the whole; None for a part that is the whole, and lies so on every rank.
    """
    from torch.distributed.tensor import DTensor, Replicate

    placements = [Replicate()] * template.device_mesh.ndim if shape is None else template.placements
    shape = part.shape if shape is None else shape
    stride = torch.empty(shape, device="meta").stride()
    part = part.to(template.to_local().device)
    return DTensor.from_local(part, template.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def _split(placement: object) -> Split | None:
    shard = cast("Any", placement)
    return None if shard.is_replicate() else Split(shard.dim, getattr(shard, "split_factor", 1))


def memory_id(tensor: torch.Tensor) -> int:
    """Return a number that is the same for plain tensors of the same memory, and no other's while they live."""
    return xla.tensor_id(tensor) if tensor.device.type == "xla" else tensor.untyped_storage().data_ptr()
