# SPDX-License-Identifier: Apache-2.0
"""The current or last collective of a rank, read from torch's flight recorder when the launcher asks.

The recorder keeps every collective of c10d, with its number and stack, and is on by default:
https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html. A thread of the rank's own reads it, as the
main thread may be waiting.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
from collections.abc import Iterable
from typing import Any

import msgspec

from accel.launching._failure_record import file_beside
from accel.launching._user_frames import DECORATOR, is_users
from accel.run_folder import write_json

_RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")  # NCCL's, and that of the other backends


class EnteredCollective(msgspec.Struct, frozen=True, kw_only=True):
    """The collective of one group that a rank waits in, or the last one that it left.

    Attributes:
        group: the group's name and backend, the same on all of its ranks.
        of_all: whether it is the group of all ranks.
        number: torch counts the collectives of a group and backend from 1.
        operation: c10d's name for it.
        call: function that the user's line called; empty if no frame is the user's.
        place: the user's line, "file:line in function".
        waiting: whether the rank is still in it.
    """

    group: str
    of_all: bool
    number: int
    operation: str
    call: str = ""
    place: str = ""
    waiting: bool = False

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
    """Start a thread that answers each byte in a named pipe with a file of this process's collectives.

    Args:
        record: path of this rank's failure record; the file lies beside it.
        ask: the pipe.
    """

    def answer() -> None:
        source = os.open(ask, os.O_RDWR)  # also for writing, so that it never ends
        while os.read(source, 1):
            # of another torch, a record may look otherwise; the launcher does without
            with contextlib.suppress(msgspec.MsgspecError, TypeError, RuntimeError, OSError):
                write_json(file_beside(record, "calls"), [each for trace in _traces() for each in last_calls(trace)])

    threading.Thread(target=answer, name="accel-launch-calls", daemon=True).start()


def last_calls(trace: object) -> list[EnteredCollective]:
    """Return the current or last collective of each group, the most telling one first.

    Args:
        trace: a dump of torch's flight recorder, as plain values.

    Raises:
        msgspec.ValidationError: `trace` is no such dump.
    """
    groups: dict[str, list[_Entry]] = {}
    for entry in msgspec.convert(trace, _Trace).entries:
        if not entry.is_p2p:
            groups.setdefault(_group(entry), []).append(entry)
    telling = [next((entry for entry in calls if not entry.retired), calls[-1]) for calls in groups.values()]
    telling.sort(key=lambda entry: (entry.retired, -entry.time_created_ns))
    return [_entered(entry) for entry in telling]


def _traces() -> Iterable[object]:
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")  # not there before the script has imported torch
    # to name lines, torch imports this, which breaks if the main thread is about to import it as well
    stacks = "_inductor" in vars(sys.modules.get("torch", sys))
    dumps = [getattr(c10d, name) for name in _RECORDERS if hasattr(c10d, name)]
    return [pickle.loads(dump(includeStackTraces=stacks)) for dump in dumps]


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
