# SPDX-License-Identifier: Apache-2.0
"""What ranks bring to a checkpoint, agreed on by all of them before anything is written."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import msgspec
import torch

from accel import __version__
from accel.checkpoint._held import checksum, checksums, held_box, is_sharded, local_part, tied
from accel.checkpoint._manifest import FORMAT, RANKS, Item, Manifest, Piece, TensorEntry
from accel.checkpoint._plan import Box, plan_writes, tiling_problem, whole
from accel.checkpoint._settle import settle
from accel.comm import Call
from accel.context import DistContext
from accel.errors import CheckpointError
from accel.storage import dtype_name

Part = tuple[str, Box]  # a tensor's name, and which of its elements


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What one rank brings to a checkpoint.

    Attributes:
        shared: tensors that are equal on all ranks; any rank may write them.
        main: tensors of which rank 0's count.
        own: tensors that this rank holds and others need not; copies are equal.
        loose: such tensors of which copies may differ; the lowest rank's counts.
        items: everything else by item; rank 0's count.
        row: bytes of this rank's own, kept for it.
    """

    shared: Mapping[str, torch.Tensor]
    main: Mapping[str, torch.Tensor]
    own: Mapping[str, torch.Tensor]
    loose: Mapping[str, torch.Tensor]
    items: Mapping[str, Item]
    row: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """What this rank writes of a checkpoint on which all ranks have agreed.

    Attributes:
        file: the name of this rank's file.
        mark: in the names of all files of this save.
        tensors: its contents by name, empty if this rank writes none; the live tensors, nothing is copied.
        manifest: the whole checkpoint's, without the files, which have yet to be written.
    """

    file: str
    mark: str
    tensors: Mapping[str, torch.Tensor]
    manifest: Manifest


class _Held(msgspec.Struct, frozen=True, array_like=True):
    """A rank's part of a sharded tensor, and what it sums up to."""

    box: Box
    checksum: int


class _Own(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that a rank has and others need not, its part of it, if any, and whether copies must be equal."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    held: _Held | None
    exact: bool


class _Rank(msgspec.Struct, frozen=True):
    """What every rank says before a save.

    Attributes:
        row: its own bytes.
        checksum: what the tensors that are equal on all ranks sum up to.
        held: its parts of the sharded tensors, in order of their names; None where it has none.
        own: what it has and others need not.
        mark: for the names of files; rank 0's counts.
    """

    row: bytes
    checksum: int
    held: list[_Held | None]
    own: list[_Own]
    mark: str


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which parts there are, in bytes, and who holds those that not every rank holds."""

    sizes: dict[Part, int]
    holders: dict[Part, list[int]]


def take_snapshot(
    ctx: DistContext, content: Content, *, step: int, metrics: Mapping[str, float], site: str, mark: str = ""
) -> Snapshot:
    """Compare what the ranks hold, and divide the writing among them. A collective; nothing is written.

    Args:
        ctx: the context.
        content: what this rank holds.
        step: names the checkpoint.
        metrics: what it is rated by; rank 0's count.
        site: the call of the user's that this is part of.
        mark: to put into the names of files; rank 0's counts.

    Raises:
        CheckpointError: the parts of a sharded tensor that ranks hold are not the whole; the same on every rank.
        CollectiveMismatch: ranks hold different tensors.
    """
    everything = {**content.shared, **content.main}
    aliases = tied(everything)
    tensors = {name: tensor for name, tensor in everything.items() if name not in aliases}
    sharded = {name: tensor for name, tensor in sorted(tensors.items()) if is_sharded(tensor)}
    shared = {name: tensors[name] for name in content.shared if name in tensors and name not in sharded}
    facts = _facts(shared | sharded)
    detail = "\n".join([f"step {step}", *facts, *sorted(f"{a} is {b}" for a, b in aliases.items())])
    bits = checksum(shared) if ctx.world_size > 1 else 0
    mine = _Rank(content.row, bits, list(_held(sharded).values()), _own(content), mark)
    ranks = settle(ctx, Call("save_state", detail, site), None, mine, _Rank)
    tensors |= {**_stubs(ranks), **content.own, **content.loose, RANKS: _stack([rank.row for rank in ranks])}
    held = _held_by_name(list(sharded), ranks)
    differing = [name for name, parts in held.items() if not _copies_agree(parts)]
    if len({rank.checksum for rank in ranks}) > 1:
        differing += sorted(shared)
    if differing and ctx.is_main_process:
        text = "ranks hold different parameters or optimizer states (%s%s); step %s gets the lowest rank's"
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        logging.getLogger("accel.checkpoint").warning(text, differing[0], more, step)
    layout = _layout(tensors, held, shared.keys() - set(differing))
    plan = plan_writes(layout.sizes, layout.holders, ctx.world_size)
    mark = ranks[0].mark
    return Snapshot(
        file=_file_name(ctx.rank, ctx.world_size, mark),
        mark=mark,
        tensors={name: _part(tensors[name], box) for name, box in plan[ctx.rank]},
        manifest=Manifest(
            format=FORMAT,
            accel=__version__,
            torch=str(torch.__version__),
            step=step,
            world_size=ctx.world_size,
            files={},
            tensors=_entries(tensors, plan, mark),
            aliases=aliases,
            items=dict(content.items),
            metrics=dict(metrics),
        ),
    )


def _held(tensors: Mapping[str, torch.Tensor]) -> dict[str, _Held | None]:
    sums = checksums({name: local_part(tensor) for name, tensor in tensors.items()})
    boxes = {name: held_box(tensor, name) for name, tensor in tensors.items()}
    return {name: _Held(box, sums[name]) if box is not None else None for name, box in boxes.items()}


def _own(content: Content) -> list[_Own]:
    tensors = {**content.own, **content.loose}
    held = _held(tensors)
    return [
        _Own(name, dtype_name(tensor.dtype), tuple(tensor.shape), held[name], name in content.own)
        for name, tensor in sorted(tensors.items())
    ]


def _stubs(ranks: Sequence[_Rank]) -> dict[str, torch.Tensor]:
    """Tensors without contents for those that only some ranks have.

    Raises:
        CheckpointError: two ranks have another one by the same name.
    """
    found: dict[str, _Own] = {}
    parts: dict[tuple[str, Box], int] = {}
    for rank, own in ((rank, own) for rank, said in enumerate(ranks) for own in said.own):
        known, same = found.setdefault(own.name, own), True
        if own.held is not None and own.exact:
            same = parts.setdefault((own.name, own.held.box), own.held.checksum) == own.held.checksum
        if not same or (known.dtype, known.shape) != (own.dtype, own.shape):
            expected, got = (f"{each.dtype} {list(each.shape)}" for each in (known, own))
            raise CheckpointError(
                f"rank {rank} holds another tensor by this name than a rank below it",
                expected=expected,
                got=got if got != expected else "other values",
                where=own.name,
                fix="Give what only some ranks hold the names that it has in the whole, each to one tensor.",
            )
    return {name: torch.empty(o.shape, dtype=getattr(torch, o.dtype), device="meta") for name, o in found.items()}


def _held_by_name(sharded: Sequence[str], ranks: Sequence[_Rank]) -> dict[str, list[_Held | None]]:
    """What each rank holds of every tensor that not all ranks hold alike."""
    own, first = list[dict[str, _Held | None]](), set[tuple[str, Box | None]]()
    for rank in ranks:
        places = {each.name: (each.name, each.held.box if each.held is not None else None) for each in rank.own}
        own.append({each.name: each.held for each in rank.own if each.exact or places[each.name] not in first})
        first |= set(places.values())
    found = {name: [rank.held[at] for rank in ranks] for at, name in enumerate(sharded)}
    return found | {name: [held.get(name) for held in own] for name in sorted({name for held in own for name in held})}


def _copies_agree(parts: Sequence[_Held | None]) -> bool:
    """Whether ranks that hold the same part of a tensor hold the same bits."""
    held = {part for part in parts if part is not None}
    return len(held) == len({part.box for part in held})


def _layout(
    tensors: Mapping[str, torch.Tensor], held: Mapping[str, Sequence[_Held | None]], shared: Set[str]
) -> _Layout:
    """List the parts of all tensors: of those that ranks hold parts of, one for each that any rank may write."""
    layout = _Layout({}, {})
    for name in tensors.keys() - held.keys():
        part = name, whole(tensors[name].shape)
        layout.sizes[part] = tensors[name].nbytes
        if name not in shared:
            layout.holders[part] = [0]
    for name, parts in held.items():
        first: dict[Box, int] = {}
        for rank, mine in enumerate(parts):
            if mine is None:
                continue
            part = name, mine.box
            layout.sizes[part] = mine.box.size * tensors[name].element_size()
            if first.setdefault(mine.box, mine.checksum) == mine.checksum:
                layout.holders.setdefault(part, []).append(rank)
        if problem := tiling_problem(tensors[name].shape, list(first)):
            raise CheckpointError(
                f"a sharded tensor {problem}",
                where=name,
                fix="Shard it over a mesh of ranks of this context only, each of which calls save_state.",
            )
    return layout


def _part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """This rank's part of a tensor; of one without elements all of it."""
    return local_part(tensor) if box.size else local_part(tensor).new_empty(tuple(tensor.shape))


def _entries(tensors: Mapping[str, torch.Tensor], plan: Sequence[Sequence[Part]], mark: str) -> dict[str, TensorEntry]:
    pieces: dict[str, list[Piece]] = {name: [] for name in sorted(tensors)}
    for rank, parts in enumerate(plan):
        for name, box in parts:
            pieces[name].append(Piece(_file_name(rank, len(plan), mark), box.offset, box.shape))
    return {
        name: TensorEntry(dtype_name(tensors[name].dtype), tuple(tensors[name].shape), tuple(found))
        for name, found in pieces.items()
    }


def _stack(rows: list[bytes]) -> torch.Tensor:
    """Put every rank's bytes into one tensor [world, longest + 4]: length in four bytes, bytes, zeros."""
    width = max(len(row) for row in rows)
    padded = b"".join(len(row).to_bytes(4, "little") + row.ljust(width, b"\0") for row in rows)
    return torch.frombuffer(bytearray(padded), dtype=torch.uint8).view(len(rows), width + 4)


def _facts(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    return [f"{name} {dtype_name(t.dtype)} {list(t.shape)}" for name, t in sorted(tensors.items())]


def _file_name(rank: int, world_size: int, mark: str) -> str:
    return f"tensors-{rank:05d}-of-{world_size:05d}{mark}.safetensors"
