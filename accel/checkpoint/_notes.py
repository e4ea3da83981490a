# SPDX-License-Identifier: Apache-2.0
"""How threads of different ranks meet without a process group: by files in the stage that all of them see."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Generator, Iterable
from pathlib import Path

import msgspec

from accel.checkpoint._commit import Share, Stage
from accel.errors import CheckpointError, ErrorRecord
from accel.storage import (
    Beat,
    Place,
    RemotePath,
    disk_errors,
    get_object,
    list_objects,
    open_directory,
    put_object,
    remove_objects,
    write_file,
)

_PAUSE_S = 0.02
_PAUSE_REMOTE_S = 0.2
_LARGEST = 1 << 20


class Note(msgspec.Struct, frozen=True):
    """What a rank's thread came to: one of the two."""

    share: Share | None = None
    error: ErrorRecord | None = None


def leave_note(stage: Stage, rank: int, note: Note) -> None:
    """Put a note into the stage, all of it at once.

    Raises:
        CheckpointError: the disk or store failed.
    """
    name, data = _name(stage, rank), msgspec.json.encode(note)
    if isinstance(stage.path, RemotePath):
        put_object(stage.path / name, data)
        return
    write_file(stage.path, f"{name}.part", [data])
    with disk_errors(stage.path / name):
        os.rename(stage.path / f"{name}.part", stage.path / name)


@contextlib.contextmanager
def show_life(stage: Stage, rank: int) -> Generator[None]:
    """Let rank 0 see that this rank works on, in a store, where nothing of an upload is seen before its end."""
    path = stage.path
    if not rank or not isinstance(path, RemotePath):
        yield
        return
    beat = Beat(lambda: put_object(path / f"share-{rank:05d}{stage.mark}.beat", b"."))
    try:
        yield
    finally:
        beat.stop()


def collect_notes(
    stage: Stage, ranks: Iterable[int], *, timeout_s: float, given_up: threading.Event
) -> dict[int, Note]:
    """Wait for the notes of ranks, and take them out of the stage once all are there.

    Args:
        stage: where they are.
        ranks: whose notes to wait for.
        timeout_s: how long no rank may write anything, in seconds.
        given_up: set by whoever no longer wants them.

    Raises:
        CheckpointError: ranks have written nothing for too long, and are named; or the disk or store failed.
    """
    waiting, notes = set(ranks), dict[int, Note]()
    pause_s = _PAUSE_REMOTE_S if isinstance(stage.path, RemotePath) else _PAUSE_S
    seen, since = None, time.monotonic()
    while waiting:
        for rank in sorted(waiting):
            if (note := _read(stage, rank)) is not None:
                notes[rank] = note
                waiting.remove(rank)
        if (written := _written(stage.path)) != seen:
            seen, since = written, time.monotonic()
        if waiting and (given_up.wait(pause_s) or time.monotonic() - since > timeout_s):
            raise CheckpointError(
                "the checkpoint was given up" if given_up.is_set() else f"nothing was written for {timeout_s:g} s",
                expected="the shares of all ranks",
                got=f"none of rank {', '.join(map(str, sorted(waiting)))}",
                where=str(stage.path),
                fix="See whether those ranks have ended, and whether all nodes share this folder.",
            )
    _remove(stage, notes)
    return notes


def _read(stage: Stage, rank: int) -> Note | None:
    path, name = stage.path, _name(stage, rank)
    if isinstance(path, RemotePath):
        data = get_object(path / name, 0, _LARGEST)
    elif os.path.lexists(path / name):
        with open_directory(path, follow=False) as folder:
            data = folder.read(name, limit=_LARGEST)
    else:
        data = None
    try:
        return msgspec.json.decode(data, type=Note) if data is not None else None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"not a note of a rank: {error}", where=str(path / name)) from error


def _remove(stage: Stage, ranks: Iterable[int]) -> None:
    names = [_name(stage, rank) for rank in ranks]
    if isinstance(stage.path, RemotePath):
        remove_objects(stage.path, names)
        return
    with disk_errors(stage.path):
        for name in names:
            os.unlink(stage.path / name)


def _written(stage: Place) -> object:
    """What changes whenever ranks write: how many bytes there are, or which objects, and of when."""
    if isinstance(stage, RemotePath):
        return list_objects(stage)
    return _size(stage)


def _size(stage: Path) -> int:
    size = 0
    with disk_errors(stage), os.scandir(stage) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # a note that gets its name just now
                size += entry.stat(follow_symlinks=False).st_size
    return size


def _name(stage: Stage, rank: int) -> str:
    return f"share-{rank:05d}{stage.mark}.json"
