# SPDX-License-Identifier: Apache-2.0
"""Statements before a save: the tensors that a rank holds, and their sums, for all ranks to compare."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import msgspec
import torch

from accel.checkpoint._live_tensors import checksum, checksums, held_box, tied
from accel.checkpoint._manifest import Item
from accel.checkpoint._plan import Box
from accel.storage import dtype_name
from accel.tensors import is_dtensor, local_part


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


class HeldBox(msgspec.Struct, frozen=True, array_like=True):
    """A rank's part of a sharded tensor, and the sum of its bits."""

    box: Box
    checksum: int


class OwnTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that other ranks need not have, the part of it here, if any, and whether copies must be equal."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    held: HeldBox | None
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
    held: list[HeldBox | None]
    own: list[OwnTensor]
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


def _facts(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    return [f"{name} {dtype_name(t.dtype)} {list(t.shape)}" for name, t in sorted(tensors.items())]
