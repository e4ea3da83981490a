# SPDX-License-Identifier: Apache-2.0
"""Slots: fixed memory that streamed blocks pass through, and the movement of a block's bytes to its slot."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from typing_extensions import override

from accel.bigmodel.run._absent import in_form_of, may_hold_statistics
from accel.bigmodel.run._places import PackedWeight, WeightPlace
from accel.bigmodel.run._supplies import Supply, fill
from accel.comm._streams import DeviceEvent, DeviceStream, DeviceStreams
from accel.errors import StreamError
from accel.tensors import is_dtensor

PAGE = 4096
_LEAST_STEP = 4096  # elements of a cast in place; fewer go through a copy


SlotPlace: TypeAlias = tuple[dict[str, Any], str, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""A dict of parameters or buffers, the key in it, placeholder, tensor on the slot, and the memory of a plain tensor."""


@dataclass(frozen=True, eq=False, slots=True)
class StreamedWeight:
    """A weight of a streamed block."""

    supply: Supply  # the place of its bytes
    offset: int  # its first byte in a slot
    places: tuple[WeightPlace, ...]  # its places in the model; several where it is tied
    absent: torch.Tensor  # the placeholder there while the block does not run; for a part, the packed weight's


@dataclass(eq=False, slots=True)
class Block:
    """A streamed segment."""

    index: int  # its number in the planned order
    name: str  # path of the module
    module: nn.Module  # the module
    weights: Sequence[StreamedWeight] = ()  # the weights that move
    slot: Slot | None = None  # the slot that holds it, or is being filled with it
    waiting: int = 0  # number of calls that wait for it; above 0 its slot is not filled with another
    absents: int = 0  # number of running calls that need placeholders, because autograd may keep what they use
    # Places in the model that now hold the slot's tensors; empty while it holds placeholders.
    placed: Sequence[SlotPlace] = ()
    is_replaced: bool = False  # whether a call has put other tensors in such places, or other memory into the slot's
    hits: int = 0  # calls that found the weights on the slot
    waits: int = 0  # calls that did not
    waited_s: float = 0.0  # seconds in which calls waited for the weights
    moved_bytes: int = 0  # bytes that were brought to slots

    def put_out(self) -> None:
        """Put the placeholders back into the model."""
        for registry, key, absent, tensor, memory in self.placed:
            if registry.get(key) is not tensor or not (memory is None or tensor.is_set_to(memory)):
                self.is_replaced = True
            registry[key] = absent
        self.placed = ()


@dataclass(eq=False, slots=True)
class SlotView:
    """Tensors of a block on a slot, made once: addresses stay, so that compiled code and captured graphs hold."""

    tensors: Sequence[torch.Tensor]  # by weight of the block
    places: Sequence[SlotPlace]  # places in the model


@dataclass(eq=False, slots=True)
class Slot:
    """Memory for one block at a time."""

    memory: torch.Tensor  # bytes on the computing device
    staging: torch.Tensor  # bytes of pinned host memory on the way to it; the same tensor where none are needed
    block: Block | None = None  # the block that it holds, or is being filled with
    ready: bool = False  # whether the fill has ended
    failed: BaseException | None = None  # error of the fill
    users: int = 0  # number of running calls that use it; above 0 it is not filled anew
    version: int = 0  # count of changes that torch saw when the fill ended
    filled: DeviceEvent | None = None  # event of the device after the fill
    # Events of the device after the last calls that used it, by stream.
    left: dict[int, DeviceEvent] = field(default_factory=dict[int, DeviceEvent])
    # Streams that must have ended before the allocator may give the memory away.
    kept: set[int] = field(default_factory=set[int])
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
    """Put the slot's tensors into the model; raise `StreamError` where a placeholder was replaced."""
    places = slot.view(block).places
    for registry, key, absent, tensor, _ in places:
        if registry.get(key) is not absent:
            # All places or none: those that were filled get their placeholders back.
            for other, name, before, here, _ in places:
                if other.get(name) is here:
                    other[name] = before
            raise StreamError(
                "a weight of a streamed block was replaced, as model.to() and load_state_dict(assign=True) do",
                where=f"{block.name}, {key!r}",
                fix="Change the model before dispatch_model or after run.close().",
            )
        registry[key] = tensor
    block.placed = places


def make_slots(count: int, nbytes: int, streams: DeviceStreams, *, staged: bool = True) -> list[Slot]:
    """Allocate slots of a size; `staged` ones get pinned host memory for bytes that come from the host."""
    slots: list[Slot] = []
    for _ in range(count):
        if streams.is_asynchronous:
            memory = streams.empty((nbytes,), torch.uint8)
            staging = streams.pinned((nbytes,), torch.uint8) if staged else memory
        else:
            # One memory for both: bytes are read straight to where they are used.
            memory = staging = _aligned(nbytes)
        slot = Slot(memory, staging)
        stream = streams.current()
        slot.kept.add(streams.name(stream))  # the memory is this stream's
        if streams.is_asynchronous:
            # The first fill waits too: the allocator may give memory that this stream's work so far still uses.
            slot.left[streams.name(stream)] = streams.record(stream)
        slots.append(slot)
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
    wholes: dict[int, tuple[PackedWeight, torch.Tensor]] = {}
    for weight in block.weights:
        tensor = part(memory, weight)
        tensors.append(tensor)
        whole = weight.places[0].whole
        if whole is not None:
            views.setdefault(id(whole), {})[weight.places[0].part] = tensor
            wholes[id(whole)] = whole, weight.absent
            continue
        if may_hold_statistics(weight.absent):
            continue  # torch writes those unseen; a placeholder refuses that
        there = in_form_of(weight.absent, tensor).requires_grad_(False)
        # `put_out` compares memories to find an assignment to .data; a DTensor has none.
        own = None if is_dtensor(there) else tensor
        places += [(each.registry, each.key, weight.absent, there, own) for each in weight.places]
    for key, (whole, absent) in wholes.items():
        made = whole.made(views[key])
        places += [(registry, name, absent, made, None) for registry, name in whole.places]
    return SlotView(tensors, places)


def arrives_narrow(weight: StreamedWeight) -> bool:
    """Return whether a weight is stored in a smaller dtype than it computes in."""
    return weight.supply.stored_dtype().itemsize < weight.supply.dtype.itemsize


class SlotTransfer(ABC):
    """Movement to the slots of one device. Here of one where all is done when a call returns."""

    @abstractmethod
    def fill(self, slot: Slot, block: Block) -> None:
        """Fill a slot that nobody uses; on an accelerator the copy may still run when this returns."""

    def arrived(self, slot: Slot) -> None:  # noqa: B027
        """Let the calling thread's computation follow the fill."""

    def left(self, slot: Slot) -> None:  # noqa: B027
        """Note that the calling thread's computation so far may use the slot."""


class HostTransfer(SlotTransfer):
    """Slots in host memory: bytes are read straight into them."""

    @override
    def fill(self, slot: Slot, block: Block) -> None:
        targets = [
            (weight.supply, tensor) for weight, tensor in zip(block.weights, slot.view(block).tensors, strict=True)
        ]
        arriving = [
            at for at, weight in enumerate(block.weights) if weight.supply.tensor is None and arrives_narrow(weight)
        ]
        for at in arriving:
            targets[at] = block.weights[at].supply, narrow_part(slot.memory, block.weights[at])
        fill(targets)
        for at in arriving:
            widen(slot.memory, block.weights[at])


class _StreamTransfer(SlotTransfer):
    """Movement by streams: their events order fills and computation."""

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams

    @override
    def arrived(self, slot: Slot) -> None:
        if slot.filled is not None:
            self._streams.wait(self._streams.current(), slot.filled)

    @override
    def left(self, slot: Slot) -> None:
        stream = self._streams.current()
        slot.left[self._streams.name(stream)] = self._streams.record(stream)
        self._keep(slot, stream)

    def _follow_users(self, slot: Slot, stream: DeviceStream) -> None:
        """Let a stream wait for the computation that used a slot."""
        for event in slot.left.values():
            self._streams.wait(stream, event)
        slot.left.clear()

    def _note_fill(self, slot: Slot, stream: DeviceStream) -> None:
        """Note that a stream's work so far fills a slot."""
        slot.filled = self._streams.record(stream)
        self._keep(slot, stream)

    def _keep(self, slot: Slot, stream: DeviceStream) -> None:
        """Let a slot's memory outlive a stream's work: a model may be dropped while a block is still on its way."""
        number = self._streams.name(stream)
        if number not in slot.kept:  # the allocator looks at all of the stream's work, once the memory is freed
            slot.kept.add(number)
            self._streams.last_use(slot.memory, stream)


class DeviceTransfer(_StreamTransfer):
    """Slots on an accelerator: bytes go to pinned memory of the host, and from there by one copy a block.

    Weights of a smaller dtype are copied in it, each separately, and the device casts them.

    The copies run on a separate stream. They wait on the device for computation that used the slot before, and
    computation waits on the device for them, so that no thread waits for the device but the one that reads.
    """

    def __init__(self, streams: DeviceStreams) -> None:
        super().__init__(streams)
        self._side = streams.side()

    @override
    def fill(self, slot: Slot, block: Block) -> None:
        streams = self._streams
        if slot.filled is not None:
            streams.synchronize(slot.filled)  # the copy before this one still reads the pinned memory
        narrow = [weight for weight in block.weights if arrives_narrow(weight)]
        wide = [weight for weight in block.weights if weight not in narrow]
        staged = [narrow_part(slot.staging, weight) for weight in narrow]
        fill(
            [(weight.supply, part(slot.staging, weight)) for weight in wide]
            + [(weight.supply, target) for weight, target in zip(narrow, staged, strict=True)]
        )
        # The copy alone waits for the slot's earlier users: the read to pinned memory has run at the same time.
        self._follow_users(slot, self._side)
        with streams.on(self._side):
            if not narrow:
                streams.copy(slot.memory, slot.staging)
            else:
                for weight in wide:
                    streams.copy(part(slot.memory, weight), part(slot.staging, weight))
                for weight, source in zip(narrow, staged, strict=True):
                    streams.copy(narrow_part(slot.memory, weight), source)
                    widen(slot.memory, weight)
        self._note_fill(slot, self._side)


class CastTransfer(_StreamTransfer):
    """A slot of blocks kept on its device in a smaller dtype: the computing stream casts them."""

    @override
    def fill(self, slot: Slot, block: Block) -> None:
        # The computing stream itself: there the cast comes after the last use and before the next.
        stream = self._streams.current()
        self._follow_users(slot, stream)
        for weight in block.weights:
            assert weight.supply.tensor is not None
            part(slot.memory, weight).copy_(weight.supply.tensor)
        self._note_fill(slot, stream)


def transfer_to(streams: DeviceStreams) -> SlotTransfer:
    """Return the movement from the host to a device."""
    return DeviceTransfer(streams) if streams.is_asynchronous else HostTransfer()
