# SPDX-License-Identifier: Apache-2.0
"""Collectives of small tensors among many ranks, as about log2(W) rounds of messages between pairs of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from accel.comm._call import public_call
from accel.comm._group import Comm
from accel.comm._lost import absence
from accel.comm._units import UnitLog, described, users_line, way_out
from accel.errors import AccelError, PeerError


class Round(NamedTuple):
    """One rank's part in a round of a reduction, or of a gather, which moves a run of the ranks' rows."""

    target: int | None  # rank that gets this rank's value, or the first `sent` of the rows here; None for none
    source: int | None  # rank that sends its value, or rows that follow the rows here; None for none
    sent: int = 1  # number of rows to send
    received: int = 1  # number of rows to receive
    final: bool = False  # whether the value that comes is the result of a reduction, and not another part of it


def reduction_rounds(rank: int, size: int) -> list[Round]:
    """Reduce on all ranks by recursive doubling, in rank order: each value covers a run of neighbouring ranks."""
    power = 1 << (size.bit_length() - 1)
    pairs = size - power  # ranks beyond a power of two: a neighbour sends their value, and returns the result
    if rank < 2 * pairs and rank % 2:
        return [Round(rank - 1, None), Round(None, rank - 1, final=True)]
    place = rank // 2 if rank < 2 * pairs else rank - pairs
    # partners differ in one bit a round; both combine the same two runs, so all ranks get the same bits
    partners = [place ^ (1 << bit) for bit in range(power.bit_length() - 1)]
    ranks = [2 * partner if partner < pairs else partner + pairs for partner in partners]
    doubling = [Round(partner, partner) for partner in ranks]
    if rank < 2 * pairs:
        return [Round(None, rank + 1), *doubling, Round(rank + 1, None)]
    return doubling


def gather_rounds(rank: int, size: int) -> list[Round]:
    """Gather the rows of all ranks on all ranks by Bruck's algorithm.

    Rows are in the order of ranks from this one on, cyclically: rank, rank + 1, ..., rank - 1.
    """
    rounds: list[Round] = []
    held = 1
    while held < size:
        count = min(held, size - held)
        # rows held double each round, so the last round may be a part of them
        rounds.append(Round((rank - held) % size, (rank + held) % size, count, count))
        held += count
    return rounds


def gather_to_rounds(rank: int, size: int, dst: int) -> list[Round]:
    """Gather the rows of all ranks on one rank along a binomial tree; rows have the order of `gather_rounds`."""
    place = (rank - dst) % size
    rounds: list[Round] = []
    held = 1
    span = 1
    while span < size:
        if place & span:
            rounds.append(Round((rank - span) % size, None, held, 0))
            break
        if place + span < size:
            count = min(span, size - place - span)
            rounds.append(Round(None, (rank + span) % size, 0, count))
            held += count
        span *= 2
    return rounds


T = TypeVar("T")

_LOST = (
    "gloo/",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Application timeout caused pair closure",  # gloo's, after a time-out of another call
    "NCCL error",
    "NCCL communicator",
)


def start_transfer(comm: Comm, begin: Callable[[], list[Any]]) -> Callable[[], None]:
    """Begin transfers by a function that returns torch's handles; return a function that waits for them."""
    return start_rounds(comm, (begin() for _ in range(1)), cuts=False)


def start_rounds(comm: Comm, rounds: Iterator[list[Any]], *, cuts: bool = True) -> Callable[[], None]:
    """Begin the first round of transfers; return a function that waits for it and runs the others.

    `rounds` begins a round at each step and gives torch's handles; `cuts`: a rank that loses a peer disconnects.
    """
    # at the start, not at the wait: all ranks start their calls in one order
    number = comm.next_number()
    began = time.monotonic()

    def run(action: Callable[[], T]) -> T:
        try:
            return action()
        except AccelError:  # from a simulated group
            raise
        except RuntimeError as error:
            # a search for a batch size rings: its caller handles the error, and no rank is missing
            if comm.alarm is not None and comm.alarm.rung():
                raise peer_error(error, public_call()) or error from error
            # a peer that waits for this rank in a later round would notice nothing of the lost one
            if cuts and comm.alarm is not None:
                comm.alarm.cut()
            waited_s = time.monotonic() - began
            raise absence(comm.roll, comm.rank, comm.size, number, waited_s, error, comm.units) from error

    nothing: list[Any] = []
    first = run(lambda: next(rounds, nothing))

    def wait() -> None:
        _wait_for(first)
        for works in rounds:
            _wait_for(works)

    return lambda: run(wait)


def guarded(action: Callable[[], T], others: Iterable[int]) -> T:
    """Run a transfer between this rank and others; a lost connection becomes a `PeerError`."""
    try:
        return action()
    except AccelError:  # from a simulated group
        raise
    except RuntimeError as error:
        raise PeerError(
            f"rank {', '.join(map(str, others))} has left or hangs",
            expected="its part in a transfer",
            got=str(error).splitlines()[0],
            where=public_call(),
            fix="See what it did last: its error, its other branch, or what it waits for.",
        ) from error


def peer_error(error: BaseException, name: str) -> PeerError | None:
    """Convert the error of a lost connection in the call `name` to a `PeerError`; return None for any other error."""
    # torch has one class for all of these errors, so their texts decide
    text = str(error)
    if isinstance(error, PeerError) or not (isinstance(error, dist.DistError) or any(sign in text for sign in _LOST)):
        return None
    return PeerError(
        f"{name} did not complete: {error}",
        expected="every rank in this call",
        fix="Another rank has left or hangs; look for its error first.",
    )


def lost_rank(comm: Comm, error: BaseException, name: str) -> PeerError | None:
    """Convert the error of a lost connection in the call `name` to a `PeerError` with the places of all waiting ranks.

    Returns None for any other error. Peers that wait for this rank raise, too.
    """
    lost = peer_error(error, name)
    # a search for a batch size rings: its caller handles the error, and no rank is missing
    if lost is None or comm.size == 1 or comm.roll is None or (comm.bell is not None and comm.bell.rung()):
        return lost
    if comm.bell is not None:
        comm.bell.cut()
    places = comm.roll.exchange_places(comm.units.at(f"in {name}{users_line(error)}"))
    if len(places) == 1:
        return lost
    return PeerError(
        f"{name} did not complete",
        expected="every rank in this call",
        got=described(places),
        where=f"rank {comm.rank}",
        fix=way_out(places) or lost.fix,
    )


def in_unit(comm: Comm, name: str, action: Callable[..., T], *args: object, **options: object) -> T:
    """Run a call of torch in which a unit communicates, such as "the gather of see.0".

    A lost connection becomes the `PeerError` of `lost_rank`. A simulation reads `name` from this frame.
    """
    try:
        return action(*args, **options)
    except RuntimeError as error:
        if (lost := lost_rank(comm, error, name)) is not None:
            raise lost from error
        raise


def unit_of(frame: FrameType) -> tuple[str, UnitLog] | None:
    """Return the call of `in_unit` that runs in a frame, and the units that its rank has run; None of another frame."""
    if frame.f_code is not in_unit.__code__:
        return None
    comm: Comm = frame.f_locals["comm"]
    return frame.f_locals["name"], comm.units


def _wait_for(works: list[Any]) -> None:
    for work in works:
        work.wait()


_TAG = 0xACCE1  # separates these messages from the user's sends


def send_flat(comm: Comm, tensors: Mapping[int, Sequence[torch.Tensor]]) -> None:
    """Send contiguous 1-d tensors to ranks that call `receive_flat`; return when all have received theirs."""
    pairs = [(rank, tensor.to(comm.control)) for rank, several in tensors.items() for tensor in several]
    # all sends before the first wait: receivers may take them in any order of ranks
    works = guarded(lambda: [(rank, start_send(comm, tensor, rank)) for rank, tensor in pairs], tensors)
    for rank, work in works:
        guarded(work.wait, [rank])


def receive_flat(comm: Comm, tensors: Sequence[torch.Tensor], *, source: int) -> None:
    """Receive contiguous 1-d tensors from another rank; sends and receives match by order."""
    buffers = [tensor.to(comm.control) for tensor in tensors]
    works = guarded(lambda: [start_receive(comm, buffer, source) for buffer in buffers], [source])
    for tensor, buffer, work in zip(tensors, buffers, works, strict=True):
        guarded(work.wait, [source])
        if buffer is not tensor:
            _ = tensor.copy_(buffer)


def start_send(comm: Comm, tensor: torch.Tensor, dst: int) -> Any:
    """Begin to send a contiguous tensor, unchanged until its end; return torch's handle."""
    return cast(Any, dist).isend(tensor, group=comm.carrier(tensor), group_dst=dst, tag=_TAG)


def start_receive(comm: Comm, tensor: torch.Tensor, source: int) -> Any:
    """Begin to overwrite a contiguous tensor with what a rank sends; return torch's handle."""
    return cast(Any, dist).irecv(tensor, group=comm.carrier(tensor), group_src=source, tag=_TAG)


# Overwrites the value of a run of ranks, shape [..., length], with the value of this run and the run above; any bytes
# are a value.
Combine = Callable[[torch.Tensor, torch.Tensor], None]


def start_reduction(comm: Comm, mine: torch.Tensor, combine: Combine) -> Callable[[], torch.Tensor]:
    """Begin to reduce a small CPU tensor over all ranks, in rank order; return a function that waits. A collective.

    Overwrites `mine`. `combine` is associative; the result belongs to all ranks of a process: not to be changed.
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
    """Begin to gather small contiguous tensors of one length into `out`; return a function that waits. A collective.

    `out` has shape [size * length], on the CPU; without `dst` all ranks receive. `mine` stays unchanged until the wait.
    """
    if comm.share is not None:
        arrive = comm.share(mine, lambda rows: torch.cat(list(rows)))

        def receive() -> None:
            rows = arrive()
            if dst in (None, comm.rank):
                _ = out.copy_(rows)

        return receive
    rounds = gather_rounds(comm.rank, comm.size) if dst is None else gather_to_rounds(comm.rank, comm.size, dst)
    # rounds collect rows from this rank on, so they need a buffer: the first row of `out` is rank 0's
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
    """Reduce rows of all ranks in one process, to the bits of `start_reduction`. Overwrites them."""
    power = 1 << (len(rows).bit_length() - 1)
    pairs = len(rows) - power
    if pairs:
        # the ranks beyond a power of two first, as `reduction_rounds` does: another order has other rounding
        combine(rows[: 2 * pairs : 2], rows[1 : 2 * pairs : 2])
        rows = torch.cat([rows[: 2 * pairs : 2], rows[2 * pairs :]])
    while len(rows) > 1:
        combine(rows[::2], rows[1::2])
        rows = rows[::2]
    return rows[0]


def _reduction(comm: Comm, state: list[torch.Tensor], combine: Combine) -> Iterator[list[Any]]:
    for each in reduction_rounds(comm.rank, comm.size):
        theirs = torch.empty_like(state[0]) if each.source is not None else None
        yield _exchange(comm, each, state[0], theirs)
        if theirs is None or each.source is None:
            continue
        if each.final:
            state[0] = theirs
        # the lower run is always the first operand
        elif each.source > comm.rank:
            combine(state[0], theirs)
        else:
            combine(theirs, state[0])
            state[0] = theirs


def _gathering(comm: Comm, rows: torch.Tensor, rounds: Sequence[Round]) -> Iterator[list[Any]]:
    held = 1
    for each in rounds:
        yield _exchange(comm, each, rows[: each.sent], rows[held : held + each.received])
        held += each.received


def _exchange(comm: Comm, each: Round, sent: torch.Tensor, received: torch.Tensor | None) -> list[Any]:
    works: list[Any] = []
    if each.source is not None and received is not None:
        # receives first, so that no send waits in the peer for a buffer
        works.append(start_receive(comm, received, each.source))
    if each.target is not None:
        works.append(start_send(comm, sent, each.target))
    return works
