# SPDX-License-Identifier: Apache-2.0
"""Work that may fail on one rank: every rank goes on, or every rank raises the same error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import TypeVar

from accel.comm._call import Call
from accel.comm._exchange import exchange_values
from accel.comm._handle import Comm
from accel.comm._message import fail, start

T = TypeVar("T")


@contextlib.contextmanager
def agreed(comm: Comm, call: Call) -> Generator[None]:
    """Run a block that communicates nothing, then wait for all ranks. A collective at the block's end.

    Args:
        comm: an open handle.
        call: the expected call of all ranks.

    Raises:
        AccelError: the lowest failing rank's error, on every rank, with the rank unless all failed alike; errors of
            other kinds arrive as `PeerError`.
        CollectiveMismatch: ranks made different calls; on every rank.
    """
    with shared_failure(comm, call):
        yield
    barrier(comm, call)


def agreed_values(comm: Comm, call: Call, work: Callable[[], T], kind: type[T], *, dst: int | None = None) -> list[T]:
    """Run work that communicates nothing, and gather every rank's value. A collective.

    Args:
        comm: an open handle.
        call: the expected call of all ranks.
        work: returns this rank's value.
        kind: type of the values, which msgspec encodes; checked on arrival.
        dst: the receiving rank, the same in all such calls; None for all.

    Returns:
        The values by rank; empty on ranks other than `dst`.

    Raises:
        AccelError: as `agreed`.
        CollectiveMismatch: ranks made different calls; on every rank.
    """
    with shared_failure(comm, call):
        value = work()
    return exchange_values(comm, call, value, kind, dst=dst)


@contextlib.contextmanager
def shared_failure(comm: Comm, call: Call) -> Generator[None]:
    """Run a block that communicates nothing, directly before a collective; its error is raised on every rank.

    The other ranks receive the error in that collective. A collective where the block fails, no message elsewhere.

    Args:
        comm: an open handle.
        call: the expected call of all ranks, for reports.

    Raises:
        AccelError: as `agreed`.
    """
    try:
        yield
    except Exception as error:
        fail(comm, call, error)


def barrier(comm: Comm, call: Call) -> None:
    """Wait until every rank has made this call. A collective.

    Args:
        comm: an open handle.
        call: the expected call of all ranks.

    Raises:
        AccelError: a rank failed; the same error on every rank.
        CollectiveMismatch: ranks made different calls; on every rank.
    """
    comm.check_open()
    if comm.size > 1:
        _ = start(comm, call)()
