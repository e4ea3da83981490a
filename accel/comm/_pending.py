# SPDX-License-Identifier: Apache-2.0
"""Transfers under way, of one round or of several: begun now, waited for later. A lost rank becomes a `PeerError`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from accel.comm._absent import absence
from accel.comm._call import public_call
from accel.comm._handle import Comm
from accel.errors import AccelError, PeerError

T = TypeVar("T")

_LOST = (
    "gloo/",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL error",
    "NCCL communicator",
)


def start_transfer(comm: Comm, begin: Callable[[], list[Any]]) -> Callable[[], None]:
    """Begin transfers of all ranks; return a function that waits for their end.

    Args:
        comm: an open handle of more than one rank.
        begin: begins the transfers; returns torch's handles on them.
    """
    return start_rounds(comm, (begin() for _ in range(1)), cuts=False)


def start_rounds(comm: Comm, rounds: Iterator[list[Any]], *, cuts: bool = True) -> Callable[[], None]:
    """Begin the first round of transfers; return a function that waits for it and runs the others.

    Args:
        comm: an open handle of more than one rank.
        rounds: begins a round at each step, once the one before has ended; gives torch's handles.
        cuts: whether a rank that loses a peer cuts its connections. A peer that waits for it in a later round has no
            message under way with the lost rank, and would notice nothing.
    """
    number = comm.next_number()
    began = time.monotonic()

    def run(action: Callable[[], T]) -> T:
        try:
            return action()
        except AccelError:  # from a simulated group
            raise
        except RuntimeError as error:
            if comm.alarm is not None and comm.alarm.rung():
                raise peer_error(error, public_call()) or error from error
            if cuts and comm.alarm is not None:
                comm.alarm.cut()
            raise absence(comm.roll, comm.rank, comm.size, number, time.monotonic() - began, error) from error

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
    """Convert the error of a lost connection to a `PeerError`; return None for any other error.

    Args:
        error: raised by a forward or backward in which torch runs collectives.
        name: the call, for the message.
    """
    text = str(error)
    if isinstance(error, PeerError) or not (isinstance(error, dist.DistError) or any(sign in text for sign in _LOST)):
        return None
    return PeerError(
        f"{name} did not complete: {error}",
        expected="every rank in this call",
        fix="Another rank has left or hangs; look for its error first.",
    )


def _wait_for(works: list[Any]) -> None:
    for work in works:
        work.wait()
