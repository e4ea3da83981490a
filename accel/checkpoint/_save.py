# SPDX-License-Identifier: Apache-2.0
"""Saving: ranks agree on what they hold, each writes its share into one stage, rank 0 commits, all return or raise."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from accel.checkpoint._directory import committed, is_committed, is_exactly_ours, step_name, step_of
from accel.checkpoint._manifest import FORMAT, MANIFEST, RANKS, Item, Manifest, Piece, TensorEntry, encode_manifest
from accel.checkpoint._plan import Plan, checksum, plan_writes, tied
from accel.checkpoint._settle import settle
from accel.comm import Call, call_site
from accel.context import DistContext
from accel.errors import AccelError, CheckpointError
from accel.storage import (
    FileEntry,
    commit,
    dtype_name,
    leftovers,
    make_folder,
    make_stage,
    remove_flat,
    set_aside,
    write_file,
    write_tensors,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What one rank brings to a checkpoint.

    Attributes:
        shared: tensors that are equal on all ranks; any rank may write them.
        main: tensors of which rank 0's count.
        items: everything else by item; rank 0's count.
        row: bytes of this rank's own, kept for it.
    """

    shared: Mapping[str, torch.Tensor]
    main: Mapping[str, torch.Tensor]
    items: Mapping[str, Item]
    row: bytes


class _Rank(msgspec.Struct, frozen=True):
    """What every rank says before a save: its own bytes, and what its share of the state sums up to."""

    row: bytes
    checksum: int


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
    aliases = tied({**content.shared, **content.main})
    shared = {name: tensor for name, tensor in content.shared.items() if name not in aliases}
    main = {name: tensor for name, tensor in content.main.items() if name not in aliases}
    detail = "\n".join([f"step {step}", *_facts(shared), *sorted(f"{a} is {b}" for a, b in aliases.items())])
    ranks = settle(ctx, Call("save_state", detail, site), None, _Rank(content.row, checksum(shared)), _Rank)
    if len({rank.checksum for rank in ranks}) > 1:
        if ctx.is_main_process:
            _warn("ranks hold different parameters or optimizer states; %s holds rank 0's", target)
        main, shared = {**shared, **main}, {}
    main[RANKS] = _stack([rank.row for rank in ranks])
    plan = plan_writes({k: v.nbytes for k, v in shared.items()}, {k: v.nbytes for k, v in main.items()}, ctx.world_size)
    stage = _open_stage(ctx, target, site)
    try:
        shares = _write_shares(ctx, stage, plan, {**shared, **main}, site)
        manifest = Manifest(
            format=FORMAT,
            accel=importlib.metadata.version("accel"),
            torch=str(torch.__version__),
            step=step,
            world_size=ctx.world_size,
            files={share.name: share.entry for share in shares if share.entry is not None},
            tensors=_entries({**shared, **main}, plan),
            aliases=aliases,
            items=dict(content.items),
        )
        _commit(ctx, stage, target, manifest, site)
    except BaseException:
        if ctx.is_main_process:
            with suppress(CheckpointError):  # gone already, or a disk that fails: the first error is the one to tell
                remove_flat(stage)
        raise
    if ctx.is_main_process and keep is not None:
        _retain(target, keep)
    return target


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


def _write_shares(
    ctx: DistContext, stage: Path, plan: Plan, tensors: Mapping[str, torch.Tensor], site: str
) -> list[_Share]:
    """Write this rank's share; return what every rank wrote, once all have."""
    error, share = None, _Share(_file_name(ctx.rank, ctx.world_size), None)
    names = plan.ranks[ctx.rank]
    try:
        if names:
            entry = write_tensors(stage, share.name, {name: tensors[name] for name in names})
            share = _Share(share.name, entry)
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


def _entries(tensors: Mapping[str, torch.Tensor], plan: Plan) -> dict[str, TensorEntry]:
    files = {name: _file_name(rank, len(plan.ranks)) for rank, names in enumerate(plan.ranks) for name in names}
    return {
        name: TensorEntry(
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            pieces=(Piece(files[name], (0,) * tensor.dim(), tuple(tensor.shape)),),
        )
        for name, tensor in sorted(tensors.items())
    }


def _stack(rows: list[bytes]) -> torch.Tensor:
    """Put every rank's bytes into one tensor [world, longest + 4]: length in four bytes, bytes, zeros."""
    width = max(len(row) for row in rows)
    padded = b"".join(len(row).to_bytes(4, "little") + row.ljust(width, b"\0") for row in rows)
    return torch.frombuffer(bytearray(padded), dtype=torch.uint8).view(len(rows), width + 4)


def _facts(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    return [f"{name} {dtype_name(t.dtype)} {list(t.shape)}" for name, t in sorted(tensors.items())]


def _file_name(rank: int, world_size: int) -> str:
    return f"tensors-{rank:05d}-of-{world_size:05d}.safetensors"


def _warn(text: str, *values: object) -> None:
    logging.getLogger("accel.checkpoint").warning(text, *values)
