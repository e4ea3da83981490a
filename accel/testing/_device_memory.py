# SPDX-License-Identifier: Apache-2.0
"""Memory of a simulated device: CPU memory, poison until it is written and once it is freed; and clocks of streams
and host: accesses with nothing between them are races.

Freed memory is given out again to the stream that owned it. In program order, what a copy wrote to pinned memory is
poison to the host until it knows of the copy's end, and there for a copy to the device.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from accel.testing._process import outside_of_modes

Kind = Literal["device", "pinned"]

_UNWRITTEN, _FREED = 0xFF, 0xEE  # the former is NaN in every floating-point dtype
_ROUNDING = 512  # bytes: sizes up to the same multiple of it can have the same memory, as with CUDA's allocator
_CACHED = 256  # freed allocations that wait for another use


class Access(NamedTuple):
    """A read or write of a block's bytes."""

    actor: int  # the stream, or 0 for the host
    number: int  # the actor's number of operations with this one
    first: int  # first byte
    end: int  # first byte behind the last
    writes: bool  # whether they were written
    name: str  # operator, or "copy", "free" and "host"


class MemoryBlock:
    """An allocation.

    Attributes:
        kind: whether it is memory of the device, or pinned memory of the host.
        owner: number of the stream that it was made on.
        users: further streams that were named as its last users.
        bytes: its memory, alive until the device has seen the end of the last tensor on it.
        log: accesses that a later one may race with.
        unknown: copies to and from pinned memory with an end that the host does not know, in program order.
    """

    __slots__ = ("bytes", "kind", "log", "owner", "unknown", "users")

    def __init__(self, kind: Kind, owner: int, nbytes: int) -> None:
        self.kind: Kind = kind
        self.owner = owner
        self.users = set[int]()
        self.bytes = torch.full((_rounded(nbytes),), _UNWRITTEN, dtype=torch.uint8)[:nbytes]
        self.log = list[Access]()
        self.unknown = list[UnknownCopy]()

    def reused(self, nbytes: int, end: int) -> MemoryBlock:
        """Return a block in the memory of this one, which the owner freed by operation `end`."""
        block = MemoryBlock(self.kind, self.owner, 0)
        block.bytes = torch.empty(0, dtype=torch.uint8).set_(self.bytes.untyped_storage(), 0, (nbytes,), (1,))  # pyright: ignore[reportCallIssue, reportArgumentType] - not in the stub
        block.log.append(Access(self.owner, end, 0, nbytes, True, "free"))
        return block

    def poison(self) -> None:
        """Overwrite what was freed, as the next owner of the memory would."""
        _ = self.bytes.fill_(_FREED)

    def alias(self, tensor: Tensor) -> Tensor:
        """Return the same part of the memory as a tensor's, which does not keep the block from its end."""
        whole = torch.empty(0, dtype=tensor.dtype)
        storage = self.bytes.untyped_storage()
        return whole.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())  # pyright: ignore[reportCallIssue, reportArgumentType] - not in the stub

    # Pinned memory in program order

    def read_by_device(self, tensor: Tensor) -> Tensor:
        """Return the values of a part of the memory with what earlier copies wrote, also unknown to the host."""
        there = MemoryBlock(self.kind, self.owner, 0)
        there.bytes = self.bytes.clone()
        for copy in self.unknown:
            if copy.writes:
                _ = there.alias(copy.part).copy_(copy.values)
        return there.alias(tensor)

    def begin_copy(self, part: Tensor, values: Tensor, *, writes: bool) -> UnknownCopy:
        """Return a copy to a part of the memory, or from it, that the host does not know of.

        What it writes is poison until then, as no operator sees what reads it.
        """
        copy = UnknownCopy(part, values.clone(), writes)
        self.unknown.append(copy)
        if writes:
            _fill(part, _UNWRITTEN)
        return copy

    def settled_reads(self, target: Tensor) -> bool:
        """End unknown copies from the memory that a copy by the device is about to write to.

        Returns:
            Whether the host did not touch the memory.
        """
        first, end = span(target)
        read = [each for each in self.unknown if not each.writes and each.overlaps(first, end)]
        is_same = all(map(self._is_as_read, read))
        self.unknown = [each for each in self.unknown if each not in read]
        return is_same

    def end_copy(self, copy: UnknownCopy) -> bool:
        """Show the host what a copy wrote, but for what later ones write.

        Returns:
            Whether the host did not touch the source of a copy.
        """
        if copy not in self.unknown:  # a later copy by the device has ended it
            return True
        self.unknown.remove(copy)
        if not copy.writes:
            return self._is_as_read(copy)
        _ = copy.part.copy_(copy.values)
        for each in self.unknown:
            if each.writes:
                _fill(each.part, _UNWRITTEN)
        return True

    def _is_as_read(self, copy: UnknownCopy) -> bool:
        return torch.equal(_as_bytes(self.read_by_device(copy.part)), _as_bytes(copy.values))


class UnknownCopy:
    """A copy to pinned memory, or from it, with an end that the host does not know.

    Attributes:
        part: the part of the memory.
        values: those it writes or reads.
        writes: whether it writes to the memory.
    """

    __slots__ = ("part", "values", "writes")

    def __init__(self, part: Tensor, values: Tensor, writes: bool) -> None:
        self.part = part
        self.values = values
        self.writes = writes

    def overlaps(self, first: int, end: int) -> bool:
        """Return whether it touches some of these bytes."""
        own_first, own_end = span(self.part)
        return own_first < end and first < own_end


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _fill(part: Tensor, byte: int) -> None:
    poison = torch.full((part.numel() * part.itemsize,), byte, dtype=torch.uint8).view(part.dtype)
    _ = part.copy_(poison.view(part.shape))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ROUNDING) * _ROUNDING


class DeviceMemory:
    """The blocks of one device."""

    def __init__(self) -> None:
        self._blocks: dict[int, MemoryBlock] = {}
        self._freed = deque[MemoryBlock]()
        self._cached = deque[tuple[MemoryBlock, int]](maxlen=_CACHED)

    def new(
        self, shape: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype, kind: Kind, owner: int
    ) -> Tensor:
        """Return a tensor on a separate block; `stride` is None for a contiguous one."""
        with outside_of_modes():
            like = torch.empty(0, dtype=dtype, device="meta")
            like = like.new_empty(shape) if stride is None else like.new_empty_strided(shape, stride)
            nbytes = max(span(like)[1], dtype.itemsize, 1)
            block = self._reused(kind, owner, nbytes) or MemoryBlock(kind, owner, nbytes)
            address = block.bytes.data_ptr()
            # torch keeps the buffer for as long as a storage uses it, so it ends with the last tensor
            buffer: Any = (ctypes.c_uint8 * nbytes).from_address(address)
            weakref.finalize(buffer, self._freed.append, block).atexit = False
            self._blocks[address] = block
            storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
            return torch.empty(0, dtype=dtype).set_(storage, 0, like.size(), like.stride())  # pyright: ignore[reportCallIssue, reportArgumentType] - not in the stub

    def _reused(self, kind: Kind, owner: int, nbytes: int) -> MemoryBlock | None:
        """Return a block in memory that its owner has freed last; None without one of the size."""
        for at in reversed(range(len(self._cached))):
            former, end = self._cached[at]
            if (former.kind, former.owner) == (kind, owner) and _rounded(former.bytes.numel()) == _rounded(nbytes):
                del self._cached[at]
                return former.reused(nbytes, end)
        return None

    def cache(self, block: MemoryBlock, end: int) -> None:
        """Let the owner of a block that it freed by operation `end` have its memory again.

        The host hands it out at once, since the owner's later work runs after; other streams must wait for the owner.
        """
        self._cached.append((block, end))

    def block_of(self, tensor: Tensor) -> MemoryBlock | None:
        """Return the block of a tensor; None for memory of the host, and for tensors without memory."""
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return None
        return self._blocks.get(tensor.untyped_storage().data_ptr())

    def freed(self) -> Iterator[MemoryBlock]:
        """Yield the blocks that have lost their last tensor since the last call."""
        while self._freed:
            block = self._freed.popleft()
            del self._blocks[block.bytes.data_ptr()]
            yield block


def span(tensor: Tensor) -> tuple[int, int]:
    """Return a tensor's first byte in its storage, and the end of its last."""
    if not tensor.numel():
        return 0, 0
    first = tensor.storage_offset() * tensor.itemsize
    steps = sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(first), int(first + (1 + steps) * tensor.itemsize)


def storage_key(tensor: Tensor) -> int:
    """Return what tensors on one storage have in common, also of storages without memory."""
    return cast(Any, tensor.untyped_storage())._cdata


HOST = 0

Clock = dict[int, int]
"""The number of operations of each actor that come before."""


def join(clock: Clock, other: Mapping[int, int]) -> None:
    """Let what comes before another clock come before this one, too."""
    for actor, count in other.items():
        if clock.get(actor, 0) < count:
            clock[actor] = count


class RaceWatch:
    """Looks at each access in program order, by vector clocks (Mattern 1988; Lamport 1978).

    Attributes:
        host: the host's clock.
        races: a line for each pair of accesses with nothing between them.
    """

    def __init__(self) -> None:
        self.host: Clock = {HOST: 0}
        self.races = list[str]()
        self._unseen: list[tuple[int, int, Callable[[], object]]] = []

    def tick(self) -> int:
        """Count an operation of the host, and return its number."""
        self.host[HOST] += 1
        return self.host[HOST]

    def look(self, block: MemoryBlock, access: Access, clock: Mapping[int, int]) -> None:
        """Compare an access with those before it, and remember it."""
        kept = list[Access]()
        for former in block.log:
            is_after = former.actor == access.actor or clock.get(former.actor, 0) >= former.number
            overlaps = access.first < former.end and former.first < access.end
            if overlaps and not is_after and (access.writes or former.writes):
                self.races.append(_race(access, former, block))
            covers = access.first <= former.first and former.end <= access.end
            # what comes after this access also comes after the former one, if nothing is lost by forgetting it
            is_ordered = is_after and covers and (access.writes or (not former.writes and former.actor == access.actor))
            if not is_ordered:
                kept.append(former)
        block.log = [*kept, access]

    def join_host(self, clock: Mapping[int, int]) -> None:
        """Let the host know of what comes before a clock."""
        join(self.host, clock)
        known = [each for each in self._unseen if self.host.get(each[0], 0) >= each[1]]
        self._unseen = [each for each in self._unseen if each not in known]
        for _, _, then in known:
            _ = then()

    def once_known(self, actor: int, count: int, then: Callable[[], object]) -> None:
        """Call a function once the host knows of a stream's operation."""
        self._unseen.append((actor, count, then))


def _race(access: Access, former: Access, block: MemoryBlock) -> str:
    now = f"{access.name} on {_name(access.actor)} {'writes' if access.writes else 'reads'}"
    before = f"{former.name} on {_name(former.actor)} {'wrote' if former.writes else 'read'}"
    return f"{now}, {before}: nothing between them ({block.kind} memory)"


def _name(actor: int) -> str:
    return "the host" if actor == HOST else f"stream {actor}"
