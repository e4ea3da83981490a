# SPDX-License-Identifier: Apache-2.0
"""A simulated device: its streams come to their work in program order, or in any order that the events allow.

`_device_memory.py` has its memory and the clocks that find races, `_device_operators.py` the mode that gives each of
torch's operators to the current stream.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accel.comm._streams import DeviceStream, DeviceStreams
from accel.errors import ConfigError
from accel.terminal import show_names
from accel.testing._device_memory import HOST, Access, Clock, DeviceMemory, Kind, MemoryBlock, RaceWatch, join
from accel.testing._device_operators import DeviceMode, copy_to_device
from accel.testing._process import outside_of_modes
from accel.testing._sites import SimulationError

_ACTORS = 5  # of an order: the host, the computing stream, two others, and the allocator
_ALLOCATOR = -1


@dataclass(frozen=True)
class StreamOrder:
    """An order in which a device's streams and the host come to their work.

    Of the streams with an operation that may run, the one of the lowest rank runs it: at once if its rank is below the
    host's, else when somebody waits for it.

    Attributes:
        ranks: of the host, the computing stream, two further streams, and the allocator, which poisons what is freed.
        changes: (tick, actor, rank): what a rank becomes at a call.
    """

    ranks: tuple[int, ...]
    changes: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def drawn(cls, seed: int) -> StreamOrder:
        """Return the order of a seed, with three changes in the first 60 calls."""
        draw = random.Random(seed)
        ranks = draw.sample(range(_ACTORS), _ACTORS)
        changes = [(draw.randrange(60), draw.randrange(_ACTORS), draw.randrange(-1, _ACTORS + 1)) for _ in range(3)]
        return cls(tuple(ranks), tuple(changes))


STREAM_ORDERS = tuple(StreamOrder((*ranks, 3, 4)) for ranks in itertools.permutations(range(3)))
"""The orders of the host, the computing stream and the stream of copies, which found each planted fault."""


class StreamRace(SimulationError):  # noqa: N818 - what everybody calls it
    """Two accesses to memory of a device had nothing between them that orders them."""


class Operation:
    """Work of a stream: it runs after that before it and after the events that the stream waits for."""

    __slots__ = ("after", "done", "run")

    def __init__(self, run: Callable[[], object], after: Sequence[Operation]) -> None:
        self.run: Callable[[], object] | None = run
        self.after = after
        self.done = False

    def is_ready(self) -> bool:
        """Whether all that it waits for is done."""
        return all(each.done for each in self.after)

    def finish(self) -> None:
        """Do the work, and forget what it held."""
        assert self.run is not None
        with outside_of_modes(), torch.inference_mode():  # which may also write to tensors made in inference mode
            _ = self.run()
        self.done, self.run, self.after = True, None, ()


class SimulatedStream:
    """A stream of a simulated device.

    Attributes:
        number: 1 for the computing stream; `_ALLOCATOR` for the allocator's own.
        clock: operations before its next one.
        queue: its work that has not run.
        last: its last operation.
        waits: operations that its next one waits for.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.clock: Clock = {}
        self.queue = deque[Operation]()
        self.last: Operation | None = None
        self.waits = list[Operation]()


@dataclass(frozen=True)
class SimulatedEvent:
    """The end of a stream's work so far."""

    operations: tuple[Operation, ...]
    clock: Clock


class SimulatedDevice(DeviceStreams):
    """A device of CPU memory for `simulate(..., streams=)`, with streams that behave as a GPU's may.

    Without an order, work runs in program order, and each read and write is compared with those before it: two of the
    same bytes, one of them a write, with no event between them are a race, and `simulate` raises `StreamRace`. With an
    order, work waits in queues and runs late, as the order has it; a program that waits for the right events computes
    the same values in each. Memory is poison until it is written and once it is freed.

    Not modelled: torn reads, the default stream's implicit waits, graphs, compiled code, and torch's streams,
    such as in DDP and FSDP2; collectives wait for the whole device. `numpy`, `tolist`, `repr` and `data_ptr` read
    memory unseen. That a program passes here does not show that a GPU behaves as modelled.

    Args:
        seed: of an order that is drawn; None for program order.
        order: the order, in place of a seed.

    Attributes:
        device: the CPU: the memory is the CPU's.
        order: the order; None for program order.
        waits: a line for each wait of the host.

    Reference: vector clocks (Mattern 1988); orders by random priorities with a few changes (Burckhardt et al. 2010).
    """

    is_asynchronous = True
    is_pinnable = True

    def __init__(self, seed: int | None = None, *, order: StreamOrder | None = None) -> None:
        if seed is not None and order is not None:
            raise ConfigError("an order given twice", expected="seed= or order=", got="both", where="SimulatedDevice")
        self.device = torch.device("cpu")
        self.order = StreamOrder.drawn(seed) if seed is not None else order
        self.waits = list[str]()
        self.memory = DeviceMemory()
        self.watch = RaceWatch() if self.order is None else None
        self._ranks = list(self.order.ranks) if self.order is not None else []
        self._changes = list(self.order.changes) if self.order is not None else []
        self._ticks = 0
        self._streams = [SimulatedStream(1)]
        self._allocator = SimulatedStream(_ALLOCATOR)
        self._here = _Thread()
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"SimulatedDevice({'program order' if self.order is None else self.order})"

    def for_rank(self, rank: int) -> SimulatedDevice:
        """Return a device of the same order for one of several ranks."""
        return SimulatedDevice(order=self.order)

    @contextmanager
    def active(self) -> Generator[None]:
        """Let the thread's operators on the device's memory be the device's work; raise `StreamRace` at the end."""
        with DeviceMode(self):
            self._here.modes += 1
            try:
                yield
            finally:
                self._here.modes -= 1
                self.finish()
        if self.watch is not None and self.watch.races:
            races = self.watch.races
            raise StreamRace(
                f"a race on the device: {show_names(races, 1)}",
                expected="an event between the two: record it on one stream, and let the other wait for it",
                got="\n".join(races[:5]),
            )

    # Streams and events

    def side(self) -> DeviceStream:
        """Return a new stream."""
        with self._lock:
            self._streams.append(SimulatedStream(len(self._streams) + 1))
            return self._streams[-1]

    def current(self) -> DeviceStream:
        """Return the calling thread's stream."""
        return self._here.streams[-1] if self._here.streams else self._streams[0]

    def name(self, stream: DeviceStream) -> int:
        """Return a stream's number."""
        return stream.number

    @contextmanager
    def on(self, stream: DeviceStream) -> Generator[None]:
        """Let the calling thread's work go to a stream."""
        self._here.streams.append(stream)
        try:
            if self._here.modes:
                yield
            else:  # a thread that the caller has started
                with DeviceMode(self):
                    yield
        finally:
            _ = self._here.streams.pop()

    def record(self, stream: DeviceStream) -> SimulatedEvent:
        """Return an event after the stream's work so far."""
        with self._lock:
            self.settle()
            last = () if stream.last is None else (stream.last,)
            clock = dict(stream.clock)
            if self.watch is not None:
                join(clock, self.watch.host)
            self._tick()
            return SimulatedEvent((*last, *stream.waits), clock)

    def wait(self, stream: DeviceStream, event: SimulatedEvent) -> None:
        """Let the stream's later work follow an event."""
        with self._lock:
            self.settle()
            stream.waits += [each for each in event.operations if not each.done]
            join(stream.clock, event.clock)
            self._tick()

    def synchronize(self, what: DeviceStream | SimulatedEvent) -> None:
        """Let the host wait for a stream's work so far, or for an event."""
        self.host_waits(what, "synchronize")

    def host_waits(self, what: SimulatedStream | SimulatedEvent, why: str) -> None:
        """Let the host wait, and note why."""
        with self._lock:
            event = what if isinstance(what, SimulatedEvent) else self.record(what)
            self.waits.append(why)
            self._force(event.operations)
            if self.watch is not None:
                self.watch.join_host(event.clock)

    def finish(self) -> None:
        """Do all work; the host knows of it."""
        with self._lock:
            self.settle()
            for stream in (*self._streams, self._allocator):
                self._force([stream.last] if stream.last is not None else [])
                if self.watch is not None:
                    self.watch.join_host(stream.clock)

    # Memory

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor's memory is the device's."""
        block = self.memory.block_of(tensor)
        return block is not None and block.kind == "device"

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory of the device, which belongs to the current stream."""
        with self._lock:
            self.settle()
        return self.new(shape, None, dtype, "device")

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return pinned memory of the host."""
        return self.new(shape, None, dtype, "pinned")

    def new(self, shape: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype, kind: Kind) -> Tensor:
        """Return memory of a kind and layout."""
        with self._lock:
            return self.memory.new(shape, stride, dtype, kind, self.current().number)

    def to(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device, by a copy on the current stream."""
        if self.holds(tensor):
            return tensor
        there = self.new(tensor.shape, None, tensor.dtype, "device")
        self.copy(there, tensor.detach())
        return there.requires_grad_(tensor.requires_grad)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy on the current stream; the host does not wait."""
        copy_to_device(self, target, source, waits=False)

    def last_use(self, tensor: Tensor, stream: DeviceStream) -> None:
        """Keep a tensor's memory, once freed, from reuse before the stream's work so far."""
        block = self.memory.block_of(tensor)
        if block is not None:
            block.users.add(stream.number)

    def take(self, module: nn.Module) -> None:
        """Put a module's parameters and buffers on the device. Mutates it."""
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.data = self.to(tensor.data)

    def settle(self) -> None:
        """Poison blocks that have ended: the allocator may reuse one after its owner's and its users' work so far."""
        for block in self.memory.freed():
            if block.kind == "pinned":  # torch's allocator of pinned memory waits for the copies that it knows of
                continue
            owners = {block.owner, *block.users}
            stream = self._streams[block.owner - 1]
            if len(owners) > 1:
                stream = self._allocator
                for number in owners:
                    self.wait(stream, self.record(self._streams[number - 1]))
            end = self.queue(stream, block.poison, [(block, 0, block.bytes.numel(), True)], "free")
            if len(owners) == 1:
                self.memory.cache(block, end)

    # Work

    def queue(
        self,
        stream: SimulatedStream,
        run: Callable[[], object],
        accesses: Sequence[tuple[MemoryBlock, int, int, bool]],
        name: str,
    ) -> int:
        """Give work to a stream, which does it at once in program order; return its number there."""
        operation = Operation(run, stream.waits)
        stream.waits, stream.last = [], operation
        count = stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        if self.watch is None:
            stream.queue.append(operation)
            self._tick()
            return count
        join(stream.clock, self.watch.host)
        for block, first, end, writes in accesses:
            self.watch.look(block, Access(stream.number, count, first, end, writes, name), stream.clock)
        operation.finish()
        return count

    def look_by_host(self, accesses: Sequence[tuple[MemoryBlock, int, int, bool]], name: str) -> None:
        """Compare accesses of the host with those before them."""
        if self.watch is not None:
            count = self.watch.tick()
            for block, first, end, writes in accesses:
                self.watch.look(block, Access(HOST, count, first, end, writes, name), self.watch.host)

    def locked(self) -> threading.RLock:
        """Return the lock of what follows from a call."""
        return self._lock

    def _tick(self) -> None:
        """Let streams ranked before the host do what is ready."""
        if self.order is None:
            return
        for tick, actor, rank in self._changes:
            if tick == self._ticks:
                self._ranks[actor] = rank
        self._ticks += 1
        while (stream := self._next()) is not None and self._rank(stream) < self._ranks[HOST]:
            stream.queue.popleft().finish()

    def _force(self, operations: Sequence[Operation]) -> None:
        while not all(each.done for each in operations):
            stream = self._next()
            assert stream is not None  # no operation waits for a later one
            stream.queue.popleft().finish()

    def _next(self) -> SimulatedStream | None:
        streams = (*self._streams, self._allocator)
        ready = [each for each in streams if each.queue and each.queue[0].is_ready()]
        return min(ready, key=self._rank, default=None)

    def _rank(self, stream: SimulatedStream) -> int:
        return self._ranks[_ACTORS - 1 if stream.number == _ALLOCATOR else min(stream.number, _ACTORS - 2)]


class _Thread(threading.local):
    """A thread's streams, and how often it has entered the mode."""

    def __init__(self) -> None:
        self.streams: list[Any] = []
        self.modes = 0
        # A thread that has never asked computes matmuls with OpenMP's default, and so rounds unlike the others: any of
        # them may come to an operation.
        _ = torch.get_num_threads()
