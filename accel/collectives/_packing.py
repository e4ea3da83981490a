# SPDX-License-Identifier: Apache-2.0
"""Tensors to bytes and back: those of one dtype side by side, each dtype aligned so that it can be viewed in place."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch

_LARGE_BYTES = 64 * 1024  # from this size on, a tensor travels by itself: that costs less than a copy

KEPT_PLANS = 64  # training repeats few calls, and plans follow from dtypes and shapes alone

_ALIGN = 16  # the widest dtype's size


class DtypeGroup(NamedTuple):
    """The tensors of one dtype in a packed buffer.

    Attributes:
        dtype: dtype of all.
        members: their numbers in the packed list.
        counts: elements of each.
        start, stop: their range in the buffer, in bytes.
    """

    dtype: torch.dtype
    members: tuple[int, ...]
    counts: tuple[int, ...]
    start: int
    stop: int


class Packing(NamedTuple):
    """Layout of tensors in a packed buffer of `nbytes` bytes."""

    groups: tuple[DtypeGroup, ...]
    nbytes: int


def is_large(dtype: torch.dtype, count: int) -> bool:
    """Return whether a tensor of `count` elements travels by itself."""
    return count * dtype.itemsize >= _LARGE_BYTES


def plan_buckets(
    dtypes: Sequence[torch.dtype], counts: Sequence[int], device_types: Sequence[str]
) -> list[tuple[int, ...]]:
    """Put tensors that travel together into buckets: small ones by type of device, each large one alone.

    Args:
        dtypes, counts, device_types: dtype, elements and type of device of each tensor of a list.

    Returns:
        The numbers of the tensors in each bucket.
    """
    small: dict[str, list[int]] = {}
    large: list[tuple[int, ...]] = []
    for i, (dtype, count, place) in enumerate(zip(dtypes, counts, device_types, strict=True)):
        if is_large(dtype, count):
            large.append((i,))
        else:
            small.setdefault(place, []).append(i)
    return [*map(tuple, small.values()), *large]


@functools.lru_cache(maxsize=KEPT_PLANS)
def plan_packing(
    dtypes: tuple[torch.dtype, ...], counts: tuple[int, ...], chosen: tuple[int, ...] | None = None
) -> Packing:
    """Lay out some of a list of tensors.

    Args:
        dtypes, counts: dtype and elements of each tensor of the list.
        chosen: the numbers of those to pack; None for all.
    """
    chosen = tuple(range(len(counts))) if chosen is None else chosen
    members: dict[torch.dtype, list[int]] = {}
    for i in chosen:
        members.setdefault(dtypes[i], []).append(i)
    groups: list[DtypeGroup] = []
    at = 0
    for dtype, same in members.items():
        own = [counts[i] for i in same]
        stop = at + sum(own) * dtype.itemsize
        groups.append(DtypeGroup(dtype, tuple(same), tuple(own), at, stop))
        at = aligned(stop)
    return Packing(tuple(groups), at if len(chosen) > 1 else sum(group.stop for group in groups))


def to_bytes(packing: Packing, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy tensors into a new buffer: uint8, shape [packing.nbytes], on the device of the first.

    Args:
        packing: their layout.
        tensors: the planned list.
    """
    device = tensors[packing.groups[0].members[0]].device if packing.groups else "cpu"
    buffer = torch.empty(packing.nbytes, dtype=torch.uint8, device=device)
    for group, elements in sections(packing, buffer):
        _copy(group, tensors, elements)
    return buffer


def write(packing: Packing, tensors: Sequence[torch.Tensor], message: bytearray, at: int) -> None:
    """Copy tensors on the CPU into a message.

    Args:
        packing: their layout.
        tensors: the planned list.
        message: buffer with room for them; overwritten.
        at: their first byte, a multiple of 16.
    """
    for group in packing.groups:
        if count := sum(group.counts):
            room = torch.frombuffer(message, dtype=group.dtype, count=count, offset=at + group.start)
            _copy(group, tensors, room)


def bytes_of(packing: Packing, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """As `to_bytes`, but a single tensor whose elements lie in order is viewed and not copied."""
    if not packing.nbytes or len(packing.groups) != 1 or len(packing.groups[0].members) != 1:
        return to_bytes(packing, tensors)  # an empty tensor's strides need not allow a view
    return flat_bytes(tensors[packing.groups[0].members[0]])


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View the bytes of a tensor that is not empty, shape [bytes]; copied if its elements do not lie in order."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single element may have any stride


def sections(packing: Packing, buffer: torch.Tensor) -> Iterator[tuple[DtypeGroup, torch.Tensor]]:
    """View the parts of a buffer by dtype.

    Args:
        packing: the layout.
        buffer: uint8, shape [..., packing.nbytes or more].

    Yields:
        Each group, and its elements, shape [..., elements of the group].
    """
    for group in packing.groups:
        yield group, buffer[..., group.start : group.stop].view(group.dtype)


def split(group: DtypeGroup, elements: torch.Tensor, *, give: bool = False) -> Iterator[tuple[int, torch.Tensor]]:
    """Take the elements of a group apart, each tensor into memory of its own.

    Args:
        group: layout of `elements`.
        elements: shape [..., elements of the group].
        give: whether a single tensor may keep the memory of `elements`, if that holds nothing else.

    Yields:
        The number of each tensor, and its elements, shape [..., count].
    """
    if len(group.members) == 1:
        own = give and elements.untyped_storage().nbytes() == elements.nbytes
        yield group.members[0], elements if own else elements.clone(memory_format=torch.contiguous_format)
    else:
        parts = cast(Any, torch).split_with_sizes_copy(elements, group.counts, dim=-1)  # its stub forgets the result
        yield from zip(group.members, parts, strict=True)


def _copy(group: DtypeGroup, tensors: Sequence[torch.Tensor], elements: torch.Tensor) -> None:
    if len(group.members) == 1:  # either way resolves conjugation and strides
        single = tensors[group.members[0]].detach()
        _ = elements.view(single.shape).copy_(single)
        return
    chosen = [tensors[i] for i in group.members]
    with torch.no_grad():
        torch.cat([each if each.ndim == 1 else each.reshape(-1) for each in chosen], out=elements)


def pack(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Copy tensors into one new uint8 tensor on a device; `unpack` finds them there by their dtypes and shapes."""
    dtypes = tuple([tensor.dtype for tensor in tensors])
    counts = tuple([tensor.numel() for tensor in tensors])
    packing = plan_packing(dtypes, counts)
    return to_bytes(packing, [tensor.to(device) for tensor in tensors])


def unpack(buffer: torch.Tensor, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """View the tensors that `pack` copied into a buffer; they plan its memory."""
    counts = tuple([math.prod(shape) for shape in shapes])
    found: dict[int, torch.Tensor] = {}
    for group, elements in sections(plan_packing(tuple(dtypes), counts), buffer):
        found.update(zip(group.members, torch.split(elements, list(group.counts)), strict=True))
    return [found[i].view(tuple(shape)) for i, shape in enumerate(shapes)]


def aligned(size: int) -> int:
    """Round a number of bytes up so that any dtype may follow."""
    return -(-size // _ALIGN) * _ALIGN
