# SPDX-License-Identifier: Apache-2.0
"""Live tensors on this rank: whether they can be stored, the box held, names of the same memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from accel import xla
from accel.checkpoint._boxes import Box, Split, local_box, whole
from accel.errors import CheckpointError
from accel.errors._checks import with_article
from accel.storage import stored_dtype
from accel.tensors import is_absent, is_dtensor, is_partial, local_part


def held_box(tensor: torch.Tensor, path: str) -> Box | None:
    """Return the box of a tensor on this rank, None for none. No communication. Raises `CheckpointError` for a DTensor
    that awaits a sum over ranks, or with an unknown layout."""
    if not is_dtensor(tensor):
        return whole(tensor.shape)
    mesh = tensor.device_mesh
    placements = tensor.placements
    if is_partial(tensor):
        raise CheckpointError(
            "a DTensor that awaits a sum over ranks cannot be stored",
            got=str(placements),
            where=path,
            fix="Redistribute it to Shard or Replicate first.",
        )
    place = mesh.get_coordinate()
    # a rank outside of the mesh holds nothing of it
    if place is None:
        return None
    if not tensor.numel():
        return whole(tensor.shape)
    splits = [_split(placement) for placement in placements]
    box = local_box(tensor.shape, mesh.shape, place, splits)
    # torch takes any local part into a DTensor; one of another size would be stored at false offsets
    local = local_part(tensor)
    if box is None or ((box.size or local.numel()) and box.shape != tuple(local.shape)):
        raise CheckpointError(
            "the local part of a DTensor does not fit its placements",
            expected=f"this rank's part of {list(tensor.shape)} on a mesh of {tuple(mesh.shape)} by {placements}",
            got=f"a part of {list(local.shape)}",
            where=path,
            fix="Shard it by distribute_tensor, fully_shard or parallelize_module, or store tensor.full_tensor().",
        )
    return box if box.size else None


def check_tensor(tensor: torch.Tensor, path: str) -> None:
    """Raise `CheckpointError` unless a tensor is dense, has values, and can be stored."""
    problem, fix = "", "Store a dense tensor."
    if is_dtensor(tensor):
        _ = held_box(tensor, path)
        tensor = local_part(tensor)
    # a class that rewrites operations has no bytes that a file could hold
    if not is_absent(tensor) and _dispatch(type(tensor)) is not _dispatch(torch.Tensor):
        problem, fix = (
            f"{with_article(type(tensor).__name__)}",
            "Store the wrapped tensor, plain or in a DTensor.",
        )
    elif tensor.is_meta or torch.nn.parameter.is_lazy(tensor):
        problem, fix = "a tensor without values", "Give it values first: `to_empty`, or one forward pass."
    elif tensor.layout != torch.strided or tensor.is_quantized:
        problem = f"a tensor of layout {tensor.layout}" if not tensor.is_quantized else "a quantized tensor"
    elif stored_dtype(tensor.dtype) is None:
        problem, fix = f"a tensor of {tensor.dtype}", "Convert it to a dtype that safetensors has."
    if problem:
        raise CheckpointError(f"{problem} cannot be stored", where=path, fix=fix)


def memory_id(tensor: torch.Tensor) -> int:
    """Return a number of a plain tensor's memory, unique while the tensor lives."""
    return xla.tensor_id(tensor) if tensor.device.type == "xla" else tensor.untyped_storage().data_ptr()


def tied(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the redundant names for one memory, each with the first name, in sorted order, of the same tensor.
    DTensors are compared as objects, since some ranks hold no memory of them."""
    first: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        if not tensor.numel():
            continue
        if is_dtensor(tensor):
            if (known := first.setdefault((id(tensor),), name)) != name:
                aliases[name] = known
            continue
        start = memory_id(tensor), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()
        memory = (*start, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if (known := first.setdefault(memory, name)) != name:
            aliases[name] = known
    return aliases


def _split(placement: object) -> Split | None:
    shard = cast("Any", placement)
    return None if shard.is_replicate() else Split(shard.dim, getattr(shard, "split_factor", 1))


def _dispatch(kind: type[torch.Tensor]) -> object:
    return getattr(kind, "__torch_dispatch__", None)
