# SPDX-License-Identifier: Apache-2.0
"""Movement of a block's bytes to its slot: on the host in place, to an accelerator by a stream of its own."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from accel.bigmodel.run._slots import Block, Slot, StreamedWeight, narrow_part, part, widen
from accel.bigmodel.run._supply import fill


def arrives_narrow(weight: StreamedWeight) -> bool:
    """Return whether a weight is stored in a smaller dtype than it computes in."""
    return weight.supply.stored_dtype().itemsize < weight.supply.dtype.itemsize


class Transfer(Protocol):
    """Movement to the slots of one device."""

    def fill(self, slot: Slot, block: Block) -> None:
        """Fill a slot that nobody uses; on an accelerator the copy may still run when this returns."""
        ...

    def arrived(self, slot: Slot) -> None:
        """Let the calling thread's computation follow the fill."""
        ...

    def left(self, slot: Slot) -> None:
        """Note that the calling thread's computation so far may use the slot."""
        ...


class HostTransfer:
    """Slots in host memory: bytes are read straight into them."""

    def fill(self, slot: Slot, block: Block) -> None:
        """Fill a slot."""
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

    def arrived(self, slot: Slot) -> None:
        """Return at once."""

    def left(self, slot: Slot) -> None:
        """Return at once."""


class DeviceTransfer:
    """Slots on an accelerator: bytes go to pinned memory of the host, and from there by one copy a block.

    Weights of a smaller dtype travel in it, each by a copy of its own, and the device casts them.

    The copies run on a stream of their own. They wait on the device for computation that used the slot before, and
    computation waits on the device for them, so that no thread waits for the device but the one that reads.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device)
        self._device = device

    def fill(self, slot: Slot, block: Block) -> None:
        """Fill the pinned memory, and start the copy."""
        if slot.filled is not None:
            slot.filled.synchronize()  # the copy before this one still reads the pinned memory
        narrow = [weight for weight in block.weights if arrives_narrow(weight)]
        wide = [weight for weight in block.weights if weight not in narrow]
        staged = [narrow_part(slot.staging, weight) for weight in narrow]
        fill(
            [(weight.supply, part(slot.staging, weight)) for weight in wide]
            + [(weight.supply, target) for weight, target in zip(narrow, staged, strict=True)]
        )
        _follow_users(slot, self._stream)
        with self._stream:
            if not narrow:
                slot.memory.copy_(slot.staging, non_blocking=True)
            else:
                for weight in wide:
                    part(slot.memory, weight).copy_(part(slot.staging, weight), non_blocking=True)
                for weight, source in zip(narrow, staged, strict=True):
                    narrow_part(slot.memory, weight).copy_(source, non_blocking=True)
                    widen(slot.memory, weight)
        slot.filled = self._stream.record_event()

    def arrived(self, slot: Slot) -> None:
        """Let the current stream wait for the copy."""
        _follow_fill(slot, self._device)

    def left(self, slot: Slot) -> None:
        """Record an event of the current stream."""
        _note_use(slot, self._device)


class CastTransfer:
    """A slot of blocks that lie on its device in a smaller dtype: the stream that computes casts them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_host = device.type == "cpu"

    def fill(self, slot: Slot, block: Block) -> None:
        """Cast the block's weights."""
        stream = None if self._is_host else torch.accelerator.current_stream(self._device)
        if stream is not None:
            _follow_users(slot, stream)
        for weight in block.weights:
            assert weight.supply.tensor is not None
            part(slot.memory, weight).copy_(weight.supply.tensor)
        if stream is not None:
            slot.filled = stream.record_event()

    def arrived(self, slot: Slot) -> None:
        """Let the current stream wait for the casts, which may run on another one."""
        if not self._is_host:
            _follow_fill(slot, self._device)

    def left(self, slot: Slot) -> None:
        """Record an event of the current stream."""
        if not self._is_host:
            _note_use(slot, self._device)


def _follow_users(slot: Slot, stream: torch.Stream) -> None:
    """Let a stream wait for the computation that used a slot."""
    for event in slot.left.values():
        stream.wait_event(event)
    slot.left.clear()


def _follow_fill(slot: Slot, device: torch.device) -> None:
    if slot.filled is not None:
        torch.accelerator.current_stream(device).wait_event(slot.filled)


def _note_use(slot: Slot, device: torch.device) -> None:
    stream = torch.accelerator.current_stream(device)
    slot.left[stream.stream_id] = stream.record_event()


def transfer_to(device: torch.device) -> Transfer:
    """Return the movement from the host to a device."""
    return HostTransfer() if device.type == "cpu" else DeviceTransfer(device)


def timed_fill(transfer: Transfer, slot: Slot, block: Block) -> float:
    """Fill a slot; return the seconds that it took."""
    began = time.perf_counter()
    transfer.fill(slot, block)
    return time.perf_counter() - began
