# SPDX-License-Identifier: Apache-2.0
"""Who writes what: pure functions of names and sizes."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

import msgspec
import torch


class Plan(msgspec.Struct, frozen=True):
    """The tensors that each rank writes.

    Attributes:
        ranks: names by rank, sorted.
    """

    ranks: tuple[tuple[str, ...], ...]


def plan_writes(shared: Mapping[str, int], main: Mapping[str, int], world_size: int) -> Plan:
    """Divide tensors among ranks so that they write about equally many bytes.

    Args:
        shared: bytes of each tensor that is equal on all ranks, so that any of them may write it.
        main: bytes of each tensor that rank 0 writes.
        world_size: how many ranks write.

    Returns:
        A partition of the names. Ranks differ by at most the largest shared tensor, unless `main` alone exceeds that.
    """
    parts: list[list[str]] = [list(main), *([] for _ in range(world_size - 1))]
    loads = [(sum(main.values()) if rank == 0 else 0, rank) for rank in range(world_size)]
    heapq.heapify(loads)
    for name in sorted(shared, key=lambda name: (-shared[name], name)):
        load, rank = loads[0]
        parts[rank].append(name)
        heapq.heapreplace(loads, (load + shared[name], rank))
    return Plan(tuple(tuple(sorted(part)) for part in parts))


def tied(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Find names for the same memory with the same shape and stride.

    Args:
        tensors: by name.

    Returns:
        Every name that can be left out -> the first name, in sorted order, of what it is.
    """
    first: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        if not tensor.numel():
            continue
        start = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()
        memory = (*start, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if (known := first.setdefault(memory, name)) != name:
            aliases[name] = known
    return aliases


def checksum(tensors: Mapping[str, torch.Tensor]) -> int:
    """Sum the bits of tensors, so that ranks can tell whether they hold the same.

    Args:
        tensors: by name, of any device; read in one pass each, waited for once.

    Returns:
        An integer of 64 bits; equal for equal tensors.
    """
    sums = [_bits(tensors[name]).sum(dtype=torch.int64) * (2 * at + 1) for at, name in enumerate(sorted(tensors))]
    return int(torch.stack([each.cpu() for each in sums]).sum()) if sums else 0


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(words.get(flat.element_size(), torch.int64))
