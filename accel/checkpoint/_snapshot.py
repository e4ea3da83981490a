# SPDX-License-Identifier: Apache-2.0
"""Contents of a checkpoint: each rank states the tensors that it holds, and the plan of writing follows from that."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import msgspec
import torch

from accel import __version__
from accel.checkpoint._live_tensors import checksum, checksums, held_box, tied
from accel.checkpoint._manifest import FORMAT, RANKS, Item, Manifest, Piece, TensorEntry
from accel.checkpoint._plan import Box, plan_writes, tiling_problem, whole
from accel.errors import CheckpointError
from accel.storage import dtype_name
from accel.tensors import is_dtensor, local_part

NamedBox = tuple[str, Box]  # a tensor's name, and which of its elements


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """One rank's contents of a checkpoint.

    Attributes:
        shared: tensors that are equal on all ranks; any rank may write them.
        main: tensors that ranks may hold in other values; rank 0's count.
        own: tensors that this rank holds and others need not; copies are equal.
        loose: such tensors whose copies may differ; the lowest rank's counts.
        items: everything else by item; rank 0's count.
        row: bytes of this rank's own, kept for it.
        divided: bytes of items that ranks divide, for `join`.
        join: makes the items of the checkpoint of this rank's and the `divided` of all ranks; None for rank 0's items.
    """

    shared: Mapping[str, torch.Tensor]
    main: Mapping[str, torch.Tensor]
    own: Mapping[str, torch.Tensor]
    loose: Mapping[str, torch.Tensor]
    items: Mapping[str, Item]
    row: bytes
    divided: bytes = b""
    join: Callable[[Mapping[str, Item], Sequence[bytes]], Mapping[str, Item]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """This rank's file of a checkpoint, after all ranks have agreed on the contents.

    Attributes:
        file: name of this rank's file.
        tensors: its contents by name, empty if this rank writes none; the live tensors, nothing is copied.
        manifest: the whole checkpoint's, without the files, which have yet to be written.
    """

    file: str
    tensors: Mapping[str, torch.Tensor]
    manifest: Manifest


class _HeldBox(msgspec.Struct, frozen=True, array_like=True):
    """A rank's part of a sharded tensor, and the sum of its bits."""

    box: Box
    checksum: int


class _Own(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that other ranks need not have, the part of it here, if any, and whether copies must be equal."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    held: _HeldBox | None
    exact: bool


class Statement(msgspec.Struct, frozen=True):
    """A rank's message to all others before a save.

    Attributes:
        row, divided: as of its `Content`.
        checksum: sum of the tensors that are equal on all ranks.
        held: its parts of the sharded tensors, in order of their names; None where it has none.
        own: tensors that other ranks need not have.
        stage: name of the folder that is written into; rank 0's counts.
        mark: part of the names of all files of this save; rank 0's counts.
        facts: digest of what must be the same on every rank.
    """

    row: bytes
    divided: bytes
    facts: bytes
    checksum: int
    held: list[_HeldBox | None]
    own: list[_Own]
    stage: str = ""
    mark: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The tensors that this rank can write, before it knows the others'.

    Attributes:
        content: the contents that it describes.
        tensors: those that all ranks have, without other names of the same memory.
        aliases: these names.
        shared: names of tensors that are equal on all ranks.
        sharded: names of sharded tensors, sorted.
        facts: lines that are the same on every rank.
        statement: for the other ranks.
    """

    content: Content
    tensors: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]
    shared: Set[str]
    sharded: Sequence[str]
    facts: str
    statement: Statement


@dataclass(frozen=True, slots=True)
class _Writers:
    """The boxes to write, in bytes, and who can write those that not every rank can."""

    sizes: dict[NamedBox, int]
    holders: dict[NamedBox, list[int]]


def make_offer(content: Content, world_size: int) -> Offer:
    """Look at what this rank holds. No communication.

    Raises:
        CheckpointError: a DTensor lies in a way that cannot be stored.
    """
    everything = {**content.shared, **content.main}
    aliases = tied(everything)
    tensors = {name: tensor for name, tensor in everything.items() if name not in aliases}
    sharded = {name: tensor for name, tensor in sorted(tensors.items()) if is_dtensor(tensor)}
    shared = {name: tensors[name] for name in content.shared if name in tensors and name not in sharded}
    facts = "\n".join([*_facts(shared | sharded), *sorted(f"{a} is {b}" for a, b in aliases.items())])
    return Offer(
        content=content,
        tensors=tensors,
        aliases=aliases,
        shared=shared.keys(),
        sharded=list(sharded),
        facts=facts,
        statement=Statement(
            row=content.row,
            divided=content.divided,
            facts=hashlib.sha256(facts.encode()).digest(),
            checksum=checksum(shared) if world_size > 1 else 0,
            held=list(_held(sharded).values()),
            own=_own(content),
        ),
    )


def join_items(content: Content, ranks: Sequence[Statement]) -> Mapping[str, Item]:
    """Return the items of a checkpoint: rank 0's, and those that ranks divide joined.

    Raises:
        CheckpointError: the parts do not go together; the same on every rank.
    """
    if content.join is None or not any(each.divided for each in ranks):
        return content.items
    return content.join(content.items, [each.divided for each in ranks])


def take_snapshot(
    offer: Offer,
    items: Mapping[str, Item],
    ranks: Sequence[Statement],
    rank: int,
    *,
    step: int,
    metrics: Mapping[str, float],
) -> Snapshot:
    """Compare what the ranks hold, and divide the writing among them. No communication.

    Args:
        offer: this rank's.
        items: from `join_items`.
        ranks: the statements of all ranks.
        rank: this rank.
        step: names the checkpoint.
        metrics: values that it is rated by; rank 0's count.

    Raises:
        CheckpointError: the parts of a sharded tensor that ranks hold are not the whole; the same on every rank.
    """
    content = offer.content
    tensors = {**offer.tensors, **_stubs(ranks), **content.own, **content.loose}
    tensors[RANKS] = _stack([each.row for each in ranks])
    held = _held_by_name(offer.sharded, ranks)
    differing = [name for name, parts in held.items() if not _copies_agree(parts)]
    if len({each.checksum for each in ranks}) > 1:
        differing += sorted(offer.shared)
    if differing and not rank:
        text = "ranks hold different parameters or optimizer states (%s%s); step %s gets the lowest rank's"
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        logging.getLogger("accel.checkpoint").warning(text, differing[0], more, step)
    writers = _writers(tensors, held, offer.shared - set(differing))
    plan = plan_writes(writers.sizes, writers.holders, len(ranks))
    mark = ranks[0].mark
    return Snapshot(
        file=_file_name(rank, len(ranks), mark),
        tensors={name: _part(tensors[name], box) for name, box in plan[rank]},
        manifest=Manifest(
            format=FORMAT,
            accel=__version__,
            torch=str(torch.__version__),
            step=step,
            world_size=len(ranks),
            files={},
            tensors=_entries(tensors, plan, mark),
            aliases=dict(offer.aliases),
            items=dict(items),
            metrics=dict(metrics),
        ),
    )


def _held(tensors: Mapping[str, torch.Tensor]) -> dict[str, _HeldBox | None]:
    sums = checksums({name: local_part(tensor) for name, tensor in tensors.items()})
    boxes = {name: held_box(tensor, name) for name, tensor in tensors.items()}
    return {name: _HeldBox(box, sums[name]) if box is not None else None for name, box in boxes.items()}


def _own(content: Content) -> list[_Own]:
    tensors = {**content.own, **content.loose}
    held = _held(tensors)
    return [
        _Own(name, dtype_name(tensor.dtype), tuple(tensor.shape), held[name], name in content.own)
        for name, tensor in sorted(tensors.items())
    ]


def _stubs(ranks: Sequence[Statement]) -> dict[str, torch.Tensor]:
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


def _held_by_name(sharded: Sequence[str], ranks: Sequence[Statement]) -> dict[str, list[_HeldBox | None]]:
    """Return the parts of each sharded tensor, by name and rank; None where a rank has none."""
    own = list[dict[str, _HeldBox | None]]()
    first = set[tuple[str, Box | None]]()
    for rank in ranks:
        places = {each.name: (each.name, each.held.box if each.held is not None else None) for each in rank.own}
        own.append({each.name: each.held for each in rank.own if each.exact or places[each.name] not in first})
        first |= set(places.values())
    found = {name: [rank.held[at] for rank in ranks] for at, name in enumerate(sharded)}
    return found | {name: [held.get(name) for held in own] for name in sorted({name for held in own for name in held})}


def _copies_agree(parts: Sequence[_HeldBox | None]) -> bool:
    """Whether ranks that hold the same part of a tensor hold the same bits."""
    held = {part for part in parts if part is not None}
    return len(held) == len({part.box for part in held})


def _writers(
    tensors: Mapping[str, torch.Tensor], held: Mapping[str, Sequence[_HeldBox | None]], shared: Set[str]
) -> _Writers:
    """List the boxes of all tensors, and which ranks can write them."""
    writers = _Writers({}, {})
    for name in tensors.keys() - held.keys():
        part = name, whole(tensors[name].shape)
        writers.sizes[part] = tensors[name].nbytes
        if name not in shared:
            writers.holders[part] = [0]
    for name, parts in held.items():
        first: dict[Box, int] = {}
        for rank, mine in enumerate(parts):
            if mine is None:
                continue
            part = name, mine.box
            writers.sizes[part] = mine.box.size * tensors[name].element_size()
            if first.setdefault(mine.box, mine.checksum) == mine.checksum:
                writers.holders.setdefault(part, []).append(rank)
        if problem := tiling_problem(tensors[name].shape, list(first)):
            raise CheckpointError(
                f"a sharded tensor {problem}",
                where=name,
                fix="Shard it over a mesh of ranks of this context only, each of which calls save_state.",
            )
    return writers


def _part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """This rank's part of a tensor; of one without elements all of it."""
    return local_part(tensor) if box.size else local_part(tensor).new_empty(tuple(tensor.shape))


def _entries(
    tensors: Mapping[str, torch.Tensor], plan: Sequence[Sequence[NamedBox]], mark: str
) -> dict[str, TensorEntry]:
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
