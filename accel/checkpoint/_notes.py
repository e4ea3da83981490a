# SPDX-License-Identifier: Apache-2.0
"""Notes between threads of different ranks, without a process group: files in the stage that all ranks share."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable

import msgspec

from accel.checkpoint._stage import Stage, WrittenFile
from accel.errors import CheckpointError, ErrorRecord

_LARGEST = 1 << 20


class ShareReport(msgspec.Struct, frozen=True):
    """Outcome of a rank's thread: its file, or its error."""

    share: WrittenFile | None = None
    error: ErrorRecord | None = None


def leave_note(stage: Stage, rank: int, note: ShareReport) -> None:
    """Write a note into the stage, atomically.

    Raises:
        CheckpointError: the disk or store failed.
    """
    stage.place.put(_name(stage, rank), msgspec.json.encode(note))


def show_life(stage: Stage, rank: int) -> contextlib.AbstractContextManager[object]:
    """Show rank 0 that this rank is alive, in a store, where an upload is invisible until its end."""
    return stage.place.beating(f"share-{rank:05d}{stage.mark}.beat") if rank else contextlib.nullcontext()


def collect_notes(
    stage: Stage, ranks: Iterable[int], *, timeout_s: float, given_up: threading.Event
) -> dict[int, ShareReport]:
    """Wait for the notes of all ranks, and remove them from the stage.

    Args:
        stage: folder of the notes.
        ranks: writers of the notes.
        timeout_s: longest time in which no rank writes anything, in seconds.
        given_up: set when the notes are no longer wanted.

    Raises:
        CheckpointError: named ranks have written nothing for too long; or the disk or store failed.
    """
    waiting = set(ranks)
    notes = dict[int, ShareReport]()
    seen, since = None, time.monotonic()
    while waiting:
        for rank in sorted(waiting):
            if (note := _read(stage, rank)) is not None:
                notes[rank] = note
                waiting.remove(rank)
        if (written := stage.place.usage()) != seen:
            seen, since = written, time.monotonic()
        if waiting and (given_up.wait(stage.place.pause_s) or time.monotonic() - since > timeout_s):
            raise CheckpointError(
                "the checkpoint was given up" if given_up.is_set() else f"nothing was written for {timeout_s:g} s",
                expected="the shares of all ranks",
                got=f"none of rank {', '.join(map(str, sorted(waiting)))}",
                where=str(stage.place),
                fix="See whether those ranks have ended, and whether all nodes share this folder.",
            )
    stage.place.remove(_name(stage, rank) for rank in notes)
    return notes


def _read(stage: Stage, rank: int) -> ShareReport | None:
    name = _name(stage, rank)
    data = stage.place.get(name, _LARGEST)
    try:
        return msgspec.json.decode(data, type=ShareReport) if data is not None else None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"not a note of a rank: {error}", where=str(stage.place / name)) from error


def _name(stage: Stage, rank: int) -> str:
    return f"share-{rank:05d}{stage.mark}.json"
