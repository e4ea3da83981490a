# SPDX-License-Identifier: Apache-2.0
"""What ranks bring to a checkpoint, agreed on by all of them before anything is written."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch

from accel.checkpoint._manifest import FORMAT, RANKS, Item, Manifest, Piece, TensorEntry
from accel.checkpoint._plan import Plan, checksum, plan_writes, tied
from accel.checkpoint._settle import settle
from accel.comm import Call
from accel.context import DistContext
from accel.storage import dtype_name


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """What this rank writes of a checkpoint on which all ranks have agreed.

    Attributes:
        file: the name of this rank's file.
        tensors: its contents by name, empty if this rank writes none; the live tensors, nothing is copied.
        manifest: the whole checkpoint's, without the files, which have yet to be written.
    """

    file: str
    tensors: Mapping[str, torch.Tensor]
    manifest: Manifest


class _Rank(msgspec.Struct, frozen=True):
    """What every rank says before a save: its own bytes, and what its share of the state sums up to."""

    row: bytes
    checksum: int


def take_snapshot(
    ctx: DistContext, content: Content, *, step: int, metrics: Mapping[str, float], site: str
) -> Snapshot:
    """Compare what the ranks hold, and divide the writing among them. A collective; nothing is written.

    Args:
        ctx: the context.
        content: what this rank holds.
        step: names the checkpoint.
        metrics: what it is rated by; rank 0's count.
        site: the call of the user's that this is part of.

    Raises:
        CollectiveMismatch: ranks hold different tensors.
    """
    aliases = tied({**content.shared, **content.main})
    shared = {name: tensor for name, tensor in content.shared.items() if name not in aliases}
    main = {name: tensor for name, tensor in content.main.items() if name not in aliases}
    detail = "\n".join([f"step {step}", *_facts(shared), *sorted(f"{a} is {b}" for a, b in aliases.items())])
    ranks = settle(ctx, Call("save_state", detail, site), None, _Rank(content.row, checksum(shared)), _Rank)
    if len({rank.checksum for rank in ranks}) > 1:
        if ctx.is_main_process:
            text = "ranks hold different parameters or optimizer states; the checkpoint of step %s holds rank 0's"
            logging.getLogger("accel.checkpoint").warning(text, step)
        main, shared = {**shared, **main}, {}
    main[RANKS] = _stack([rank.row for rank in ranks])
    plan = plan_writes({k: v.nbytes for k, v in shared.items()}, {k: v.nbytes for k, v in main.items()}, ctx.world_size)
    tensors = {**shared, **main}
    return Snapshot(
        file=_file_name(ctx.rank, ctx.world_size),
        tensors={name: tensors[name] for name in plan.ranks[ctx.rank]},
        manifest=Manifest(
            format=FORMAT,
            accel=importlib.metadata.version("accel"),
            torch=str(torch.__version__),
            step=step,
            world_size=ctx.world_size,
            files={},
            tensors=_entries(tensors, plan),
            aliases=aliases,
            items=dict(content.items),
            metrics=dict(metrics),
        ),
    )


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
