# SPDX-License-Identifier: Apache-2.0
"""The ranks of a large group that read each file of a checkpoint: a bit of each rank for each file."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from accel.comm import Call, Comm, exchange, reduce_ints

_BITS = 8


def agree_on_readers(comm: Comm, call: Call, mine: Sequence[int]) -> list[list[int]]:
    """Return the `main_readers` of each file. A collective.

    Args:
        comm: an open handle.
        call: the expected call of all ranks.
        mine: bytes that this rank reads of each file.
    """
    most = reduce_ints(comm, call, mine, "max")
    reads = [bool(largest) and 2 * own >= largest for own, largest in zip(mine, most, strict=True)]
    places = torch.arange(_BITS, dtype=torch.uint8)
    padded = torch.zeros(-(-len(reads) // _BITS) * _BITS, dtype=torch.uint8)
    padded[: len(reads)] = torch.tensor(reads, dtype=torch.uint8)
    packed = (padded.view(-1, _BITS) << places).sum(1, dtype=torch.uint8)
    rows = torch.stack(exchange(comm, call, packed))
    bits = (rows.unsqueeze(-1) >> places & 1).flatten(1)
    return [[int(rank) for rank in bits[:, at].nonzero()] for at in range(len(reads))]
