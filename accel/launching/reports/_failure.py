# SPDX-License-Identifier: Apache-2.0
"""A failure as plain values: the failing process's record, its last collective, and the parent's observation."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn

import msgspec

from accel.errors._checks import ACCEL_FOLDER, is_users
from accel.run_folder import read_json, write_json

# torch's words for a peer that is gone
_LOST = ("gloo/transport/", "Connection closed by peer", "Application timeout caused pair closure", "NCCL error")
STACK_SIGNAL = signal.SIGRTMAX - 1  # asks a rank for its Python stack; far from those that scripts use


class FailureRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A failure as the failing process records it before it ends."""

    rank: int  # rank of the process
    host: str  # name of its machine
    exception: str  # the exception's class, with its module where Python shows one
    message: str  # the exception's text
    location: str  # `file:line` of the innermost frame of the user's code; empty if there is none
    traceback: str  # the whole traceback as Python prints it, without the launcher's frames
    time_s: float  # time of the failure, in seconds since the epoch


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The failure of one process."""

    rank: int  # rank of the process
    status: int  # its exit status, or minus the number of the signal that killed it
    time_s: float  # time when the failure was recorded or, without a record, noticed; in seconds since the epoch
    record: FailureRecord | None = None  # its own record, None if it wrote none
    crash: str = ""  # the fault handler's dump at a signal like SIGSEGV; empty if there is none


def file_beside(record: str, kind: Literal["ask", "calls", "checkpoint", "crash", "run", "stack"]) -> str:
    """Return the path of another file of a rank, next to its failure record."""
    # The rank writes "crash" (the fault handler's dump), "stack" and "calls" (answers to a byte in the named pipe
    # "ask"), "checkpoint" (name of its newest one) and "run" (folders of its runs, one a line); the launcher reads.
    return f"{record}.{kind}"


def newest_checkpoint(records: Iterable[str]) -> str:
    """Return the checkpoint that ranks have written or resumed from last; empty if there is none."""
    paths = [Path(file_beside(record, "checkpoint")) for record in records]
    found = [path for path in paths if path.exists()]
    newest = max(found, key=lambda path: path.stat().st_mtime_ns, default=None)
    return (newest and read_json(str(newest), str)) or ""


def read_failure(rank: int, status: int, path: str, noticed_s: float) -> Failure:
    """Return the failure of a process that has ended, with its record, if it left one, and its crash dump."""
    record = read_json(path, FailureRecord)
    dump = Path(file_beside(path, "crash"))
    crash = dump.read_text(encoding="utf-8", errors="replace") if dump.exists() else ""
    return Failure(rank=rank, status=status, time_s=record.time_s if record else noticed_s, record=record, crash=crash)


def culprit(failures: list[Failure]) -> Failure:
    """Return the failure that caused the others; among equals the earliest."""
    # Peers of a lost process see a closed connection: they raise, which leaves a record, or abort in a C++ thread.
    # So a death without a record comes first, unless it is an abort; an error that names a lost peer comes last.
    return min(failures, key=lambda failure: (_echo(failure), failure.time_s, failure.rank))


def exit_code(status: int) -> int:
    """Return the exit status as a shell reports it: the status, or 128 plus the signal's number."""
    return status if status >= 0 else 128 - status


def stop_number(failure: Failure) -> int:
    """Return the signal for which a rank raised `accel.preempt.Stop`; 0 for any other end."""
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


WORKER = "/launching/local/_worker.py"  # end of the path of what each process executes
DECORATOR = "wrapper"  # c10d's name for the function around each of its functions
_ENTRY = re.compile(r'  File "([^"\n]+)", line \d+')


def frames_below(trace: TracebackType | None, file: str) -> TracebackType | None:
    """Return a traceback without the frames at its start of a file and of Python's import system."""
    while trace and trace.tb_frame.f_code.co_filename.startswith((file, "<frozen importlib")):
        trace = trace.tb_next
    return trace


def without_own(traceback: str) -> str:
    """Return a traceback as text, in which a line with their number replaces accel's frames."""
    shown: list[str] = []
    stack: list[tuple[str, list[str]]] = []  # file and lines of each frame
    for line in (*traceback.splitlines(keepends=True), ""):
        if entry := _ENTRY.match(line):
            stack.append((entry[1], [line]))
        elif stack and line.startswith(("    ", "  [")):
            stack[-1][1].append(line)
        else:
            shown += _short(stack, is_accels=line.startswith("accel."))
            shown.append(line)
            stack = []
    return "".join(shown)


def _short(stack: Sequence[tuple[str, list[str]]], *, is_accels: bool) -> list[str]:
    users = [at for at, (file, _) in enumerate(stack) if is_users(file)]
    # Accel's frames behind the user's last stay, unless accel raised on purpose: they may show a fault of accel.
    until = (len(stack) if is_accels else users[-1]) if users else 0
    shown: list[str] = []
    omitted = 0
    for at, (file, lines) in enumerate(stack):
        is_omitted = at < until and file.startswith(ACCEL_FOLDER)
        omitted += is_omitted
        if omitted and not is_omitted:
            shown.append(_count(omitted))
            omitted = 0
        shown += [] if is_omitted else lines
    return [*shown, _count(omitted)] if omitted else shown


def _count(omitted: int) -> str:
    return f"  ... {omitted} frame{'s' if omitted > 1 else ''} of accel\n"


_RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")  # NCCL's, and the other backends'


class EnteredCollective(msgspec.Struct, frozen=True, kw_only=True):
    """The collective of one group that a rank waits in, or the last one that it left."""

    group: str  # the group's name and backend, the same on all of its ranks
    of_all: bool  # whether it is the group of all ranks
    number: int  # torch counts the collectives of a group and backend from 1
    operation: str  # c10d's name for it
    call: str = ""  # function that the user's line called; empty if no frame is the user's
    place: str = ""  # the user's line, "file:line in function"
    waiting: bool = False  # whether the rank is still in it

    def __str__(self) -> str:
        of = f" of {self.call}" if self.call not in ("", self.operation) else ""
        at = f" at {self.place}" if self.place else ""
        return f"{self.short}{of}{at}"

    @property
    def short(self) -> str:
        """Name the collective without the user's line."""
        return f"collective {self.number} of {self.group}, {self.operation}"


class _Frame(msgspec.Struct, frozen=True):
    name: str
    filename: str
    line: int


class _Entry(msgspec.Struct, frozen=True):
    """A call in the flight recorder; fields that are not needed are left out."""

    process_group: tuple[str, str]
    profiling_name: str
    collective_seq_id: int
    retired: bool
    is_p2p: bool
    time_created_ns: int
    frames: tuple[_Frame, ...] = ()


class _Trace(msgspec.Struct, frozen=True):
    entries: list[_Entry] = []


def answer_calls(record: str, ask: str) -> None:
    """Start a thread that answers each byte in the named pipe `ask` with a file of this process's collectives."""

    def answer() -> None:
        source = os.open(ask, os.O_RDWR)  # also for writing, so that it never ends
        while os.read(source, 1):
            # of another torch, a record may look otherwise; the launcher does without
            with contextlib.suppress(msgspec.MsgspecError, pickle.UnpicklingError, TypeError, RuntimeError, OSError):
                write_json(file_beside(record, "calls"), [each for trace in _traces() for each in last_calls(trace)])

    threading.Thread(target=answer, name="accel-launch-calls", daemon=True).start()


def last_calls(trace: object) -> list[EnteredCollective]:
    """Return each group's current or last collective from a dump of torch's flight recorder, waiting ones first."""
    groups: dict[str, list[_Entry]] = {}
    for entry in msgspec.convert(trace, _Trace).entries:
        if not entry.is_p2p:
            groups.setdefault(_group(entry), []).append(entry)
    shown = [next((entry for entry in calls if not entry.retired), calls[-1]) for calls in groups.values()]
    shown.sort(key=lambda entry: (entry.retired, -entry.time_created_ns))
    return [_entered(entry) for entry in shown]


def _traces() -> Iterable[object]:
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")  # not there before the script has imported torch
    # to name lines, torch imports this, which breaks if the main thread is about to import it as well
    stacks = "_inductor" in vars(sys.modules.get("torch", sys))
    dumps = [getattr(c10d, name) for name in _RECORDERS if hasattr(c10d, name)]
    return [read_plain(dump(includeStackTraces=stacks)) for dump in dumps]


class _PlainUnpickler(pickle.Unpickler):
    """Knows containers, text and numbers; names of classes and functions are refused, so that nothing is called."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"a flight record names {module_name}.{global_name}, and holds plain values only")


def read_plain(record: bytes) -> object:
    """Return the plain values of a flight record, which torch writes as a pickle, or as JSON without lines of code.

    Raises `pickle.UnpicklingError` for a pickle that names a class or function, and for what is neither.
    """
    try:
        return msgspec.json.decode(record) if record[:1] == b"{" else _PlainUnpickler(io.BytesIO(record)).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # pickle raises errors of many kinds
        raise pickle.UnpicklingError(f"not a flight record: {error}") from error


def _group(entry: _Entry) -> str:
    name, description = entry.process_group
    backend = entry.profiling_name.partition(":")[0]
    return backend if _is_of_all(entry) else f"{backend} in group {name} ({description})"


def _is_of_all(entry: _Entry) -> bool:
    return entry.process_group[1] == "default_pg"


def _entered(entry: _Entry) -> EnteredCollective:
    called, place = "", ""
    for frame in entry.frames:
        if is_users(frame.filename):
            place = f"{frame.filename}:{frame.line} in {frame.name}"
            break
        called = frame.name if frame.name != DECORATOR else called
    return EnteredCollective(
        group=_group(entry),
        of_all=_is_of_all(entry),
        number=entry.collective_seq_id,
        operation=entry.profiling_name.partition(":")[2],
        call=called if place else "",
        place=place,
        waiting=not entry.retired,
    )
