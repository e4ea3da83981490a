# SPDX-License-Identifier: Apache-2.0
"""Schedules of messages between pairs of ranks, by which a collective takes about log2(W) rounds among W ranks.

Pure functions of a rank and the number of ranks.

References: Thakur, Rabenseifner, Gropp 2005, Optimization of Collective Communication Operations in MPICH (recursive
doubling); Bruck et al. 1997, Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems.
"""

from __future__ import annotations

from typing import NamedTuple


class Round(NamedTuple):
    """One rank's part in a round of a reduction.

    Attributes:
        target: rank that gets this rank's value; None for none.
        source: rank whose value comes; None for none.
        final: whether the value that comes is the result, and not another part of it.
    """

    target: int | None
    source: int | None
    final: bool = False


class Block(NamedTuple):
    """One rank's part in a round of a gather, which moves a run of the ranks' rows.

    Attributes:
        target: rank that gets the first `sent` of the rows here; None for none.
        source: rank whose rows come behind those here; None for none.
        sent: number of rows to send.
        received: number of rows to receive.
    """

    target: int | None
    source: int | None
    sent: int
    received: int


def reduction_rounds(rank: int, size: int) -> list[Round]:
    """Reduce on all ranks by recursive doubling.

    Each value that travels is that of a run of neighbouring ranks, so all ranks combine the same values, in rank order.
    Ranks beyond a power of two hand their value to a neighbour and get the result from it.
    """
    power = 1 << (size.bit_length() - 1)
    pairs = size - power
    if rank < 2 * pairs and rank % 2:
        return [Round(rank - 1, None), Round(None, rank - 1, final=True)]
    place = rank // 2 if rank < 2 * pairs else rank - pairs
    partners = [place ^ (1 << bit) for bit in range(power.bit_length() - 1)]
    ranks = [2 * partner if partner < pairs else partner + pairs for partner in partners]
    doubling = [Round(partner, partner) for partner in ranks]
    if rank < 2 * pairs:
        return [Round(None, rank + 1), *doubling, Round(rank + 1, None)]
    return doubling


def gather_rounds(rank: int, size: int) -> list[Block]:
    """Gather the rows of all ranks on all ranks by Bruck's algorithm.

    Rows lie in the order of the ranks from this one on, and go round: rank, rank + 1, ..., rank - 1.
    """
    rounds: list[Block] = []
    held = 1
    while held < size:
        count = min(held, size - held)
        rounds.append(Block((rank - held) % size, (rank + held) % size, count, count))
        held += count
    return rounds


def gather_to_rounds(rank: int, size: int, dst: int) -> list[Block]:
    """Gather the rows of all ranks on one rank along a binomial tree; the order of rows is that of `gather_rounds`."""
    place = (rank - dst) % size
    rounds: list[Block] = []
    held = 1
    span = 1
    while span < size:
        if place & span:
            rounds.append(Block((rank - span) % size, None, held, 0))
            break
        if place + span < size:
            count = min(span, size - place - span)
            rounds.append(Block(None, (rank + span) % size, 0, count))
            held += count
        span *= 2
    return rounds
