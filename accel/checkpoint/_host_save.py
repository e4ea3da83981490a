# SPDX-License-Identifier: Apache-2.0
"""Agreements of a save where each host has a folder of its own: what is cleared up, what is sent, and the commit."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import torch

from accel.checkpoint._directory import committed
from accel.checkpoint._hosts import HostNote, note_of, on_all_hosts, settle
from accel.checkpoint._manifest import step_name
from accel.checkpoint._retention import sweep
from accel.checkpoint._snapshot import Snapshot
from accel.checkpoint._stage import Stage, WrittenFile, finish_commit, put_in_place
from accel.checkpoint._statements import Content, main_facts
from accel.comm import Call, agreed, barrier, gather_bytes
from accel.context import DistContext
from accel.storage import Place


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
