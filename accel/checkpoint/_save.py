# SPDX-License-Identifier: Apache-2.0
"""Saving: each rank writes its share into one stage, rank 0 commits, all return or raise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from accel.checkpoint._cleanup import retain
from accel.checkpoint._commit import Share, Stage, commit_stage, open_stage, write_share
from accel.checkpoint._directory import step_name
from accel.checkpoint._keep import Keep
from accel.checkpoint._settle import settle
from accel.checkpoint._snapshot import Content, Snapshot, take_snapshot
from accel.comm import Call, call_site
from accel.context import DistContext
from accel.errors import CheckpointError
from accel.storage import Place, RemotePath


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
