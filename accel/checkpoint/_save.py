# SPDX-License-Identifier: Apache-2.0
"""Saving: each rank writes its share into one stage, rank 0 commits, all return or raise."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import msgspec

from accel.checkpoint._directory import committed, is_committed, is_exactly_ours, step_name, step_of
from accel.checkpoint._manifest import MANIFEST, Manifest, encode_manifest
from accel.checkpoint._settle import settle
from accel.checkpoint._snapshot import Content, Snapshot, take_snapshot
from accel.comm import Call, call_site
from accel.context import DistContext
from accel.errors import AccelError, CheckpointError
from accel.storage import (
    FileEntry,
    commit,
    leftovers,
    make_folder,
    make_stage,
    remove_flat,
    set_aside,
    write_file,
    write_tensors,
)


class _Share(msgspec.Struct, frozen=True):
    """A file that a rank has written, None if it had nothing to write."""

    name: str
    entry: FileEntry | None


def save(ctx: DistContext, out: Path, content: Content, *, step: int, keep: int | None) -> Path:
    """Write a checkpoint and commit it. A collective.

    Args:
        ctx: the context.
        out: the folder of all checkpoints of a run; made if it is missing.
        content: what this rank holds.
        step: names the checkpoint, 0 or above.
        keep: how many of the newest committed checkpoints stay, 1 or above; None for all.

    Returns:
        The checkpoint's folder, on every rank, after the commit.

    Raises:
        CheckpointError: the disk failed, the same on every rank; nothing else has changed.
        CollectiveMismatch: ranks hold different tensors.
    """
    target, site = out / step_name(step), call_site()
    snapshot = take_snapshot(ctx, content, step=step, site=site)
    write(ctx, target, snapshot, site=site)
    if ctx.is_main_process and keep is not None:
        _retain(target, keep)
    return target


def write(ctx: DistContext, target: Path, snapshot: Snapshot, *, site: str) -> None:
    """Write what all ranks have agreed on, and commit it. A collective; no live tensor but the snapshot's is read.

    Args:
        ctx: the context.
        target: the checkpoint's folder.
        snapshot: this rank's.
        site: the call of the user's that this is part of.

    Raises:
        CheckpointError: the disk failed, the same on every rank; nothing else has changed.
    """
    stage = _open_stage(ctx, target, site)
    try:
        shares = _write_share(ctx, stage, snapshot, site)
        files = {share.name: share.entry for share in shares if share.entry is not None}
        _commit(ctx, stage, target, msgspec.structs.replace(snapshot.manifest, files=files), site)
    except BaseException:
        if ctx.is_main_process:
            with suppress(CheckpointError):  # gone already, or a disk that fails: the first error is the one to tell
                remove_flat(stage)
        raise


def _open_stage(ctx: DistContext, target: Path, site: str) -> Path:
    """Let rank 0 clear up after dead writers and make the stage; return its path on every rank."""
    error, name = None, ""
    if ctx.is_main_process:
        try:
            make_folder(target.parent)
            _sweep(target.parent)
            name = make_stage(target).name
        except CheckpointError as failure:
            error = failure
    names = settle(ctx, Call("save_state: opening the stage", site=site), error, name, str)
    return target.parent / names[0]


def _write_share(ctx: DistContext, stage: Path, snapshot: Snapshot, site: str) -> list[_Share]:
    """Write this rank's share; return what every rank wrote, once all have."""
    error, share = None, _Share(snapshot.file, None)
    try:
        if snapshot.tensors:
            share = _Share(snapshot.file, write_tensors(stage, snapshot.file, snapshot.tensors))
    except (CheckpointError, RuntimeError) as failure:  # RuntimeError: a device that fails while it is copied from
        error = failure
    return settle(ctx, Call("save_state: writing", site=site), error, share, _Share)


def _commit(ctx: DistContext, stage: Path, target: Path, manifest: Manifest, site: str) -> None:
    error = None
    if ctx.is_main_process:
        try:
            write_file(stage, MANIFEST, [encode_manifest(manifest)])
            aside = commit(stage, target)
        except CheckpointError as failure:
            error = failure
        else:
            if aside is not None:
                _discard(aside)
    settle(ctx, Call("save_state: committing", site=site), error, b"", bytes)


def _sweep(out: Path) -> None:
    """Clear up after writers of this host that are gone: half-written stages, and what they had moved aside."""
    for left in leftovers(out):
        step = step_of(left.target)
        if not left.dead or step is None:
            continue
        target = out / left.target
        try:
            if left.kind == "tmp":
                remove_flat(left.path)
            elif is_committed(target, step):
                _discard(left.path)
            elif is_committed(left.path, step) and not target.exists():
                left.path.rename(target)
        except (AccelError, OSError) as error:
            _warn("%s was left by a writer that is gone and could not be removed: %s", left.path, error)


def _retain(newest: Path, keep: int) -> None:
    """Delete all committed checkpoints but the one just written and the newest others, `keep` in all."""
    try:
        others = [path for _, path in committed(newest.parent) if path != newest]
    except CheckpointError as error:
        _warn("older checkpoints stay in %s: %s", newest.parent, error)
        return
    for path in others[keep - 1 :]:
        _discard(path)


def _discard(path: Path) -> None:
    """Delete a checkpoint; first it loses its name, so that no reader ever finds half of one."""
    if not is_exactly_ours(path):
        _warn("%s stays: it holds what accel did not write, or is %s", path, "no valid checkpoint")
        return
    try:
        remove_flat(set_aside(path))
    except CheckpointError as error:
        _warn("%s could not be deleted: %s", path, error)


def _warn(text: str, *values: object) -> None:
    logging.getLogger("accel.checkpoint").warning(text, *values)
