# SPDX-License-Identifier: Apache-2.0
"""Collectives of small tensors among many ranks, as rounds of messages between pairs of ranks.

gloo sends small tensors round a ring, which takes W - 1 steps one after another, or straight to all W - 1 others. These
take about log2(W) rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from accel.comm._handle import Comm
from accel.comm._pairs import start_receive, start_send
from accel.comm._pending import start_rounds
from accel.comm._schedules import Block, Round, gather_rounds, gather_to_rounds, reduction_rounds


class Combine(Protocol):
    """Combines the values of two runs of neighbouring ranks."""

    def __call__(self, lower: torch.Tensor, upper: torch.Tensor, /) -> None:
        """Overwrite the value of the lower ranks with that of both.

        Args:
            lower: shape [..., length]; any bytes are a value.
            upper: that of the higher ranks, of the same shape.
        """
        ...


def start_reduction(comm: Comm, mine: torch.Tensor, combine: Combine) -> Callable[[], torch.Tensor]:
    """Begin to reduce a small tensor over all ranks; return a function that waits for the result. A collective.

    Args:
        comm: an open handle of more than one rank.
        mine: this rank's value, on the CPU, contiguous, of one size on all ranks; overwritten.
        combine: associative; its order of operands is that of ranks, so that all ranks get the same bits.

    Returns:
        A function that gives the result, which must not be changed, as ranks of one process share it.
    """
    if comm.share is not None:
        return comm.share(mine, lambda values: reduce_rows(torch.stack(list(values)), combine))
    state = [mine]
    wait = start_rounds(comm, _reduction(comm, state, combine))

    def result() -> torch.Tensor:
        wait()
        return state[0]

    return result


def start_gather(comm: Comm, out: torch.Tensor, mine: torch.Tensor, *, dst: int | None = None) -> Callable[[], None]:
    """Begin to gather small tensors of one length; return a function that waits. A collective.

    Args:
        comm: an open handle of more than one rank.
        out: shape [size * length], on the CPU, contiguous; overwritten on ranks that receive.
        mine: shape [length], contiguous; unchanged until the wait.
        dst: the receiving rank; None for all.
    """
    if comm.share is not None:
        arrive = comm.share(mine, _joined)

        def receive() -> None:
            rows = arrive()
            if dst in (None, comm.rank):
                _ = out.copy_(rows)

        return receive
    rounds = gather_rounds(comm.rank, comm.size) if dst is None else gather_to_rounds(comm.rank, comm.size, dst)
    rows = torch.empty_like(out).view(comm.size, -1)
    _ = rows[0].copy_(mine)
    wait = start_rounds(comm, _gathering(comm, rows, rounds))

    def arrange() -> None:
        wait()
        first = comm.size - comm.rank  # the row of rank 0
        whole = out.view_as(rows)
        _ = whole[: comm.rank].copy_(rows[first:])
        _ = whole[comm.rank :].copy_(rows[:first])

    return arrange


def reduce_rows(rows: torch.Tensor, combine: Combine) -> torch.Tensor:
    """Reduce the values of all ranks in one process, to the bits that `start_reduction` gives.

    Args:
        rows: shape [size, length]; overwritten.
        combine: as there, for any number of rows at once.
    """
    power = 1 << (len(rows).bit_length() - 1)
    pairs = len(rows) - power
    if pairs:
        combine(rows[: 2 * pairs : 2], rows[1 : 2 * pairs : 2])
        rows = torch.cat([rows[: 2 * pairs : 2], rows[2 * pairs :]])
    while len(rows) > 1:
        combine(rows[::2], rows[1::2])
        rows = rows[::2]
    return rows[0]


def _joined(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(rows))


def _reduction(comm: Comm, state: list[torch.Tensor], combine: Combine) -> Iterator[list[Any]]:
    for each in reduction_rounds(comm.rank, comm.size):
        theirs = torch.empty_like(state[0]) if each.source is not None else None
        yield _exchange(comm, each, state[0], theirs)
        if theirs is None or each.source is None:
            continue
        if each.final:
            state[0] = theirs
        elif each.source > comm.rank:
            combine(state[0], theirs)
        else:
            combine(theirs, state[0])
            state[0] = theirs


def _gathering(comm: Comm, rows: torch.Tensor, rounds: Sequence[Block]) -> Iterator[list[Any]]:
    held = 1
    for each in rounds:
        yield _exchange(comm, each, rows[: each.sent], rows[held : held + each.received])
        held += each.received


def _exchange(comm: Comm, each: Round | Block, sent: torch.Tensor, received: torch.Tensor | None) -> list[Any]:
    works: list[Any] = []
    if each.source is not None and received is not None:
        works.append(start_receive(comm, received, each.source))
    if each.target is not None:
        works.append(start_send(comm, sent, each.target))
    return works
