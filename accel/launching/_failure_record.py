# SPDX-License-Identifier: Apache-2.0
"""A failure as plain values: the record of the failing process, and the observation of its parent."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from accel.run_folder import read_json

_LOST = ("gloo/transport/", "Connection closed by peer", "NCCL error")  # torch's words for a peer that is gone
STACK_SIGNAL = signal.SIGRTMAX - 1  # asks a rank for its Python stack; far from those that scripts use


class FailureRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A failure as the failing process records it before it ends.

    Attributes:
        rank: rank of the process.
        host: name of its machine.
        exception: the exception's class, with its module where Python shows one.
        message: the exception's text.
        location: `file:line` of the innermost frame of the user's code; empty if there is none.
        traceback: the whole traceback as Python prints it, without the launcher's frames.
        time_s: time of the failure, in seconds since the epoch.
    """

    rank: int
    host: str
    exception: str
    message: str
    location: str
    traceback: str
    time_s: float


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The failure of one process.

    Attributes:
        rank: rank of the process.
        status: its exit status, or minus the number of the signal that killed it.
        time_s: time when the failure was recorded or, without a record, noticed; in seconds since the epoch.
        record: its own record, None if it wrote none.
        crash: the fault handler's dump at a signal like SIGSEGV; empty if there is none.
    """

    rank: int
    status: int
    time_s: float
    record: FailureRecord | None = None
    crash: str = ""


def file_beside(record: str, kind: Literal["ask", "calls", "checkpoint", "crash", "run", "stack"]) -> str:
    """Return the path of another file of a rank.

    Args:
        record: path of the rank's failure record.
        kind: "crash" for the fault handler's dump; "stack" and "calls" for the stacks and collectives that a rank is
            asked for, "ask" for the named pipe that asks; "checkpoint" for the name of its newest checkpoint; "run" for
            the folders of its runs, one a line.
    """
    return f"{record}.{kind}"


def newest_checkpoint(records: Iterable[str]) -> str:
    """Return the checkpoint that ranks have written or resumed from last; empty if there is none.

    Args:
        records: paths of the ranks' failure records.
    """
    paths = [Path(file_beside(record, "checkpoint")) for record in records]
    found = [path for path in paths if path.exists()]
    newest = max(found, key=lambda path: path.stat().st_mtime_ns, default=None)
    return (newest and read_json(str(newest), str)) or ""


def read_failure(rank: int, status: int, path: str, noticed_s: float) -> Failure:
    """Return the failure of a process that has ended, with its record and dump.

    Args:
        rank: rank of the process.
        status: its exit status, or minus the number of the signal that killed it.
        path: path of its record, which may be missing.
        noticed_s: time when its end was noticed, in seconds since the epoch.
    """
    record = read_json(path, FailureRecord)
    dump = Path(file_beside(path, "crash"))
    crash = dump.read_text(encoding="utf-8", errors="replace") if dump.exists() else ""
    return Failure(rank=rank, status=status, time_s=record.time_s if record else noticed_s, record=record, crash=crash)


def culprit(failures: list[Failure]) -> Failure:
    """Return the failure that caused the others.

    Peers of a lost process see a closed connection. They raise, which leaves a record, or abort in a C++ thread. So a
    death without a record comes first, unless it is an abort. An error that names a lost peer comes last. Among equals
    the earliest counts.
    """
    return min(failures, key=lambda failure: (_echo(failure), failure.time_s, failure.rank))


def exit_code(status: int) -> int:
    """Return the exit status as a shell reports it: the status, or 128 plus the signal's number."""
    return status if status >= 0 else 128 - status


def stop_number(failure: Failure) -> int:
    """Return the signal for which a rank raised `accel.Stop`; 0 for any other end."""
    stopped = failure.record is not None and failure.record.exception == "accel.preempt.Stop"
    return failure.status - 128 if stopped else 0


def repeats(failure: Failure) -> bool:
    """Return whether a failure only reports that another rank is gone."""
    return _echo(failure) == 2 or (failure.record is None and failure.status == -signal.SIGABRT)


def _echo(failure: Failure) -> int:
    if failure.record is None:
        return 1 if failure.status == -signal.SIGABRT else 0
    is_lost = failure.record.exception == "accel.errors.PeerError" or any(map(failure.record.message.count, _LOST))
    return 2 if is_lost else 1
