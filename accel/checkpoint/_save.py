# SPDX-License-Identifier: Apache-2.0
"""Saving: rank 0 opens a stage under the folder's lock, each rank writes its share, rank 0 commits."""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from accel.checkpoint._hosts import HostNote, check_notes, note_of, on_all_hosts, settle
from accel.checkpoint._manifest import MANIFEST, Item, committed, encode_manifest, step_name
from accel.checkpoint._retention import Keep, discard, retain, sweep, sweep_objects, sweep_step
from accel.checkpoint._snapshot import Content, Snapshot, Statement, join_items, main_facts, make_offer, take_snapshot
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
            with suppress(CheckpointError):  # gone already, or a disk that fails: the first error is the one to raise
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
    if aside is not None and aside.path == target.path:  # in a store, the folder holds what was there before
        sweep_step(target)
    elif aside is not None:
        discard(aside)
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
    is_first = target.parent.make()
    lock = target.parent.lock()
    try:
        if not target.per_host:  # else all hosts must first agree on what is left of a former save
            sweep(target.parent)
        return Stage(target.make_stage(), lock, target.new_mark(), is_first)
    except BaseException:
        lock.release()
        raise


def write_note(ctx: DistContext, target: Place, content: Content, *, leads: bool) -> HostNote:
    """Describe this host's folder before a save, and begin the number of the save on rank 0. No communication.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    note = note_of(target.parent, ctx.node_rank)
    save = secrets.token_hex(32) if ctx.is_main_process else ""
    return msgspec.structs.replace(note, leads=leads, save=save, main=main_facts(content))


def settle_hosts(
    ctx: DistContext, call: Call, stage: Stage | None, target: Place, notes: Sequence[HostNote]
) -> Stage | None:
    """Clear up on every host what a former save has committed on some hosts only. A collective.

    Args:
        ctx: the context.
        call: the expected call of all ranks.
        stage: the new stage, on ranks that commit; None elsewhere.
        target: the checkpoint's folder.
        notes: the notes of all ranks.

    Returns:
        The stage, with the names of the checkpoints that all hosts have.

    Raises:
        CheckpointError: a disk failed; the same on every rank.
    """
    common = on_all_hosts(notes)
    with agreed(ctx.comm, call):
        if stage is not None:
            settle(target.parent, notes[ctx.rank].commits, common)
            sweep(target.parent, stage.place.name)
            names = {step_name(step) for step, _ in committed(target.parent)}
            saves = {name.partition(".")[0]: save for name, save in notes[ctx.rank].commits if save in common}
            return replace(stage, common=frozenset(names & saves.keys()))
    return stage


def receive_parts(ctx: DistContext, snapshot: Snapshot) -> Snapshot:
    """Send what only one host has to those that need it. A collective."""
    order = sorted(snapshot.sent, key=lambda part: (snapshot.sent[part], part))
    dtypes = {part: getattr(torch, snapshot.manifest.tensors[part[0]].dtype) for part in order}
    nbytes = {part: part[1].size * dtypes[part].itemsize for part in order}
    sizes = [0] * ctx.world_size
    for part in order:
        sizes[snapshot.sent[part]] += nbytes[part]
    own = [_flat_bytes(snapshot.outgoing[part]) for part in order if part in snapshot.outgoing]
    received = gather_bytes(ctx.comm, torch.cat(own) if own else torch.empty(0, dtype=torch.uint8), sizes)
    assert received is not None
    tensors = dict(snapshot.tensors)
    for part, data in zip(order, torch.split(received, list(nbytes.values())), strict=True):
        if part in snapshot.missing:
            tensors[part[0]] = data.clone().view(dtypes[part]).view(part[1].shape)
    return replace(snapshot, tensors=tensors)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8)


def commit_on_hosts(
    ctx: DistContext, call: Call, stage: Stage, target: Place, snapshot: Snapshot, shares: Sequence[WrittenFile]
) -> None:
    """Commit on every host, or on none. A collective.

    A host that dies between the commits leaves some hosts with the new checkpoint and others without: then the newest
    that all hosts have is loaded. So nothing of former checkpoints goes before all hosts have committed, and know it.
    """
    aside, is_committed = None, False
    try:
        with agreed(ctx.comm, call):
            if stage.lock is not None:
                aside = put_in_place(stage, target, snapshot, shares)
                is_committed = True
    except BaseException:
        if is_committed:
            target.take_back(aside)
        raise
    barrier(ctx.comm, Call("save_state: committed", site=call.site))
    if stage.lock is not None:
        finish_commit(target, aside, snapshot, shares)


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
    where = f" in a folder {out.name!r} of each host" if target.per_host else ""
    detail = f"step {step}{where}\nkeep {keep}\nmode sync"
    stage, snapshot = begin(ctx, target, content, step=step, metrics=metrics, call=Call("save_state", detail, site))
    try:
        call = Call("save_state: writing", site=site)
        dst = None if target.per_host else 0
        shares = agreed_values(ctx.comm, call, lambda: write_share(stage.place, snapshot), WrittenFile, dst=dst)
        call = Call("save_state: committing", site=site)
        if target.per_host:
            commit_on_hosts(ctx, call, stage, target, snapshot, shares)
        else:
            with agreed(ctx.comm, call):
                if ctx.is_main_process:
                    commit_stage(stage, target, snapshot, shares)
        if stage.lock is not None and keep is not None:
            retain(target, keep, stage.common)
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
    """Agree on the file of each rank, in a stage that rank 0, or one rank of each host, opens under the lock.

    A collective.

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
    leads = ctx.is_local_main_process if target.per_host else ctx.is_main_process
    try:
        with shared_failure(ctx.comm, call):
            offer = make_offer(content, ctx.world_size)
            if leads:
                stage = open_stage(target)
            mine = offer.statement
            if stage is not None:
                mine = msgspec.structs.replace(mine, stage=stage.place.name, mark=stage.mark)
            if target.per_host:
                mine = msgspec.structs.replace(mine, host=write_note(ctx, target, content, leads=leads))
        ranks = exchange_values(ctx.comm, call, mine, Statement)
        items = join_items(content, ranks)
        if len({each.facts for each in ranks}) > 1:  # this message shows the difference
            barrier(ctx.comm, Call(call.name, offer.facts, call.site))
        leader = ranks[0]
        if notes := [each.host for each in ranks if each.host is not msgspec.UNSET]:
            check_notes(notes)
            leader = ranks[[note.node if note.leads else None for note in notes].index(ctx.node_rank)]
            items, metrics = broadcast_value(ctx.comm, call, (items, metrics), tuple[dict[str, Item], dict[str, float]])
            stage = settle_hosts(ctx, call, stage, target, notes)
        rows = _rows(ctx, content.row, [each.row_bytes for each in ranks])
        snapshot = take_snapshot(offer, items, ranks, rows, ctx.rank, step=step, metrics=metrics)
        if snapshot.sent:
            snapshot = receive_parts(ctx, snapshot)
    except BaseException:
        if stage is not None:
            stage.abandon()
        raise
    return stage or Stage(target.parent / leader.stage, None, leader.mark), snapshot


def _rows(ctx: DistContext, row: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Gather the rows of all ranks on rank 0, which writes them. A collective; returns none on other ranks."""
    if ctx.world_size == 1:
        return [row]
    gathered = gather_bytes(ctx.comm, as_tensor(row), sizes, dst=0)
    return [as_bytes(each) for each in torch.split(gathered, list(sizes))] if gathered is not None else []
