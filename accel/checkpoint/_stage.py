# SPDX-License-Identifier: Apache-2.0
"""A checkpoint under construction: its folder and lock, the files that ranks write into it, and its commit."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from accel.checkpoint._manifest import MANIFEST, encode_manifest
from accel.checkpoint._retention import discard, sweep, sweep_objects, sweep_step
from accel.checkpoint._snapshot import Snapshot
from accel.errors import CheckpointError
from accel.storage import FileEntry, Lock, Place, encode_tensors


class WrittenFile(msgspec.Struct, frozen=True):
    """Name and entry of a rank's file; the entry is None if the rank wrote nothing."""

    name: str
    entry: FileEntry | None


@dataclass(frozen=True, slots=True)
class Stage:
    """A checkpoint under construction.

    Attributes:
        place: folder of the stage, the same on every rank; in a store, the checkpoint's own.
        lock: lock of the run's folder, on the rank that commits: rank 0, or one of each host; None elsewhere.
        mark: part of the names of all files of this save.
        is_first: whether that rank made the run's folder for this stage.
        common: names of the older checkpoints that all hosts have, where each has a folder of its own; else None.
    """

    place: Place
    lock: Lock | None
    mark: str
    is_first: bool = False
    common: frozenset[str] | None = None

    def abandon(self) -> None:
        """Remove the stage and release the lock, on a rank that commits."""
        if self.lock is None:
            return
        try:
            with suppress(CheckpointError):  # gone already, or a disk that fails: the first error is the one to tell
                sweep_objects(self.place, self.mark)
                self.place.remove_stage()
        finally:
            self.lock.release()
        if self.is_first:
            self.place.parent.unmake()

    def close(self) -> None:
        """Release the lock, on a rank that commits."""
        if self.lock is not None:
            self.lock.release()


def write_share(place: Place, snapshot: Snapshot) -> WrittenFile:
    """Write this rank's share. No communication.

    Raises:
        CheckpointError: the disk failed.
        RuntimeError: a copy from a device failed.
    """
    if not snapshot.tensors:
        return WrittenFile(snapshot.file, None)
    return WrittenFile(snapshot.file, place.write(snapshot.file, encode_tensors(snapshot.tensors)))


def commit_stage(stage: Stage, target: Place, snapshot: Snapshot, shares: Sequence[WrittenFile]) -> None:
    """Write the manifest of all ranks' files, commit, and log the commit. Rank 0's work; no communication.

    Raises:
        CheckpointError: the disk failed; a former checkpoint of that name is restored.
    """
    finish_commit(target, put_in_place(stage, target, snapshot, shares), snapshot, shares)


def put_in_place(stage: Stage, target: Place, snapshot: Snapshot, shares: Sequence[WrittenFile]) -> Place | None:
    """Write the manifest, and give the stage its name; return the former holder of the name, moved aside.

    Raises:
        CheckpointError: the disk failed; a former checkpoint of that name is restored.
    """
    files = _files(snapshot, shares)
    manifest = encode_manifest(msgspec.structs.replace(snapshot.manifest, files=files))
    if stage.lock is not None:
        stage.lock.check()
    own = {name: entry for name, entry in files.items() if name not in snapshot.manifest.elsewhere}
    return stage.place.commit(target.name, MANIFEST, manifest, own)


def finish_commit(target: Place, aside: Place | None, snapshot: Snapshot, shares: Sequence[WrittenFile]) -> None:
    """Delete what a commit has replaced, and log it."""
    files = _files(snapshot, shares)
    if aside is not None:
        discard(aside)
    sweep_step(target)
    sys.audit("accel.checkpoint", str(target))  # for the launcher's last line
    logging.getLogger("accel.checkpoint").info("wrote %s, %d bytes", target, sum(each.size for each in files.values()))


def _files(snapshot: Snapshot, shares: Sequence[WrittenFile]) -> dict[str, FileEntry]:
    """Return the entries of the files that the manifest names."""
    files = {share.name: share.entry for share in shares if share.entry is not None}
    if snapshot.manifest.host is msgspec.UNSET:
        return files
    named = {piece.file for entry in snapshot.manifest.tensors.values() for piece in entry.pieces}
    return {name: entry for name, entry in files.items() if name in named}


def open_stage(target: Place) -> Stage:
    """Take the lock, clear up after dead writers, and make the stage."""
    is_first = not target.parent.exists()
    target.parent.make()
    lock = target.parent.lock()
    try:
        if not target.per_host:  # else all hosts must first agree on what is left of a former save
            sweep(target.parent)
        return Stage(target.make_stage(), lock, target.new_mark(), is_first)
    except BaseException:
        lock.release()
        raise
