# SPDX-License-Identifier: Apache-2.0
"""Positions of a sequence that each rank holds, and the blocks of attention that it computes; plain integers.

Of 2n pieces of a sequence, rank r of n holds piece r and piece 2n - 1 - r. An early piece sees few keys under a causal
mask and a late one many, so all ranks have equal work. Brandon et al. 2023, "Striped Attention", arXiv:2311.09431, has
the reason; the cut in two pieces a rank is that of Llama 3, arXiv:2407.21783.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Halves = tuple[int, int]
BOTH: Halves = (0, 2)
FIRST: Halves = (0, 1)
SECOND: Halves = (1, 2)


class Block(NamedTuple):
    """Queries and keys that a rank multiplies in one step of the ring.

    Attributes:
        queries: halves of this rank's positions, from and to.
        keys: halves of the positions of the rank whose keys are here, from and to.
        causal: whether a query sees the keys up to its own place in the block alone; else all of them.
    """

    queries: Halves
    keys: Halves
    causal: bool

    @property
    def pairs(self) -> int:
        """Number of pairs of a half of queries and one of keys that are not all masked."""
        all_pairs = (self.queries[1] - self.queries[0]) * (self.keys[1] - self.keys[0])
        return all_pairs - 1 if self.causal else all_pairs


def pieces(rank: int, size: int) -> tuple[int, int]:
    """Return the two pieces of a rank, of the `2 * size` that a sequence is cut into."""
    return rank, 2 * size - 1 - rank


def places(length: int, rank: int, size: int) -> tuple[range, range]:
    """Return a rank's places in a sequence, as two runs.

    Args:
        length: of the whole sequence, a multiple of `2 * size`.
        rank: index among the ranks that share the sequence.
        size: their number; the whole sequence falls to a single one.
    """
    each = length // (2 * size)
    early, late = pieces(rank, size)
    return range(early * each, (early + 1) * each), range(late * each, (late + 1) * each)


def natural_order(size: int) -> Sequence[int]:
    """Return the order that sorts the halves of all ranks, listed by rank, by their places in the sequence."""
    listed = [piece for rank in range(size) for piece in pieces(rank, size)]
    return sorted(range(2 * size), key=listed.__getitem__)


def rank_order(size: int) -> Sequence[int]:
    """Return the order that lists the pieces of a sequence by the rank that holds them: undoes `natural_order`."""
    return [piece for rank in range(size) for piece in pieces(rank, size)]


def ring_block(rank: int, source: int, size: int, *, causal: bool) -> Block:
    """Return what a rank computes while it has the keys of another; over all sources, `2 * size + 1` pairs of halves.

    Args:
        rank: index of the rank.
        source: index of the rank whose keys are here.
        size: number of ranks that share the sequence.
        causal: whether queries see earlier keys alone; else every block is whole.
    """
    if not causal or source == rank:
        return Block(BOTH, BOTH, causal)
    if source < rank:  # its early half precedes both of ours, its late half follows both
        return Block(BOTH, FIRST, causal=False)
    return Block(SECOND, BOTH, causal=False)  # our early half precedes both of its halves, our late half follows them
