# SPDX-License-Identifier: Apache-2.0
"""The ranks that read each file of a checkpoint, which share the check of its bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from accel.comm import Call, Comm, exchange, reduce_ints

_BITS = 8


def main_readers(wanted: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the ranks that read at least half as much of a file as any other, by file; none of a file not read.

    Args:
        wanted: bytes that each rank reads of each file.
    """
    most = [max(of_file) for of_file in zip(*wanted, strict=True)]
    return [
        [rank for rank, mine in enumerate(wanted) if 2 * mine[at] >= largest] if largest else []
        for at, largest in enumerate(most)
    ]


def agree_on_readers(comm: Comm, call: Call, mine: Sequence[int], wanted: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return `main_readers` of all ranks. A collective in a large group, where each rank sends a bit for each file.

    Args:
        comm: an open handle.
        call: the expected call of all ranks.
        mine: bytes that this rank reads of each file.
        wanted: those of all ranks; unused in a large group.
    """
    if not comm.is_large:
        return main_readers(wanted)
    most = reduce_ints(comm, call, mine, "max")
    reads = [bool(largest) and 2 * own >= largest for own, largest in zip(mine, most, strict=True)]
    places = torch.arange(_BITS, dtype=torch.uint8)
    padded = torch.zeros(-(-len(reads) // _BITS) * _BITS, dtype=torch.uint8)
    padded[: len(reads)] = torch.tensor(reads, dtype=torch.uint8)
    packed = (padded.view(-1, _BITS) << places).sum(1, dtype=torch.uint8)
    rows = torch.stack(exchange(comm, call, packed))
    bits = (rows.unsqueeze(-1) >> places & 1).flatten(1)
    return [[int(rank) for rank in bits[:, at].nonzero()] for at in range(len(reads))]
