# SPDX-License-Identifier: Apache-2.0
"""Statements before a save: the tensors of a rank, and their sums, for all ranks to compare."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import msgspec
import torch

from accel.checkpoint._hosts import HostNote
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
        main: tensors that may differ between ranks; rank 0's are saved.
        own: tensors of this rank that others need not have; copies are equal.
        loose: likewise, but copies may differ; the lowest rank's are saved.
        items: everything else by item; rank 0's are saved.
        row: bytes saved for this rank alone.
        divided: bytes of items that ranks divide, for `join`.
        join: maps this rank's items, and the `divided` of all ranks, to the checkpoint's items; None for rank 0's
            items.
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
    """A tensor that other ranks need not have: its part here, if any, and whether copies must be equal."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    held: HeldBox | None
    exact: bool


class Statement(msgspec.Struct, frozen=True):
    """A rank's message to all others before a save.

    Attributes:
        row_bytes: size of the row of its `Content`.
        divided: as in `Content`.
        checksum: sum of the tensors that are equal on all ranks.
        held: parts of the sharded tensors on this rank, in order of names; None for none.
        own: tensors that other ranks need not have.
        stage: name of the stage; rank 0's is used.
        mark: part of the names of all files of this save; rank 0's is used.
        facts: digest of the facts that must be equal on all ranks.
        host: note about the host's folder, where each has its own.
    """

    row_bytes: int
    divided: bytes
    facts: bytes
    checksum: int
    held: list[HeldBox | None]
    own: list[OwnTensor]
    stage: str = ""
    mark: str = ""
    host: HostNote | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The tensors that this rank can write, before the exchange with the others.

    Attributes:
        content: contents of the offer.
        tensors: tensors that all ranks have, without aliases.
        aliases: other names of the same memory.
        shared: names of tensors that are equal on all ranks.
        sharded: names of sharded tensors, sorted.
        facts: lines that must be equal on all ranks.
        statement: message to the other ranks.
    """

    content: Content
    tensors: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]
    shared: Set[str]
    sharded: Sequence[str]
    facts: str
    statement: Statement


def make_offer(content: Content, world_size: int) -> Offer:
    """Describe this rank's tensors. No communication.

    Raises:
        CheckpointError: the layout of a DTensor cannot be stored.
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
            row_bytes=len(content.row),
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


def main_facts(content: Content) -> str:
    """Return a digest of names, dtypes and shapes of what rank 0's copies are saved of."""
    return hashlib.sha256("\n".join(_facts(content.main)).encode()).hexdigest()


def _facts(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    return [f"{name} {dtype_name(t.dtype)} {list(t.shape)}" for name, t in sorted(tensors.items())]
