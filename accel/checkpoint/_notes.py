# SPDX-License-Identifier: Apache-2.0
"""How threads of different ranks meet without a process group: by files in the stage that all of them see."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from accel.checkpoint._commit import Share
from accel.errors import CheckpointError, ErrorRecord
from accel.storage import disk_errors, open_directory, write_file

_PAUSE_S = 0.02
_LARGEST = 1 << 20


class Note(msgspec.Struct, frozen=True):
    """What a rank's thread came to: one of the two."""

    share: Share | None = None
    error: ErrorRecord | None = None


def leave_note(stage: Path, rank: int, note: Note) -> None:
    """Put a note into the stage, all of it at once.

    Raises:
        CheckpointError: the disk failed.
    """
    name = _name(rank)
    write_file(stage, f"{name}.part", [msgspec.json.encode(note)])
    with disk_errors(stage / name):
        os.rename(stage / f"{name}.part", stage / name)


def collect_notes(stage: Path, ranks: Iterable[int], *, timeout_s: float, given_up: threading.Event) -> dict[int, Note]:
    """Wait for the notes of ranks, and take them out of the stage once all are there.

    Args:
        stage: the folder.
        ranks: whose notes to wait for.
        timeout_s: how long no rank may write anything, in seconds.
        given_up: set by whoever no longer wants them.

    Raises:
        CheckpointError: ranks have written nothing for too long, and are named; or the disk failed.
    """
    waiting, notes = set(ranks), dict[int, Note]()
    seen, since = -1, time.monotonic()
    while waiting:
        for rank in sorted(waiting):
            if (note := _read(stage, rank)) is not None:
                notes[rank] = note
                waiting.remove(rank)
        if (size := _size(stage)) != seen:
            seen, since = size, time.monotonic()
        if waiting and (given_up.wait(_PAUSE_S) or time.monotonic() - since > timeout_s):
            raise CheckpointError(
                "the checkpoint was given up" if given_up.is_set() else f"nothing was written for {timeout_s:g} s",
                expected="the shares of all ranks",
                got=f"none of rank {', '.join(map(str, sorted(waiting)))}",
                where=str(stage),
                fix="See whether those ranks have ended, and whether all nodes share this folder.",
            )
    with disk_errors(stage):
        for rank in notes:
            os.unlink(stage / _name(rank))
    return notes


def _read(stage: Path, rank: int) -> Note | None:
    if not os.path.lexists(stage / _name(rank)):
        return None
    with open_directory(stage, follow=False) as folder:
        data = folder.read(_name(rank), limit=_LARGEST)
    try:
        return msgspec.json.decode(data, type=Note)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"not a note of a rank: {error}", where=str(stage / _name(rank))) from error


def _size(stage: Path) -> int:
    """How many bytes the ranks have written so far."""
    size = 0
    with disk_errors(stage), os.scandir(stage) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # a note that gets its name just now
                size += entry.stat(follow_symlinks=False).st_size
    return size


def _name(rank: int) -> str:
    return f"share-{rank:05d}.json"
