# SPDX-License-Identifier: Apache-2.0
"""Live tensors on this rank: whether they can be stored, the box held, names of the same memory, sums of bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from accel import xla
from accel.checkpoint._boxes import Box, Split, local_box, whole
from accel.errors import CheckpointError
from accel.errors._checks import with_article
from accel.storage import stored_dtype
from accel.tensors import integers, is_absent, is_dtensor, is_partial, local_part

_COLUMNS, _ROWS = 2**14, 32  # of words that are weighted together


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


def checksum(tensors: Mapping[str, torch.Tensor]) -> int:
    """Sum the bits of tensors to an integer of 64 bits, for ranks to compare. Waits for each device once."""
    sums = checksums(tensors)
    # odd weights by position: values that two tensors have swapped do not cancel
    return sum(sums[name] * (2 * at + 1) for at, name in enumerate(sorted(sums))) % 2**64 - 2**63


def checksums(tensors: Mapping[str, torch.Tensor], *, by_position: bool = False) -> dict[str, int]:
    """Sum the bits of each tensor; see `checksum`. With `by_position`, which takes eight times as long, a sum also
    depends on the order of the elements."""
    words = [_bits(tensor) for tensor in tensors.values()]
    sums = [_weighted_sum(each) if by_position else each.sum(dtype=torch.int64) for each in words]
    kinds: dict[torch.device, list[int]] = {}
    for at, each in enumerate(sums):
        kinds.setdefault(each.device, []).append(at)
    found = [0] * len(sums)
    for places in kinds.values():
        # one wait for each device, however many tensors it has
        values = integers(torch.stack([sums[at] for at in places]))
        for at, value in zip(places, values, strict=True):
            found[at] = value
    return dict(zip(tensors, found, strict=True))


def _split(placement: object) -> Split | None:
    shard = cast("Any", placement)
    return None if shard.is_replicate() else Split(shard.dim, getattr(shard, "split_factor", 1))


def _dispatch(kind: type[torch.Tensor]) -> object:
    return getattr(kind, "__torch_dispatch__", None)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    if tensor.device.type == "xla":  # TPUs have no words of 64 bits
        tensor = tensor.cpu()
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.nbytes % 8 == 0:  # eight times as fast as words that have to be widened
        aligned = flat.storage_offset() * flat.element_size() % 8 == 0
        return (flat if aligned else flat.clone()).view(torch.int64)
    return flat.view(words.get(flat.element_size(), torch.int64))


def _weighted_sum(words: torch.Tensor) -> torch.Tensor:
    """Sum words times weights of their positions, which are products of a row's and a column's weight."""
    # Two words of 64 bits that differ in their first bit would weigh the same under all odd weights.
    words = words.view(torch.int32) if words.dtype == torch.int64 else words
    columns = _weights(0, _COLUMNS, words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for at in range(0, len(words), _COLUMNS * _ROWS):
        part = words[at : at + _COLUMNS * _ROWS]
        count = -(-len(part) // _COLUMNS)
        rows = torch.nn.functional.pad(part, (0, count * _COLUMNS - len(part))).view(count, _COLUMNS)
        total += ((rows * columns).sum(1) * _weights(_COLUMNS + at // _COLUMNS, count, words.device)).sum()
    return total


def _weights(start: int, count: int, device: torch.device) -> torch.Tensor:
    """Return odd numbers of 64 bits for positions, mixed so that two sums of some of them hardly ever agree."""
    mixed = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device) * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47  # as splitmix64
    mixed = (mixed ^ (mixed >> 27)) * -0x6B2FB644ECCEEE15
    return (mixed ^ (mixed >> 31)) | 1
