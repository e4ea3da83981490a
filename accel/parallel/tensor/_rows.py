# SPDX-License-Identifier: Apache-2.0
"""Rows of a parameter that ranks store, and those that they compute with, where the two differ. Pure.

Each rank stores a contiguous part, so that checkpoints and `fully_shard` know parameters of one kind. A fused
projection needs a part of each of its packs instead, and with fewer heads of keys than ranks several ranks need the
same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class RowExchange(NamedTuple):
    """An all-to-all that turns the rows that a rank stores into those that it needs, in their order in the whole.

    Attributes:
        order: rows of this rank's part to send, by receiving rank, lowest rows first; a row may stand for several.
        to: number of rows for each rank.
        back: number of rows from each rank.
    """

    order: Sequence[int]
    to: Sequence[int]
    back: Sequence[int]


def needed_packs(rows: int, packs: int, size: int) -> Sequence[Sequence[range]]:
    """Return the rows that each rank needs of equal packs, such as queries, keys and values: its part of each.

    Args:
        rows: number of all rows, a multiple of `packs * size`.
        packs: number of packs.
        size: number of ranks.
    """
    pack = rows // packs
    part = pack // size
    return [
        [range(at * pack + rank * part, at * pack + (rank + 1) * part) for at in range(packs)] for rank in range(size)
    ]


def needed_heads(rows: int, heads: int, size: int) -> Sequence[Sequence[range]]:
    """Return the rows that each rank needs of fewer heads than ranks: those of one head, which neighbours share.

    Args:
        rows: number of all rows, a multiple of `heads`.
        heads: number of heads, which divides `size`.
        size: number of ranks.
    """
    head = rows // heads
    return [[range(at * head, (at + 1) * head)] for at in (rank * heads // size for rank in range(size))]


def row_exchange(rows: int, needed: Sequence[Sequence[range]], rank: int) -> RowExchange:
    """Return the all-to-all of one rank.

    Args:
        rows: number of all rows, of which each rank stores an equal part in order.
        needed: rows that each rank needs, lowest first.
        rank: the rank that the answer is for.
    """
    size = len(needed)
    part = rows // size
    stored = [range(at * part, (at + 1) * part) for at in range(size)]
    sent = [_common(stored[rank], needed[to]) for to in range(size)]
    order = [row - rank * part for rows_to in sent for row in rows_to]
    back = [len(_common(stored[source], needed[rank])) for source in range(size)]
    return RowExchange(order, [len(rows_to) for rows_to in sent], back)


def _common(stored: range, needed: Sequence[range]) -> list[int]:
    spans = ((max(stored.start, each.start), min(stored.stop, each.stop)) for each in needed)
    return [row for start, stop in spans for row in range(start, stop)]
