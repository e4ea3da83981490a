# SPDX-License-Identifier: Apache-2.0
"""Saving: rank 0 opens a stage under the folder's lock, each rank writes its share, rank 0 commits."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from accel.checkpoint._manifest import MANIFEST, encode_manifest, step_name
from accel.checkpoint._retention import Keep, discard, retain, sweep, sweep_objects, sweep_step
from accel.checkpoint._snapshot import Snapshot, join_items, take_snapshot
from accel.checkpoint._statements import Content, Statement, make_offer
from accel.comm import (
    Call,
    agreed,
    agreed_values,
    as_bytes,
    as_tensor,
    barrier,
    call_site,
    exchange_values,
    gather_bytes,
    shared_failure,
)
from accel.context import DistContext
from accel.errors import CheckpointError
from accel.storage import FileEntry, Lock, Place, RemotePath, encode_tensors


class WrittenFile(msgspec.Struct, frozen=True):
    """Name and entry of a rank's file; the entry is None if the rank wrote nothing."""

    name: str
    entry: FileEntry | None


@dataclass(frozen=True, slots=True)
class Stage:
    """A checkpoint under construction.

    Attributes:
        place: folder of the stage, the same on every rank; in a store, the checkpoint's own.
        lock: lock of the run's folder, on rank 0; None elsewhere.
        mark: part of the names of all files of this save.
        is_first: whether rank 0 made the run's folder for this stage.
    """

    place: Place
    lock: Lock | None
    mark: str
    is_first: bool = False

    def abandon(self) -> None:
        """Remove the stage and release the lock, on rank 0."""
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
        """Release the lock, on rank 0."""
        if self.lock is not None:
            self.lock.release()


def save(
    ctx: DistContext, out: Place, content: Content, *, step: int, keep: Keep | None, metrics: Mapping[str, float]
) -> Path | RemotePath:
    """Write a checkpoint and commit it. A collective.

    Args:
        ctx: the context.
        out: the folder or URL of all checkpoints of a run; made if it is missing.
        content: this rank's share of the state.
        step: step of the checkpoint, 0 or above.
        keep: rule for the committed checkpoints to keep; None for all.
        metrics: metrics to store; rank 0's are used.

    Returns:
        The checkpoint's folder, on every rank, after the commit.

    Raises:
        CheckpointError: another writer is saving, or the disk failed; the same on every rank, nothing else has changed.
        CollectiveMismatch: ranks hold different tensors.
    """
    target = out / step_name(step)
    site = call_site()
    detail = f"step {step}\nkeep {keep}\nmode sync"
    stage, snapshot = begin(ctx, target, content, step=step, metrics=metrics, call=Call("save_state", detail, site))
    try:
        call = Call("save_state: writing", site=site)
        shares = agreed_values(ctx.comm, call, lambda: write_share(stage.place, snapshot), WrittenFile, dst=0)
        with agreed(ctx.comm, Call("save_state: committing", site=site)):
            if ctx.is_main_process:
                commit_stage(stage, target, snapshot, shares)
        if ctx.is_main_process and keep is not None:
            retain(target, keep)
    except BaseException:
        stage.abandon()
        raise
    stage.close()
    return target.path


def begin(
    ctx: DistContext,
    target: Place,
    content: Content,
    *,
    step: int,
    metrics: Mapping[str, float],
    call: Call,
) -> tuple[Stage, Snapshot]:
    """Agree on the file of each rank, in a stage that rank 0 opens under the lock. A collective.

    Args:
        ctx, content, step, metrics: as in `save`.
        target: the checkpoint's folder.
        call: the expected call of all ranks.

    Raises:
        CheckpointError: another writer is saving, the disk failed, or the parts of a sharded tensor are not the whole;
            the same on every rank.
        CollectiveMismatch: ranks hold different tensors.
    """
    stage = None
    try:
        with shared_failure(ctx.comm, call):
            offer = make_offer(content, ctx.world_size)
            if ctx.is_main_process:
                stage = _open_stage(target)
        mine = offer.statement
        if stage is not None:
            mine = msgspec.structs.replace(mine, stage=stage.place.name, mark=stage.mark)
        ranks = exchange_values(ctx.comm, call, mine, Statement)
        items = join_items(content, ranks)
        if len({each.facts for each in ranks}) > 1:  # this message shows the difference
            barrier(ctx.comm, Call(call.name, offer.facts, call.site))
        rows = _rows(ctx, content.row, [each.row_bytes for each in ranks])
        snapshot = take_snapshot(offer, items, ranks, rows, ctx.rank, step=step, metrics=metrics)
    except BaseException:
        if stage is not None:
            stage.abandon()
        raise
    return stage or Stage(target.parent / ranks[0].stage, None, ranks[0].mark), snapshot


def _rows(ctx: DistContext, row: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Gather the rows of all ranks on rank 0, which writes them. A collective; returns none on other ranks."""
    if ctx.world_size == 1:
        return [row]
    gathered = gather_bytes(ctx.comm, as_tensor(row), sizes, dst=0)
    return [as_bytes(each) for each in torch.split(gathered, list(sizes))] if gathered is not None else []


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
    files = {share.name: share.entry for share in shares if share.entry is not None}
    manifest = encode_manifest(msgspec.structs.replace(snapshot.manifest, files=files))
    if stage.lock is not None:
        stage.lock.check()
    if (aside := stage.place.commit(target.name, MANIFEST, manifest, files)) is not None:
        discard(aside)
    sweep_step(target)
    sys.audit("accel.checkpoint", str(target))  # for the launcher's last line
    logging.getLogger("accel.checkpoint").info("wrote %s, %d bytes", target, sum(each.size for each in files.values()))


def _open_stage(target: Place) -> Stage:
    """Take the lock, clear up after dead writers, and make the stage."""
    is_first = not target.parent.exists()
    target.parent.make()
    lock = target.parent.lock()
    try:
        sweep(target.parent)
        return Stage(target.make_stage(), lock, target.new_mark(), is_first)
    except BaseException:
        lock.release()
        raise
