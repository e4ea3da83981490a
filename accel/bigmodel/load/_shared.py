# SPDX-License-Identifier: Apache-2.0
"""Tensors that all ranks hold whole, from a store: each rank fetches its share of them, and broadcasts it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from accel.bigmodel.load._match import Match
from accel.bigmodel.load._targets import Target
from accel.bigmodel.load._weights import FileWeights
from accel.comm import Comm, broadcast_flat
from accel.storage import CHUNK, RemoteRanges
from accel.tensors import is_dtensor, local_part


def shareable(source: FileWeights, targets: Sequence[Target], matched: Match) -> list[int]:
    """Return the numbers of the targets that ranks need not each fetch; none of files on local disks.

    The page cache serves the ranks of a host from one read of its disk. A store would send bytes to each of them.
    """
    if not isinstance(source.ranges, RemoteRanges):
        return []
    return [
        at
        for at, (target, names) in enumerate(zip(targets, matched.found, strict=True))
        if names and target.device is not None and target.box is not None and _is_plain(target.live)
    ]


def digest(targets: Sequence[Target], shared: Sequence[int]) -> str:
    """Return a text that is the same on ranks that share the same tensors; "" for none."""
    if not shared:
        return ""
    facts = [(each.names, str(each.dtype), each.shape, str(each.device)[:3]) for each in (targets[at] for at in shared)]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def assign(nbytes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that fetches each tensor: the largest go first, each to the rank with the fewest bytes so far."""
    loads = [0] * ranks
    owners = [0] * len(nbytes)
    for at in sorted(range(len(nbytes)), key=lambda at: (-nbytes[at], at)):
        owners[at] = loads.index(min(loads))
        loads[owners[at]] += nbytes[at]
    return owners


def broadcast_shared(
    comm: Comm, targets: Sequence[Target], made: Sequence[tuple[Target, torch.Tensor]], owners: Mapping[int, int]
) -> None:
    """Broadcast each shared tensor from the rank that fetched it, a chunk at a time. A collective.

    Args:
        comm: the run's handle.
        targets: all targets of this rank.
        made: targets with new memory; others are filled in their own.
        owners: rank by number of the target.
    """
    memory = {id(target): tensor for target, tensor in made}
    for at, owner in owners.items():
        target = targets[at]
        tensor = memory[id(target)] if id(target) in memory else local_part(target.live)
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), CHUNK):
            broadcast_flat(comm, flat[start : start + CHUNK], source=owner)


def _is_plain(live: torch.Tensor) -> bool:
    return not is_dtensor(live) and live.is_contiguous()
