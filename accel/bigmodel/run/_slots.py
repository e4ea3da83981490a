# SPDX-License-Identifier: Apache-2.0
"""Slots: fixed memory that streamed blocks pass through, and the blocks with the places of their weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from accel.bigmodel.run._absent import in_form_of, may_hold_statistics
from accel.bigmodel.run._packed import PackedWeight
from accel.bigmodel.run._supply import Supply
from accel.errors import StreamError

PAGE = 4096
_LEAST_STEP = 4096  # elements of a cast in place; fewer go through a copy


SlotPlace: TypeAlias = tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]
"""A dict of parameters or buffers, the key in it, the placeholder, and the tensor on the slot."""


@dataclass(frozen=True, eq=False, slots=True)
class Holder:
    """One place of a weight in the model.

    Attributes:
        registry: the dict of parameters or buffers of the module that has it.
        key: its name there.
        absent: the placeholder, while the block does not run; of a part that of the packed weight.
        whole: the packed weight that it is a part of; None for a parameter or buffer.
        part: name of the part.
    """

    registry: dict[str, Any]
    key: str
    absent: torch.Tensor
    whole: PackedWeight | None = None
    part: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class StreamedWeight:
    """A weight of a streamed block.

    Attributes:
        supply: the place of its bytes.
        offset: its first byte in a slot.
        holders: its places in the model; several where it is tied.
    """

    supply: Supply
    offset: int
    holders: tuple[Holder, ...]


@dataclass(eq=False, slots=True)
class Block:
    """A streamed segment.

    Attributes:
        index: its number in the planned order.
        name: path of the module.
        module: the module.
        weights: the weights that move.
        slot: the slot that holds it, or is being filled with it.
        waiting: number of calls that wait for it; above 0 its slot is not filled with another.
        absents: number of running calls that need placeholders, because autograd may keep what they use.
        placed: places in the model that now hold the slot's tensors; empty while it holds placeholders.
        is_replaced: whether a call has put other tensors in such places.
        hits, waits, waited_s, moved_bytes: counts of `RunStats`.
    """

    index: int
    name: str
    module: nn.Module
    weights: Sequence[StreamedWeight] = ()
    slot: Slot | None = None
    waiting: int = 0
    absents: int = 0
    placed: Sequence[SlotPlace] = ()
    is_replaced: bool = False
    hits: int = 0
    waits: int = 0
    waited_s: float = 0.0
    moved_bytes: int = 0

    def put_out(self) -> None:
        """Put the placeholders back into the model."""
        for registry, key, absent, tensor in self.placed:
            if registry.get(key) is not tensor:
                self.is_replaced = True
            registry[key] = absent
        self.placed = ()


@dataclass(eq=False, slots=True)
class SlotView:
    """Tensors of a block on a slot, made once: addresses stay, so that compiled code and captured graphs hold.

    Attributes:
        tensors: by weight of the block.
        places: places in the model.
    """

    tensors: Sequence[torch.Tensor]
    places: Sequence[SlotPlace]


@dataclass(eq=False, slots=True)
class Slot:
    """Memory for one block at a time.

    Attributes:
        memory: bytes on the computing device.
        staging: bytes of pinned host memory on the way to it; the same tensor where none are needed.
        block: the block that it holds, or is being filled with.
        ready: whether the fill has ended.
        failed: error of the fill.
        users: number of running calls that use it; above 0 it is not filled anew.
        version: count of changes that torch saw when the fill ended.
        filled: event of the device after the fill.
        left: events of the device after the last calls that used it, by stream.
    """

    memory: torch.Tensor
    staging: torch.Tensor
    block: Block | None = None
    ready: bool = False
    failed: BaseException | None = None
    users: int = 0
    version: int = 0
    filled: torch.Event | None = None
    left: dict[int, torch.Event] = field(default_factory=dict[int, torch.Event])
    views: dict[int, SlotView] = field(default_factory=dict[int, SlotView])

    def empty(self) -> None:
        """Forget the block that it holds."""
        if self.block is not None:
            self.block.slot = None
        self.block = self.failed = None
        self.ready = False

    def view(self, block: Block) -> SlotView:
        """Return the tensors of a block on this slot."""
        found = self.views.get(block.index)
        if found is None:
            found = self.views[block.index] = _view(self.memory, block)
        return found


def put_in(block: Block, slot: Slot) -> None:
    """Put the slot's tensors into the model.

    Raises:
        StreamError: a place holds another tensor than the placeholder.
    """
    places = slot.view(block).places
    for registry, key, absent, tensor in places:
        if registry.get(key) is not absent:
            for other, name, before, here in places:
                if other.get(name) is here:
                    other[name] = before
            raise StreamError(
                "a weight of a streamed block was replaced, as model.to() and load_state_dict(assign=True) do",
                where=f"{block.name}, {key!r}",
                fix="Change the model before dispatch_model or after run.close().",
            )
        registry[key] = tensor
    block.placed = places


def make_slots(count: int, nbytes: int, device: torch.device, *, staged: bool = True) -> list[Slot]:
    """Allocate slots.

    Args:
        count: number of slots.
        nbytes: size of each.
        device: the computing device.
        staged: whether bytes come from the host.
    """
    slots: list[Slot] = []
    for _ in range(count):
        if device.type == "cpu":
            memory = staging = _aligned(nbytes)
        else:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            staging = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) if staged else memory
        slots.append(Slot(memory, staging))
    return slots


def part(memory: torch.Tensor, weight: StreamedWeight) -> torch.Tensor:
    """Return a weight's part of a slot's memory, in the weight's shape and dtype."""
    supply = weight.supply
    nbytes = math.prod(supply.shape) * supply.dtype.itemsize
    return memory[weight.offset : weight.offset + nbytes].view(supply.dtype).view(supply.shape)


def narrow_part(memory: torch.Tensor, weight: StreamedWeight) -> torch.Tensor:
    """Return the end of a weight's part of a slot's memory, in the weight's shape and the dtype that it is stored in.

    A weight of a smaller dtype arrives there, and `widen` casts it in place, so that the cast takes no more memory.
    """
    supply, stored = weight.supply, weight.supply.stored_dtype()
    count = math.prod(supply.shape)
    end = weight.offset + count * supply.dtype.itemsize
    return memory[end - count * stored.itemsize : end].view(stored).view(supply.shape)


def widen(memory: torch.Tensor, weight: StreamedWeight) -> None:
    """Cast a weight from `narrow_part` to `part`, front to back: no step writes what is still to be read."""
    source = narrow_part(memory, weight).view(-1)
    target = part(memory, weight).view(-1)
    narrow, wide = source.itemsize, target.itemsize
    count, done = source.numel(), 0
    while done < count:
        step = (count - done) * (wide - narrow) // wide
        if step < _LEAST_STEP:
            target[done:] = source[done:].clone()
            return
        target[done : done + step] = source[done : done + step]
        done += step


def _aligned(nbytes: int) -> torch.Tensor:
    """Return host memory that begins at a page, as reads past the page cache want it."""
    whole = torch.empty(nbytes + PAGE, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE
    return whole[start : start + nbytes]


def _view(memory: torch.Tensor, block: Block) -> SlotView:
    tensors: list[torch.Tensor] = []
    places: list[SlotPlace] = []
    views: dict[int, dict[str, torch.Tensor]] = {}
    wholes: dict[int, Holder] = {}
    for weight in block.weights:
        tensor = part(memory, weight)
        first = weight.holders[0]
        if first.whole is not None:
            views.setdefault(id(first.whole), {})[first.part] = tensor
            wholes[id(first.whole)] = first
            tensors.append(tensor)
            continue
        tensors.append(tensor)
        if may_hold_statistics(first.absent):
            continue  # torch writes those unseen; a placeholder refuses that
        there = in_form_of(first.absent, tensor).requires_grad_(False)
        places += [(each.registry, each.key, each.absent, there) for each in weight.holders]
    for key, holder in wholes.items():
        assert holder.whole is not None
        made = holder.whole.made(views[key])
        places += [(registry, name, holder.absent, made) for registry, name in holder.whole.places]
    return SlotView(tensors, places)
