# SPDX-License-Identifier: Apache-2.0
"""Saving: rank 0 opens a stage under the folder's lock, each rank writes its share, rank 0 commits."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from accel.checkpoint._manifest import MANIFEST, encode_manifest, step_name
from accel.checkpoint._retention import Keep, discard, retain, sweep, sweep_objects, sweep_step
from accel.checkpoint._settle import settle
from accel.checkpoint._snapshot import Content, Snapshot, take_snapshot
from accel.comm import Call, call_site
from accel.context import DistContext
from accel.errors import CheckpointError
from accel.storage import FileEntry, Lock, Place, RemotePath, encode_tensors


class Share(msgspec.Struct, frozen=True):
    """A file that a rank has written, None if it had nothing to write."""

    name: str
    entry: FileEntry | None


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a checkpoint is being written.

    Attributes:
        path: the folder, the same on every rank; in a store, the checkpoint's own.
        lock: on the folder of all checkpoints; rank 0's to release.
        mark: in the names of the files that are written.
    """

    path: Place
    lock: Lock | None
    mark: str

    def abandon(self) -> None:
        """Remove what was written and let the next writer in, if this is rank 0."""
        if self.lock is None:
            return
        try:
            with suppress(CheckpointError):  # gone already, or a disk that fails: the first error is the one to tell
                sweep_objects(self.path, self.mark)
                self.path.remove_stage()
        finally:
            self.lock.release()

    def close(self) -> None:
        """Let the next writer in, if this is rank 0."""
        if self.lock is not None:
            self.lock.release()


def save(
    ctx: DistContext, out: Place, content: Content, *, step: int, keep: Keep | None, metrics: Mapping[str, float]
) -> Path | RemotePath:
    """Write a checkpoint and commit it. A collective.

    Args:
        ctx: the context.
        out: the folder or URL of all checkpoints of a run; made if it is missing.
        content: what this rank holds.
        step: names the checkpoint, 0 or above.
        keep: which committed checkpoints stay; None for all.
        metrics: stored with it; rank 0's count.

    Returns:
        The checkpoint's folder, on every rank, after the commit.

    Raises:
        CheckpointError: another writer is saving, or the disk failed; the same on every rank, nothing else has changed.
        CollectiveMismatch: ranks hold different tensors.
    """
    target, site = out / step_name(step), call_site()
    snapshot = take_snapshot(ctx, content, step=step, metrics=metrics, site=site, mark=target.new_mark())
    stage = open_stage(ctx, target, snapshot.mark, site)
    try:
        shares = _write(ctx, stage, snapshot, site)
        _commit(ctx, stage, target, snapshot, shares, site)
        if ctx.is_main_process and keep is not None:
            retain(target, keep)
    except BaseException:
        stage.abandon()
        raise
    stage.close()
    return target.path


def open_stage(ctx: DistContext, target: Place, mark: str, site: str, error: Exception | None = None) -> Stage:
    """Let rank 0 take the lock, clear up after dead writers and make the stage. A collective.

    Args:
        ctx: the context.
        target: the checkpoint's folder.
        mark: in the names of the files that will be written.
        site: the call of the user's that this is part of.
        error: this rank's failure so far; None without one.

    Raises:
        CheckpointError: another writer is saving, or the disk failed; on every rank.
    """
    stage = None
    if ctx.is_main_process and error is None:
        try:
            stage = _make(target, mark)
        except CheckpointError as failure:
            error = failure
    call = Call("save_state: opening the stage", site=site)
    try:
        names = settle(ctx, call, error, stage.path.name if stage is not None else "", str)
    except BaseException:
        if stage is not None:
            stage.abandon()
        raise
    return stage or Stage(target.parent / names[0], None, mark)


def write_share(stage: Place, snapshot: Snapshot) -> Share:
    """Write this rank's share. No communication.

    Raises:
        CheckpointError: the disk failed.
        RuntimeError: a device failed while it was copied from.
    """
    if not snapshot.tensors:
        return Share(snapshot.file, None)
    return Share(snapshot.file, stage.write(snapshot.file, encode_tensors(snapshot.tensors)))


def commit_stage(stage: Stage, target: Place, snapshot: Snapshot, shares: Sequence[Share]) -> None:
    """Write the manifest of all ranks' files, commit, and log the commit. Rank 0's work; no communication.

    Raises:
        CheckpointError: the disk failed; whatever had the target's name has it back.
    """
    files = {share.name: share.entry for share in shares if share.entry is not None}
    manifest = encode_manifest(msgspec.structs.replace(snapshot.manifest, files=files))
    if stage.lock is not None:
        stage.lock.check()
    if (aside := stage.path.commit(target.name, MANIFEST, manifest, files)) is not None:
        discard(aside)
    sweep_step(target)
    logging.getLogger("accel.checkpoint").info("wrote %s, %d bytes", target, sum(each.size for each in files.values()))


def _write(ctx: DistContext, stage: Stage, snapshot: Snapshot, site: str) -> list[Share]:
    """Write this rank's share; return what every rank wrote, once all have."""
    error, share = None, Share(snapshot.file, None)
    try:
        share = write_share(stage.path, snapshot)
    except (CheckpointError, RuntimeError) as failure:
        error = failure
    return settle(ctx, Call("save_state: writing", site=site), error, share, Share)


def _commit(ctx: DistContext, stage: Stage, target: Place, snapshot: Snapshot, shares: list[Share], site: str) -> None:
    error = None
    if ctx.is_main_process:
        try:
            commit_stage(stage, target, snapshot, shares)
        except CheckpointError as failure:
            error = failure
    settle(ctx, Call("save_state: committing", site=site), error, b"", bytes)


def _make(target: Place, mark: str) -> Stage:
    target.parent.make()
    lock = target.parent.lock()
    try:
        sweep(target.parent)
        return Stage(target.make_stage(), lock, mark)
    except BaseException:
        lock.release()
        raise
