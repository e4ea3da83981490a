# SPDX-License-Identifier: Apache-2.0
"""Snapshots: the statements of all ranks, and from them the manifest and the file of each rank."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import msgspec
import torch

from accel import __version__
from accel.checkpoint._boxes import Box, NamedBox, plan_writes, tiling_problem, whole
from accel.checkpoint._live_tensors import held_box, tied
from accel.checkpoint._manifest import (
    FORMAT,
    FORMAT_OF_HOSTS,
    RANKS,
    HostPart,
    Item,
    Manifest,
    StoredPiece,
    TensorEntry,
)
from accel.errors import CheckpointError
from accel.storage import dtype_name
from accel.tensors import checksum, checksums, is_dtensor, local_part
from accel.terminal import show_names


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """One rank's contents of a checkpoint."""

    shared: Mapping[str, torch.Tensor]  # tensors that are equal on all ranks; any rank may write them
    main: Mapping[str, torch.Tensor]  # tensors that may differ between ranks; rank 0's are saved
    own: Mapping[str, torch.Tensor]  # tensors of this rank that others need not have; copies are equal
    loose: Mapping[str, torch.Tensor]  # likewise, but copies may differ; the lowest rank's are saved
    items: Mapping[str, Item]  # everything else by item; rank 0's are saved
    row: bytes  # bytes saved only for this rank
    divided: bytes = b""  # bytes of items that ranks divide, for `join`
    # Maps this rank's items, and the `divided` of all ranks, to the checkpoint's items; None for rank 0's items.
    join: Callable[[Mapping[str, Item], Sequence[bytes]], Mapping[str, Item]] | None = None


class HeldBox(msgspec.Struct, frozen=True, array_like=True):
    """A rank's part of a sharded tensor, and the sum of its bits."""

    box: Box
    checksum: int


class OwnTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that other ranks need not have: its part here, if any, and whether copies must be equal."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    held: HeldBox | None
    exact: bool


class Statement(msgspec.Struct, frozen=True):
    """A rank's message to all others before a save."""

    row_bytes: int  # size of the row of its `Content`
    divided: bytes  # as in `Content`
    facts: bytes  # digest of the facts that must be equal on all ranks
    main: bytes  # digest of the facts of `main`, which may differ
    checksum: int  # sum of the tensors that are equal on all ranks
    held: list[HeldBox | None]  # parts of the sharded tensors on this rank, in order of names; None for none
    own: list[OwnTensor]  # tensors that other ranks need not have
    stage: str = ""  # name of the stage; rank 0's is used
    mark: str = ""  # part of the names of all files of this save; rank 0's is used
    note: bytes = b""  # note of `Folders`


class MainFacts(msgspec.Struct, frozen=True):
    """Facts of the plain tensors that rank 0 alone writes."""

    tensors: dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape
    aliases: dict[str, str]  # other names of stored tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The tensors that this rank can write, before the exchange with the others."""

    content: Content  # contents of the offer
    tensors: Mapping[str, torch.Tensor]  # tensors that all ranks have, without aliases
    aliases: Mapping[str, str]  # other names of the same memory
    shared: Set[str]  # names of tensors that are equal on all ranks
    sharded: Sequence[str]  # names of sharded tensors, sorted
    facts: str  # lines that must be equal on all ranks
    main: MainFacts  # of tensors that rank 0 alone writes
    statement: Statement  # message to the other ranks


def make_offer(content: Content, world_size: int) -> Offer:
    """Describe this rank's tensors. No communication."""
    everything = {**content.shared, **content.main}
    aliases = tied(everything)
    tensors = {name: tensor for name, tensor in everything.items() if name not in aliases}
    sharded = {name: tensor for name, tensor in sorted(tensors.items()) if is_dtensor(tensor)}
    shared = {name: tensors[name] for name in content.shared if name in tensors and name not in sharded}
    # Rank 0 alone writes the others, and ranks may hold other ones.
    common = {*content.shared, *(name for name, tensor in everything.items() if is_dtensor(tensor))}
    names = sorted(f"{alias} is {first}" for alias, first in aliases.items() if alias in common or first in common)
    facts = "\n".join([*tensor_facts(shared | sharded), *names])
    plain = {name: tensor for name, tensor in sorted(tensors.items()) if name not in common}
    main = MainFacts({name: (dtype_name(each.dtype), tuple(each.shape)) for name, each in plain.items()}, aliases)
    return Offer(
        content=content,
        tensors=tensors,
        aliases=aliases,
        shared=shared.keys(),
        sharded=list(sharded),
        facts=facts,
        main=main,
        statement=Statement(
            row_bytes=len(content.row),
            divided=content.divided,
            # a digest: the lines are sent only if some rank's differ
            facts=hashlib.sha256(facts.encode()).digest(),
            main=hashlib.sha256(msgspec.json.encode(main)).digest(),
            # one pass over memory, to find copies that differ
            checksum=checksum(shared) if world_size > 1 else 0,
            held=list(_held(sharded).values()),
            own=_own(content),
        ),
    )


def with_main(offer: Offer, main: MainFacts) -> Offer:
    """Return a rank's offer with rank 0's tensors, without values, in place of its own that are not written: all ranks
    plan by the same sizes."""
    kept = {name: tensor for name, tensor in offer.tensors.items() if name not in offer.main.tensors}
    stubs = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, (dtype, shape) in main.tensors.items()
    }
    return replace(offer, tensors=kept | stubs, aliases=main.aliases)


def _held(tensors: Mapping[str, torch.Tensor]) -> dict[str, HeldBox | None]:
    sums = checksums({name: local_part(tensor) for name, tensor in tensors.items()})
    boxes = {name: held_box(tensor, name) for name, tensor in tensors.items()}
    return {name: HeldBox(box, sums[name]) if box is not None else None for name, box in boxes.items()}


def _own(content: Content) -> list[OwnTensor]:
    tensors = {**content.own, **content.loose}
    held = _held(tensors)
    return [
        OwnTensor(name, dtype_name(tensor.dtype), tuple(tensor.shape), held[name], name in content.own)
        for name, tensor in sorted(tensors.items())
    ]


def tensor_facts(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return names, dtypes and shapes, a line for each tensor."""
    return [f"{name} {dtype_name(t.dtype)} {list(t.shape)}" for name, t in sorted(tensors.items())]


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """This rank's file of a checkpoint, after all ranks have agreed on the contents."""

    file: str  # name of this rank's file
    tensors: Mapping[str, torch.Tensor]  # its live tensors by name, not copied; empty if this rank writes none
    manifest: Manifest  # manifest of the whole checkpoint, or of this host's part, without the files, not yet written
    sent: Mapping[NamedBox, int]  # boxes that a rank writes without holding them, each with the rank that sends it
    outgoing: Mapping[NamedBox, torch.Tensor]  # those that this rank sends
    missing: Set[NamedBox]  # those that this rank writes once it has received them


@dataclass(frozen=True, slots=True)
class Boxes:
    """The boxes of a checkpoint."""

    sizes: Mapping[NamedBox, int]  # bytes of each box to write
    holders: Mapping[NamedBox, Sequence[int]]  # ranks that hold a box; all ranks for boxes without an entry
    # Returns the ranks that read a box again at the same layout; all ranks for boxes without an entry.
    readers: Callable[[], Mapping[NamedBox, Sequence[int]]]


class WritePlan(NamedTuple):
    """The writing of a checkpoint."""

    ranks: Sequence[Sequence[NamedBox]]  # boxes that each rank writes
    places: Mapping[NamedBox, int]  # rank with the file of each box, for the manifest in this rank's folder
    sent: Mapping[NamedBox, int] = {}  # boxes that a rank writes without holding them, each with the rank that sends it
    missing: Set[NamedBox] = frozenset()  # those that this rank receives
    # The part of the checkpoint in this rank's folder; unset for all of it.
    host: HostPart | msgspec.UnsetType = msgspec.UNSET


ItemsAndMetrics = tuple[Mapping[str, Item], Mapping[str, float]]
Divide = Callable[[Boxes, Sequence[str]], WritePlan]  # the boxes, and the names of the ranks' files


class Agreement(NamedTuple):
    """Agreement of all ranks on a save."""

    leader: int  # rank that has opened the stage of this rank's folder
    stored: ItemsAndMetrics  # items and metrics to store
    divide: Divide  # divides the writing
    # Names of the older checkpoints that count for `keep`, where others go; None for all.
    older: frozenset[str] | None = None


def join_items(content: Content, ranks: Sequence[Statement]) -> Mapping[str, Item]:
    """Return the items of a checkpoint: rank 0's, with divided items joined."""
    if content.join is None or not any(each.divided for each in ranks):
        return content.items
    return content.join(content.items, [each.divided for each in ranks])


def divide_writes(boxes: Boxes, files: Sequence[str]) -> WritePlan:
    """Divide the writing into one folder among all ranks."""
    plan = plan_writes(boxes.sizes, boxes.holders, len(files))
    return WritePlan(plan, {part: rank for rank, parts in enumerate(plan) for part in parts})


def take_snapshot(
    offer: Offer, ranks: Sequence[Statement], rows: Sequence[bytes], rank: int, agreed: Agreement, *, step: int
) -> Snapshot:
    """Compare what the ranks hold, and divide the writing among them. No communication, the same error on all. `rows`
    are the rows of all ranks, on rank 0; empty elsewhere."""
    content = offer.content
    items, metrics = agreed.stored
    tensors = {**offer.tensors, **_stubs(ranks), **content.own, **content.loose}
    tensors[RANKS] = _stack(rows, [each.row_bytes for each in ranks])
    # from here on only statements decide, so every rank makes the same plan
    held = _held_by_name(offer.sharded, ranks)
    differing = [name for name, parts in held.items() if not _copies_agree(parts)]
    if len({each.checksum for each in ranks}) > 1:
        differing += sorted(offer.shared)
    if differing and not rank:
        text = "ranks hold different parameters or optimizer states (%s); step %s gets the lowest rank's"
        logging.getLogger("accel.checkpoint").warning(text, show_names(differing, 1), step)
    sizes, holders = _holders(tensors, held, offer.shared - set(differing))
    loose = {each.name for each_rank in ranks for each in each_rank.own if not each.exact}
    files = [f"tensors-{each:05d}-of-{len(ranks):05d}{ranks[0].mark}.safetensors" for each in range(len(ranks))]
    plan = agreed.divide(Boxes(sizes, holders, partial(_readers, tensors, held, loose)), files)
    return Snapshot(
        file=files[rank],
        # live memory: only a save in the background copies it
        tensors={name: _part(tensors[name], box) for name, box in plan.ranks[rank]},
        manifest=Manifest(
            format=FORMAT if plan.host is msgspec.UNSET else FORMAT_OF_HOSTS,
            accel=__version__,
            torch=str(torch.__version__),
            step=step,
            world_size=len(ranks),
            files={},
            tensors=_entries(tensors, plan.places, files),
            aliases=dict(offer.aliases),
            items=dict(items),
            metrics=dict(metrics),
            host=plan.host,
        ),
        sent=plan.sent,
        outgoing={part: _part(tensors[part[0]], part[1]) for part, sender in plan.sent.items() if sender == rank},
        missing=plan.missing,
    )


def _stubs(ranks: Sequence[Statement]) -> dict[str, torch.Tensor]:
    """Return tensors without values for those that only some ranks have; raises if two ranks hold different ones."""
    found: dict[str, OwnTensor] = {}
    parts: dict[tuple[str, Box], int] = {}
    for rank, own in ((rank, own) for rank, each_rank in enumerate(ranks) for own in each_rank.own):
        known, same = found.setdefault(own.name, own), True
        if own.held is not None and own.exact:
            # several ranks may hold a box, but only one writes it: all must be equal
            same = parts.setdefault((own.name, own.held.box), own.held.checksum) == own.held.checksum
        if not same or (known.dtype, known.shape) != (own.dtype, own.shape):
            expected, got = (f"{each.dtype} {list(each.shape)}" for each in (known, own))
            raise CheckpointError(
                f"rank {rank} holds another tensor by this name than a rank below it",
                expected=expected,
                got=got if got != expected else "other values",
                where=own.name,
                fix="Name tensors that only some ranks hold as in the full model, one tensor per name.",
            )
    # no memory: tensors of other ranks count by their facts
    return {name: torch.empty(o.shape, dtype=getattr(torch, o.dtype), device="meta") for name, o in found.items()}


def _held_by_name(sharded: Sequence[str], ranks: Sequence[Statement]) -> dict[str, list[HeldBox | None]]:
    """Return the parts of each sharded tensor, by name and rank; None where a rank has none."""
    own = list[dict[str, HeldBox | None]]()
    first = set[tuple[str, Box | None]]()
    for rank in ranks:
        places = {each.name: (each.name, each.held.box if each.held is not None else None) for each in rank.own}
        # where copies may differ, only the lowest rank's counts
        own.append({each.name: each.held for each in rank.own if each.exact or places[each.name] not in first})
        first |= set(places.values())
    found = {name: [rank.held[at] for rank in ranks] for at, name in enumerate(sharded)}
    return found | {name: [held.get(name) for held in own] for name in sorted({name for held in own for name in held})}


def _copies_agree(parts: Sequence[HeldBox | None]) -> bool:
    """Return whether copies of each part are equal on all ranks that hold it."""
    held = {part for part in parts if part is not None}
    return len(held) == len({part.box for part in held})


def _holders(
    tensors: Mapping[str, torch.Tensor], held: Mapping[str, Sequence[HeldBox | None]], shared: Set[str]
) -> tuple[dict[NamedBox, int], dict[NamedBox, list[int]]]:
    """Return the bytes of each box of all tensors, and the ranks that can write it; see `Boxes`."""
    sizes: dict[NamedBox, int] = {}
    holders: dict[NamedBox, list[int]] = {}
    for name in tensors.keys() - held.keys():
        part = name, whole(tensors[name].shape)
        sizes[part] = tensors[name].nbytes
        # other ranks' copies may differ, and rank 0's is the one to save
        if name not in shared:
            holders[part] = [0]
    for name, parts in held.items():
        first: dict[Box, int] = {}
        for rank, mine in enumerate(parts):
            if mine is None:
                continue
            part = name, mine.box
            sizes[part] = mine.box.size * tensors[name].element_size()
            # a rank may not write a copy that has drifted from the lowest rank's
            if first.setdefault(mine.box, mine.checksum) == mine.checksum:
                holders.setdefault(part, []).append(rank)
        # a hole would come out at the load, when the values are gone
        if problem := tiling_problem(tensors[name].shape, list(first)):
            raise CheckpointError(
                f"a sharded tensor {problem}",
                where=name,
                fix="Shard it over a mesh of ranks of this context only, each of which calls save_state.",
            )
    return sizes, holders


def _part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return this rank's part of a tensor; of an empty tensor all of it."""
    return local_part(tensor) if box.size else local_part(tensor).new_empty(tuple(tensor.shape))


def _readers(
    tensors: Mapping[str, torch.Tensor], held: Mapping[str, Sequence[HeldBox | None]], loose: Set[str]
) -> dict[NamedBox, list[int]]:
    """Return the ranks that read each box again at the same layout; no entry for those that all ranks read."""
    found: dict[NamedBox, list[int]] = {}
    for name, parts in held.items():
        for rank, mine in enumerate(parts):
            if mine is not None and not (name in loose and mine.box == whole(tensors[name].shape)):
                found.setdefault((name, mine.box), []).append(rank)
    return found


def _entries(
    tensors: Mapping[str, torch.Tensor], places: Mapping[NamedBox, int], files: Sequence[str]
) -> dict[str, TensorEntry]:
    pieces: dict[str, list[StoredPiece]] = {name: [] for name in sorted(tensors)}
    # in order of ranks: equal saves have equal manifests
    for (name, box), rank in sorted(places.items(), key=lambda each: each[1]):
        pieces[name].append(StoredPiece(files[rank], box.offset, box.shape))
    return {
        name: TensorEntry(dtype_name(tensors[name].dtype), tuple(tensors[name].shape), tuple(found))
        for name, found in pieces.items()
    }


def _stack(rows: Sequence[bytes], sizes: Sequence[int]) -> torch.Tensor:
    """Stack every rank's bytes in one tensor [world, longest + 4]: length in four bytes, bytes, zeros. Without rows,
    the tensor has no contents."""
    width = max(sizes)
    if not rows:
        return torch.empty(len(sizes), width + 4, dtype=torch.uint8, device="meta")
    padded = b"".join(len(row).to_bytes(4, "little") + row.ljust(width, b"\0") for row in rows)
    return torch.frombuffer(bytearray(padded), dtype=torch.uint8).view(len(rows), width + 4)
