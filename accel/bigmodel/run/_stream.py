# SPDX-License-Identifier: Apache-2.0
"""The streamed blocks of one device: which slot holds which, which calls use them, and what is fetched next."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import nn

from accel.bigmodel.run._slots import Block, Slot, SlotTransfer, put_in
from accel.errors import AccelError, StreamError
from accel.errors._base import describe, rebuild


@dataclass(frozen=True, eq=False, slots=True)
class BlockCall:
    """A call of a block."""

    block: Block  # the block
    slot: Slot | None  # the slot that the call uses; None if its weights are fetched one by one
    plain: bool  # whether autograd records nothing, so that the slot's tensors may be in the model


def drop_abandoned(calls: list[BlockCall], release: Callable[[BlockCall], None]) -> None:
    """Release a thread's calls that no longer run: torch runs no hook after a KeyboardInterrupt. Mutates `calls`."""
    running = running_modules()
    while calls and id(calls[-1].block.module) not in running:
        release(calls.pop())


def running_modules() -> set[int]:
    """Return the ids of the modules that the calling thread is calling."""
    found: set[int] = set()
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        # torch runs a module that has hooks in a function `inner` of `_call_impl`.
        owner = frame.f_locals.get("self") if frame.f_code.co_name in ("_call_impl", "inner") else None
        if isinstance(owner, nn.Module):
            found.add(id(owner))
        frame = frame.f_back
    return found


class Fills(Protocol):
    """The owner of slots."""

    def fill_expected(self) -> None:
        """Fill slots until nothing more is worth fetching."""
        ...


class Feeder:
    """A thread that fills slots when it is woken, until it is closed or its owner is gone.

    The interpreter's exit closes it too, after the read that it is in.
    """

    def __init__(self, owner: Fills, name: str) -> None:
        self._wakes = SimpleQueue[bool]()
        # The thread holds its owner weakly: a model that is dropped without close() is freed.
        self._thread = threading.Thread(
            target=_feed, args=(weakref.ref(owner), self._wakes), name=f"accel-feeder-{name}", daemon=True
        )
        self._thread.start()
        self._stop = weakref.finalize(owner, _stop, self._wakes, self._thread)
        self.wake = self._wakes.put

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs. A process that another one forks has none of its threads."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread, after the read that it is in."""
        self._stop()


def _feed(owner: weakref.ref[Fills], wakes: SimpleQueue[bool]) -> None:
    while wakes.get():
        found = owner()
        if found is None:
            return
        found.fill_expected()
        del found  # or the thread would keep the model alive


def _stop(wakes: SimpleQueue[bool], thread: threading.Thread) -> None:
    wakes.put(False)
    # The feeder itself may drop the last reference to the owner, and cannot wait for itself.
    if thread is not threading.current_thread():
        thread.join()


def closed_model(where: str) -> StreamError:
    """Return the error of a use after `close`; `where` is a block or weight."""
    return StreamError(
        "the dispatched model is closed",
        where=where,
        fix="Call the model inside of `with accel.dispatch_model(...)`, or dispatch it again.",
    )


def forked_model(where: str) -> StreamError:
    """Return the error of a use in a forked process, which lacks the model's threads."""
    return StreamError(
        "the thread that fetches blocks is not in this process",
        where=where,
        fix="Dispatch the model after the fork, in each process that calls it.",
    )


def changed_block(name: str) -> StreamError:
    """Return the error of a block that has written to its slot, or has replaced its tensors."""
    return StreamError(
        "a streamed block has changed its own weights or buffers, and the change is lost",
        where=name,
        fix="Keep its segment on the device that computes.",
    )


def failed_fill(error: Exception, name: str) -> AccelError:
    """Return the error of a block's fill as one of this package: new each time, of the same type if it has one."""
    if isinstance(error, AccelError):
        return rebuild(describe(error))
    return StreamError(f"{name!r} could not be fetched", got=f"{type(error).__name__}: {error}", where=name)


class ObservedOrder:
    """The successor of each block: the successor in the plan until it ran once, then the block that followed it last.

    Blocks are numbers from 0 in the order of the plan.
    """

    def __init__(self, count: int) -> None:
        self._next = [*range(1, count), 0]
        self.last = count - 1

    def ran(self, block: int) -> bool:
        """Note that a block runs; return whether another one was expected."""
        surprise = self._next[self.last] != block
        self._next[self.last] = block
        self.last = block
        return surprise

    def ahead(self, count: int) -> list[int]:
        """Return at most `count` blocks that are expected after the last one, the nearest first, each once."""
        found: list[int] = []
        block = self._next[self.last]
        while len(found) < count and block != self.last and block not in found:
            found.append(block)
            block = self._next[block]
        return found


def choose_fill(
    held: Sequence[int | None], free: Sequence[bool], demanded: Sequence[int], ahead: Sequence[int]
) -> tuple[int, int] | None:
    """Return the block to fetch next and its slot, or None; `held` and `free` are by slot, the others nearest first.

    A demanded block comes first. Others come in the order expected, and replace only a block that is wanted later.
    """
    spare = [slot for slot, is_free in enumerate(free) if is_free]
    if not spare:
        return None
    distance = {block: at for at, block in enumerate(ahead)}

    def wanted(slot: int) -> tuple[bool, int]:
        block = held[slot]
        return block is None, len(ahead) if block is None else distance.get(block, len(ahead))

    # An empty slot, else the slot of the block with the furthest next use, by Belady's rule.
    victim = max(spare, key=wanted)
    for block in demanded:
        if block not in held:
            return block, victim
    # No further ahead than there are slots: such a block would replace one that is needed before it.
    for at, block in enumerate(ahead[: len(held)]):
        if block not in held and at < wanted(victim)[1]:
            return block, victim
    return None


class Stream:
    """Blocks that pass through the slots of one device.

    All fields of blocks and slots change under one lock. `enter` and `leave` are called around each call of a block, by
    any thread; the feeder's thread fills slots, or without one the thread that waits.

    Args:
        blocks: the blocks.
        slots: the slots.
        transfer: fills a slot.
        feeds: whether a separate thread fills slots; False where that takes no longer than to wake one.
    """

    def __init__(
        self, blocks: Sequence[Block], slots: Sequence[Slot], transfer: SlotTransfer, *, feeds: bool = True
    ) -> None:
        self.blocks = blocks
        self.slots = slots
        self._transfer = transfer
        self._ahead = 0
        self._scarce = False
        self._order = ObservedOrder(len(blocks))
        self._lock = threading.Lock()
        self._filled = threading.Condition(self._lock)
        self._demanded: list[int] = []
        self._closed = False
        self._calls = threading.local()
        self._feeder = Feeder(self, blocks[0].name) if feeds else None
        self._wake: Callable[[bool], object] = self._feeder.wake if self._feeder else self._notify

    def start(self, *, prefetch: bool) -> None:
        """Begin to fetch blocks ahead of their use, if `prefetch`."""
        if prefetch:
            # More than the slots, as the distance of the blocks that they hold decides which one gives way.
            self._ahead = 2 * len(self.slots)
            self._scarce = len(self.slots) < len(self.blocks)  # else no call makes room for another block
            self._wake(True)

    def calls(self) -> list[BlockCall]:
        """Return the calls of blocks that the calling thread is in, the outermost first."""
        try:
            return self._calls.stack
        except AttributeError:
            self._calls.stack = list[BlockCall]()
            return self._calls.stack

    def enter(self, block: Block) -> None:
        """Take a slot that holds the block, and put its tensors into the model if nothing may outlive the call."""
        # Autograd keeps what operators read. Of placeholders that is no memory, and backward fetches them again; the
        # slot would hold another block by then.
        plain = not torch.is_grad_enabled()
        calls = self.calls()
        if calls:
            drop_abandoned(calls, self._release)
        with self._lock:
            try:
                # A call inside of another block's call never waits for a slot: that one may hold the last.
                slot = self._take(block, plain=plain, nested=bool(calls))
            except BaseException:
                if self._demanded:  # another thread may wait for the slot that this call gives up
                    self._wake(True)
                raise
        calls.append(BlockCall(block, slot, plain))
        # Computation waits for the copy on the device; this thread does not, and other threads need the lock.
        if slot is not None and slot.filled is not None:
            self._transfer.arrived(slot)

    def _take(self, block: Block, *, plain: bool, nested: bool) -> Slot | None:
        """Give a call its slot, and put tensors or placeholders into the model; the lock is held."""
        if self._closed:
            raise closed_model(block.name)
        surprise = self._order.ran(block.index)
        slot = block.slot
        if slot is not None and slot.ready and slot.failed is None:
            block.hits += 1
        elif nested:
            slot = None
            block.waits += 1
        else:
            slot = self._wait(block)
        if slot is not None:
            # Threads may share a block: while one of them needs placeholders, none gets the slot's tensors.
            if plain and not block.absents and not block.placed:
                put_in(block, slot)
            slot.users += 1
        if slot is None or not plain:
            block.absents += 1
            block.put_out()
        # Blocks were fetched for another order.
        if surprise:
            self._wake(True)
        return slot

    def leave(self, block: Block) -> None:
        """End the thread's innermost call of a block, none if `enter` raised; raise if it has changed the weights."""
        calls = self.calls()
        if calls and calls[-1].block is block:
            self._release(calls.pop())

    def _release(self, call: BlockCall) -> None:
        block, slot = call.block, call.slot
        if slot is not None:
            # Noted before the slot can be given away: its next fill waits, on the device, for what was computed so far.
            self._transfer.left(slot)
        changed = False
        with self._lock:
            if slot is None or not call.plain:
                block.absents -= 1
            if slot is not None:
                changed = self._give_back(slot, block)
        if changed:
            raise changed_block(block.name)

    def _give_back(self, slot: Slot, block: Block) -> bool:
        """End one use of a slot; the lock is held. Return whether a call has changed what the slot holds."""
        slot.users -= 1
        if not slot.users:
            block.put_out()
        # torch counts writes to memory, through any view of it.
        changed = block.is_replaced or slot.memory._version != slot.version
        # The last user empties a changed slot. The others used the changed values, so they raise too.
        if slot.users:
            return changed
        if changed:
            block.is_replaced = False
            slot.views.pop(block.index, None)  # its tensors may have other memory now
            slot.empty()
        # With a slot for each block nothing is left to fetch, and to wake a thread takes longer than all else here.
        if self._scarce or self._demanded:
            self._wake(True)
        return changed

    def _wait(self, block: Block) -> Slot:
        """Wait until a slot holds the block; the lock is held before and after. Raises the error of a failed fill."""
        began = time.perf_counter()
        block.waits += 1
        block.waiting += 1
        try:
            while (slot := block.slot) is None or not slot.ready:
                if slot is None and block.index not in self._demanded:
                    self._demanded.append(block.index)
                    self._wake(True)
                # Without a feeder the thread that waits fills the slot itself.
                claimed = self._claim() if self._feeder is None else None
                if claimed is None and self._feeder is not None and not self._feeder.is_alive:
                    raise closed_model(block.name) if self._closed else forked_model(block.name)
                if claimed is None:
                    self._filled.wait()
                else:
                    # A fill takes long; calls of other blocks begin and end meanwhile.
                    self._lock.release()
                    try:
                        self._fill(*claimed)
                    finally:
                        self._lock.acquire()
                if self._closed:
                    raise closed_model(block.name)
        finally:
            block.waiting -= 1
            block.waited_s += time.perf_counter() - began
        if slot.failed is not None:
            # Emptied, so that the next call tries again.
            error = slot.failed
            slot.empty()
            if not isinstance(error, Exception):
                raise error
            raise failed_fill(error, block.name) from error
        return slot

    def fill_expected(self) -> None:
        """Fill slots until nothing more is worth fetching. Called by the feeder's thread."""
        while True:
            with self._lock:
                claimed = self._claim()
            if claimed is None:
                return
            self._fill(*claimed)

    def _claim(self) -> tuple[Block, Slot] | None:
        """Give the slot that is to be filled next to its block; the lock is held. None if nothing is to be filled."""
        chosen = None if self._closed else self._choose()
        if chosen is not None:
            block, slot = chosen
            slot.empty()
            slot.block, block.slot = block, slot
        return chosen

    def _fill(self, block: Block, slot: Slot) -> None:
        failed: BaseException | None = None
        try:
            # Whatever mode the thread is in: memory that inference mode has written never takes part in autograd.
            with torch.inference_mode(False), torch.no_grad():
                self._transfer.fill(slot, block)
                slot.view(block)
        except BaseException as error:  # raised in the call that needs the block
            failed = error
        # A graph that has kept the slot's tensors raises in backward, and does not compute with another block's.
        torch.autograd.graph.increment_version(slot.memory)
        with self._lock:
            slot.version = slot.memory._version
            slot.failed = failed
            slot.ready = True
            block.moved_bytes += 0 if failed else sum(weight.supply.nbytes for weight in block.weights)
            self._filled.notify_all()

    def _notify(self, _: bool) -> None:
        """Wake the threads that wait, one of which may fill a slot now; the lock is held."""
        self._filled.notify_all()

    def _choose(self) -> tuple[Block, Slot] | None:
        held = [None if slot.block is None else slot.block.index for slot in self.slots]
        free = [slot.block is None or (slot.ready and not slot.users and not slot.block.waiting) for slot in self.slots]
        self._demanded = [block for block in self._demanded if block not in held]
        chosen = choose_fill(held, free, self._demanded, self._order.ahead(self._ahead))
        return None if chosen is None else (self.blocks[chosen[0]], self.slots[chosen[1]])

    def here(self, block: Block, weight: int) -> torch.Tensor | None:
        """Return a weight of a block: on its slot within a call of it, else a copy; None if no slot has it."""
        slot = next((call.slot for call in reversed(self.calls()) if call.block is block and call.slot), None)
        # No copy: the call keeps the slot until it ends.
        if slot is not None:
            return slot.view(block).tensors[weight].detach()
        with self._lock:
            if self._closed:
                raise closed_model(block.name)
            slot = block.slot
            if slot is None or not slot.ready or slot.failed is not None:
                return None
            slot.users += 1  # it stays until the copy is made
        changed = False
        try:
            self._transfer.arrived(slot)
            copy = slot.view(block).tensors[weight].detach().clone()
        finally:
            self._transfer.left(slot)
            with self._lock:
                changed = self._give_back(slot, block)
        if changed:
            raise changed_block(block.name)
        return copy

    def is_in_call(self, block: Block) -> bool:
        """Return whether the calling thread is in a call of a block that has a slot."""
        return any(call.block is block and call.slot is not None for call in self.calls())

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """End the feeder, and wake threads that wait for a block, which raise. Idempotent."""
        with self._lock:
            self._closed = True
            # Calls that still run, or that an interrupt has ended without their hooks, lose the slots' tensors.
            for block in self.blocks:
                block.put_out()
            self._filled.notify_all()
        # Outside of the lock, which the feeder takes to end its fill.
        if self._feeder is not None:
            self._feeder.close()
