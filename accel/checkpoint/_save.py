# SPDX-License-Identifier: Apache-2.0
"""Saving: rank 0 opens a stage under the folder's lock, each rank writes its share, rank 0 commits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from accel.checkpoint._host_save import commit_on_hosts, receive_parts, settle_hosts, write_note
from accel.checkpoint._hosts import check_notes
from accel.checkpoint._manifest import Item, step_name
from accel.checkpoint._retention import Keep, retain
from accel.checkpoint._snapshot import Snapshot, join_items, take_snapshot
from accel.checkpoint._stage import Stage, WrittenFile, commit_stage, open_stage, write_share
from accel.checkpoint._statements import Content, Statement, make_offer
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
from accel.storage import Place, RemotePath


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
