# SPDX-License-Identifier: Apache-2.0
"""Saving: rank 0 opens a stage under the folder's lock, each rank writes its share, rank 0 commits."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from accel.checkpoint._hosts import HOST_FOLDERS, Folders
from accel.checkpoint._manifest import MANIFEST, encode_manifest, step_name
from accel.checkpoint._retention import Keep, discard, retain, sweep, sweep_objects, sweep_step
from accel.checkpoint._snapshot import (
    Agreement,
    Content,
    MainFacts,
    Snapshot,
    Statement,
    divide_writes,
    join_items,
    make_offer,
    take_snapshot,
    with_main,
)
from accel.comm import (
    Call,
    agreed,
    agreed_values,
    as_bytes,
    as_tensor,
    barrier,
    broadcast_value,
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
    """A checkpoint under construction."""

    place: Place  # folder of the stage, the same on every rank; in a store, the checkpoint's own
    lock: Lock | None  # lock of the run's folder, on the rank that commits: rank 0, or one of each host; None elsewhere
    mark: str  # part of the names of all files of this save
    is_first: bool = False  # whether that rank made the run's folder for this stage
    # Names of the older checkpoints that count for `keep`, where others go; None for all.
    older: frozenset[str] | None = None

    def abandon(self) -> None:
        """Remove the stage and release the lock, on a rank that commits."""
        if self.lock is None:
            return
        try:
            with suppress(CheckpointError):  # gone already, or a disk that fails: the first error is the one to raise
                sweep_objects(self.place, self.mark)
                self.place.remove_stage()
        finally:
            self.lock.release()
        # a first save that fails leaves no empty folder
        if self.is_first:
            self.place.parent.unmake()

    def close(self) -> None:
        """Release the lock, on a rank that commits."""
        if self.lock is not None:
            self.lock.release()


def write_share(place: Place, snapshot: Snapshot) -> WrittenFile:
    """Write this rank's share. No communication."""
    if not snapshot.tensors:
        return WrittenFile(snapshot.file, None)
    # from live memory, without a copy: the caller may not step before this returns
    return WrittenFile(snapshot.file, place.write(snapshot.file, encode_tensors(snapshot.tensors)))


def commit_stage(stage: Stage, target: Place, snapshot: Snapshot, shares: Sequence[WrittenFile]) -> None:
    """Write the manifest of all ranks' files, commit, and log the commit. Rank 0's work; no communication."""
    finish_commit(target, snapshot, shares, put_in_place(stage, target, snapshot, shares))


def put_in_place(stage: Stage, target: Place, snapshot: Snapshot, shares: Sequence[WrittenFile]) -> Place | None:
    """Write the manifest, and give the stage its name; return the former holder of the name, moved aside. Where the
    disk fails, the former holder has its name back."""
    files = _files(snapshot, shares)
    manifest = encode_manifest(msgspec.structs.replace(snapshot.manifest, files=files))
    if stage.lock is not None:
        # another writer may have taken the lock as abandoned: then nothing is renamed
        stage.lock.check()
    own = {name: entry for name, entry in files.items() if name not in snapshot.manifest.elsewhere}
    return stage.place.commit(target.name, MANIFEST, manifest, own)


def finish_commit(target: Place, snapshot: Snapshot, shares: Sequence[WrittenFile], aside: Place | None) -> None:
    """Delete what a commit has replaced, and log it."""
    files = _files(snapshot, shares)
    if aside is not None and aside.path == target.path:  # in a store, the folder holds what was there before
        sweep_step(target)
    elif aside is not None:
        discard(aside)
    sys.audit("accel.checkpoint", str(target))  # for the launcher's last line
    logging.getLogger("accel.checkpoint").info("wrote %s, %d bytes", target, sum(each.size for each in files.values()))


def _files(snapshot: Snapshot, shares: Sequence[WrittenFile]) -> dict[str, FileEntry]:
    """Return the entries of the files that the manifest names."""
    named = {piece.file for entry in snapshot.manifest.tensors.values() for piece in entry.pieces}
    return {share.name: share.entry for share in shares if share.entry is not None and share.name in named}


def open_stage(target: Place, folders: Folders) -> Stage:
    """Take the lock, clear up after dead writers, and make the stage."""
    is_first = target.parent.make()
    # the lock first: only then are the writers of all leftovers gone
    lock = target.parent.lock()
    try:
        folders.clear(target.parent)
        return Stage(target.make_stage(), lock, target.new_mark(), is_first)
    except BaseException:
        lock.release()
        raise


def _commit(
    ctx: DistContext,
    call: Call,
    _target: Place,
    put: Callable[[], Place | None] | None,
    finish: Callable[[Place | None], None],
) -> None:
    with agreed(ctx.comm, call):
        if put is not None:
            finish(put())


ONE_FOLDER = Folders(
    shares_to=0,
    shown=lambda _: "",
    leads=lambda ctx: ctx.is_main_process,
    clear=sweep,
    note=lambda _ctx, _out, _content: b"",
    agree=lambda _ctx, _call, _out, _stage, _notes, stored: Agreement(0, stored, divide_writes),
    receive=lambda _, snapshot: snapshot,
    commit=_commit,
)


def save(
    ctx: DistContext,
    out: Place,
    content: Content,
    *,
    step: int,
    keep: Keep | None,
    metrics: Mapping[str, float],
    per_host: bool = False,
) -> Path | RemotePath:
    """Write a checkpoint and commit it; return its folder, on every rank. A collective, with the same error on all.
    `content` is this rank's share; `per_host`: each host has such a folder."""
    target = out / step_name(step)
    site = call_site()
    folders = HOST_FOLDERS if per_host else ONE_FOLDER
    call = Call("save_state", f"step {step}{folders.shown(out)}\nkeep {keep}\nmode sync", site)
    stage, snapshot = begin(ctx, target, content, folders, step=step, metrics=metrics, call=call)
    try:
        call = Call("save_state: writing", site=site)
        dst = folders.shares_to
        # every file is flushed before any rank knows that all are
        shares = agreed_values(ctx.comm, call, lambda: write_share(stage.place, snapshot), WrittenFile, dst=dst)
        put = partial(put_in_place, stage, target, snapshot, shares) if stage.lock is not None else None
        finish = partial(finish_commit, target, snapshot, shares)
        # a crash before this leaves a stage, one after it a whole checkpoint
        folders.commit(ctx, Call("save_state: committing", site=site), target, put, finish)
        if stage.lock is not None and keep is not None:
            # after the commit: a crash leaves one checkpoint too many, never one too few
            retain(target, keep, stage.older)
    except BaseException:
        stage.abandon()
        raise
    stage.close()
    return target.path


def begin(
    ctx: DistContext,
    target: Place,
    content: Content,
    folders: Folders,
    *,
    step: int,
    metrics: Mapping[str, float],
    call: Call,
) -> tuple[Stage, Snapshot]:
    """Agree on the file of each rank, in a stage that a rank that leads opens under the lock. A collective."""
    stage = None
    try:
        with shared_failure(ctx.comm, call):
            offer = make_offer(content, ctx.world_size)
            # inside the agreement, so that a held lock is an error on every rank
            if folders.leads(ctx):
                stage = open_stage(target, folders)
            mine = msgspec.structs.replace(offer.statement, note=folders.note(ctx, target.parent, content))
            if stage is not None:
                mine = msgspec.structs.replace(mine, stage=stage.place.name, mark=stage.mark)
        ranks = exchange_values(ctx.comm, call, mine, Statement)
        items = join_items(content, ranks)
        if len({each.facts for each in ranks}) > 1:  # this message shows the difference
            barrier(ctx.comm, Call(call.name, offer.facts, call.site))
        if len({each.main for each in ranks}) > 1:  # such as a stream's position with tensors, which rank 0 reads
            main = broadcast_value(ctx.comm, call, offer.main, MainFacts)
            offer = with_main(offer, main) if ctx.rank else offer
        name = stage.place.name if stage is not None else None
        agreement = folders.agree(ctx, call, target.parent, name, [each.note for each in ranks], (items, metrics))
        # their sizes are known to all ranks only now
        rows = _rows(ctx, content.row, [each.row_bytes for each in ranks])
        snapshot = folders.receive(ctx, take_snapshot(offer, ranks, rows, ctx.rank, agreement, step=step))
    except BaseException:
        if stage is not None:
            stage.abandon()
        raise
    if stage is not None:
        return replace(stage, older=agreement.older), snapshot
    leader = ranks[agreement.leader]
    return Stage(target.parent / leader.stage, None, leader.mark), snapshot


def _rows(ctx: DistContext, row: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Gather the rows of all ranks on rank 0, which writes them. A collective; returns none on other ranks."""
    if ctx.world_size == 1:
        return [row]
    gathered = gather_bytes(ctx.comm, as_tensor(row), sizes, dst=0)
    return [as_bytes(each) for each in torch.split(gathered, list(sizes))] if gathered is not None else []
