# SPDX-License-Identifier: Apache-2.0
"""Activations of blocks in the host's memory between forward and backward, by copies on separate streams.

Each block runs in torch's hooks of saved tensors. A block's storages are copied out while it and the next block run,
and are freed at the end of the next one. Before a block's backward the storages before it are copied back.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from accel.comm._streams import DeviceStreams, streams_of
from accel.errors import ConfigError
from accel.mixins import Mixin, add_mixin
from accel.parallel._blocks import Select, selected
from accel.parallel._modules import note_module, notes_of, unwrap_model, written_class
from accel.parallel._private import runs_in_backward
from accel.tensors import local_part

M = TypeVar("M", bound=nn.Module)


class _PinnedPool:
    """Pinned memory by size; a buffer comes with the event of the copy that read it last."""

    def __init__(self, streams: DeviceStreams, most: int | None) -> None:
        self._streams = streams
        self._most = most
        self._free: dict[int, list[tuple[Tensor, Any]]] = defaultdict(list)
        self.held = 0

    def take(self, count: int) -> tuple[Tensor, Any] | None:
        """Return a buffer of so many bytes; None beyond the bound."""
        if self._free[count]:
            return self._free[count].pop()
        if self._most is not None and self.held + count > self._most:
            return None
        self.held += count
        return self._streams.pinned((count,), torch.uint8), None

    def give(self, count: int, buffer: Tensor, read: Any) -> None:
        """Take a buffer back, which a copy reads until an event."""
        self._free[count].append((buffer, read))


class _HostStorage:
    """A storage on the host; its buffer goes back to the pool with the last saved tensor of it."""

    def __init__(self, call: _BlockRun, count: int, buffer: Tensor, read: Any) -> None:
        self._pool = call.by.pool
        self.call = call
        self.count = count
        self.buffer = buffer
        self.read = read
        self.fetched: Tensor | None = None

    def __del__(self) -> None:
        self._pool.give(self.count, self.buffer, self.read)


class _HostTensor(NamedTuple):
    """A saved tensor: its storage, and its place in it."""

    stored: _HostStorage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _BlockRun:
    """One forward of a block.

    Args:
        by: streams and memory.
        weights: tensors that stay.
        before: the call of the block before; None for the first.
        name: of the block's class, for errors.
    """

    def __init__(self, by: _OffloadState, weights: _StayingTensors, before: _BlockRun | None, name: str) -> None:
        self.by = by
        self.before = before
        self._weights = weights
        self._addresses = weights.addresses()
        self._name = name
        self._stored: dict[int, weakref.ref[_HostStorage]] = {}
        self._kept: list[Tensor] = []  # storages that are being copied, and so must not be reused
        self._versions: list[tuple[Tensor, int]] = []
        self._copied: Any = None

    def pack(self, tensor: Tensor) -> Any:
        """Copy a saved tensor's storage to the host, if it is an activation of the device."""
        by = self.by
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_conj():
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < by.min_bytes or not by.streams.holds(tensor) or self._weights.has_shape(tensor):
            return tensor
        if storage.data_ptr() in self._addresses:
            return tensor
        stored = self._known(storage.data_ptr()) or self._copy_out(storage)
        if stored is None:
            return tensor
        self._versions.append((tensor, tensor._version))
        return _HostTensor(stored, tensor.dtype, tensor.shape, tensor.stride(), cast(int, tensor.storage_offset()))

    def _known(self, address: int) -> _HostStorage | None:
        for call in (self, self.before):
            # an address is a storage's as long as the call keeps it
            if call is not None and call._kept and (found := call._stored.get(address)) is not None:
                return found()
        return None

    def _copy_out(self, storage: torch.UntypedStorage) -> _HostStorage | None:
        by = self.by
        count = storage.nbytes()
        taken = by.pool.take(count)
        if taken is None:
            return None
        buffer, read = taken
        flat = _view(storage, storage.device, torch.uint8, (count,), (1,), 0)
        stored = _HostStorage(self, count, buffer, read)
        self._stored[storage.data_ptr()] = weakref.ref(stored)
        self._kept.append(flat)
        by.streams.wait(by.out, by.streams.record(by.streams.current()))
        if read is not None:
            by.streams.wait(by.out, read)
        with by.streams.on(by.out):
            by.streams.copy(buffer, flat)
        self._copied = by.streams.record(by.out)
        return stored

    def leave(self) -> None:
        """Free the storages once their copies are done, at the end of the next block."""
        if any(tensor._version != version for tensor, version in self._versions):
            raise ConfigError(
                "a tensor that the backward needs was changed in place while it was copied to the host",
                expected="blocks that leave saved tensors alone",
                got=f"a change in or after {self._name}",
                where="offload_activations",
                fix="Write x = x + y in place of x += y; or leave the block out, by select=.",
            )
        self._versions.clear()
        if self._copied is not None:
            self.by.streams.wait(self.by.streams.current(), self._copied)
        self._kept.clear()

    def fetch(self) -> None:
        """Begin to copy all storages back that are still needed."""
        by = self.by
        for reference in self._stored.values():
            stored = reference()
            if stored is None or stored.fetched is not None:
                continue
            there = by.streams.empty((stored.count,), torch.uint8)
            by.streams.wait(by.back, by.streams.record(by.streams.current()))
            by.streams.wait(by.back, self._copied)
            with by.streams.on(by.back):
                by.streams.copy(there, stored.buffer)
            stored.read = by.streams.record(by.back)
            stored.fetched = there

    def unpack(self, packed: Any) -> Tensor:
        """Return a saved tensor, and begin to fetch the tensors of the blocks before."""
        if not isinstance(packed, _HostTensor):
            return packed
        by = self.by
        stored = packed.stored
        if stored.fetched is None:
            stored.call.fetch()
        ahead, self.before = self.before, None
        for _ in range(by.prefetch):
            if ahead is None:
                break
            ahead.fetch()
            ahead = ahead.before
        by.streams.wait(by.streams.current(), stored.read)
        there = cast(Tensor, stored.fetched)
        return _view(there.untyped_storage(), there.device, packed.dtype, packed.shape, packed.stride, packed.offset)


def _view(
    storage: torch.UntypedStorage, device: torch.device, dtype: torch.dtype, shape: Any, stride: Any, offset: int
) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device).set_(cast(Any, storage), offset, shape, stride)


class _StayingTensors:
    """Tensors that stay on the device: parameters, buffers, and results computed only from parameters.

    torch shows a hook no history. A tensor of a weight's shape counts as a weight: a copy in autocast's dtype, or one
    that a quantized layer makes.
    """

    def __init__(self, block: nn.Module) -> None:
        held = [local_part(each) for each in (*block.parameters(), *block.buffers())]
        self._shapes = {tuple(each.shape) for each in held if each.ndim > 1}
        self._owners: list[tuple[nn.Module, str]] = []
        for each in block.modules():
            own = (*each.named_parameters(recurse=False), *each.named_buffers(recurse=False))
            self._owners += [(each, name) for name, _ in own]
            sizes = (getattr(each, "out_features", None), getattr(each, "in_features", None))
            if all(isinstance(size, int) for size in sizes):
                self._shapes.add(cast("tuple[int, ...]", sizes))

    def addresses(self) -> set[int]:
        """Return the addresses of the tensors that the block holds now, gathered ones among them."""
        held = (local_part(getattr(each, name)) for each, name in self._owners)
        return {each.untyped_storage().data_ptr() for each in held}

    def has_shape(self, tensor: Tensor) -> bool:
        """Return whether a tensor has the shape of a weight, or of a transposed one."""
        shape = tuple(tensor.shape)
        return shape in self._shapes or (*shape[:-2], *shape[:-3:-1]) in self._shapes


class _OffloadState:
    """Streams and pinned memory of a model's blocks. Copies of the model have their own.

    Attributes:
        last: the latest call with storages that are being copied; None for none.
    """

    def __init__(self, min_bytes: int, max_pinned_bytes: int | None, prefetch: int) -> None:
        self.min_bytes = min_bytes
        self.prefetch = prefetch
        self._most = max_pinned_bytes
        self._streams: DeviceStreams | None = None
        self.last: _BlockRun | None = None
        self._staying: weakref.WeakKeyDictionary[nn.Module, _StayingTensors] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return _OffloadState, (self.min_bytes, self._most, self.prefetch)

    @property
    def is_ready(self) -> bool:
        """Whether the streams are known."""
        return self._streams is not None

    @property
    def streams(self) -> DeviceStreams:
        """Those of the blocks' device."""
        assert self._streams is not None
        return self._streams

    def staying(self, block: nn.Module) -> _StayingTensors:
        """Return the tensors of a block that stay, from its first forward on."""
        if block not in self._staying:
            self._staying[block] = _StayingTensors(block)
        return self._staying[block]

    def use(self, streams: DeviceStreams) -> None:
        """Take the streams of a device, before the first forward of a model that is spread."""
        self._staying.clear()
        self._streams = streams
        self.out = streams.side()
        self.back = streams.side()
        self.pool = _PinnedPool(streams, self._most)


class _BlockPlace(NamedTuple):
    """A block's place among the blocks of its model."""

    by: _OffloadState
    is_first: bool
    is_last: bool


class Offloaded(Mixin, nn.Module):
    """A block with activations on the host between forward and backward. In front of recomputation, so that its
    inputs alone leave."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward in hooks of saved tensors."""
        place: _BlockPlace = cast(_BlockPlace, notes_of(self).get("offload"))
        by = place.by
        if not torch.is_grad_enabled() or runs_in_backward():
            return super().forward(*args, **kwargs)
        if not by.is_ready:
            by.use(streams_of(next(self.parameters()).device))
        before, by.last = by.last, None
        if place.is_last:  # the backward wants its activations at once
            output = super().forward(*args, **kwargs)
        else:
            by.last = call = _BlockRun(
                by, by.staying(self), None if place.is_first else before, written_class(self).__name__
            )
            with torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack):
                output = super().forward(*args, **kwargs)
        if before is not None:
            before.leave()
        return output


def offload_activations(
    model: M,
    select: Select = "repeated",
    *,
    min_bytes: int = 2**20,
    max_pinned_bytes: int | None = None,
    prefetch: int = 1,
) -> M:
    """Keep what the chosen blocks save for their backward in the host's pinned memory. No communication. Mutates them.

    Copies run during the computation. The last block's activations stay, since its backward comes first.
    Values and gradients are the same. Parameters, buffers and tensors of a weight's shape never move. Nothing is
    wrapped. Recomputed blocks only move their inputs; before `prepare_model` the order of both calls does not matter.

    Args:
        model: plain, or from `prepare_model`.
        select: blocks, as for `checkpoint_activations`.
        min_bytes: size of a storage from which it moves.
        max_pinned_bytes: bound of pinned memory; beyond it tensors stay on the device. None for no bound.
        prefetch: number of blocks for which activations are copied back before their backward.

    Returns:
        The model that was passed.

    Raises:
        ConfigError: nothing is chosen, or a number is out of its range; in a forward, a saved tensor that is changed in
            place while it is copied.

    Reference: torch.autograd.graph.saved_tensors_hooks; Rhu et al. 2016, "vDNN", arXiv:1602.08124.
    """
    for name, value, least in (("min_bytes", min_bytes, 1), ("prefetch", prefetch, 0)):
        if value < least:
            where = f"offload_activations, {name}="
            raise ConfigError(f"{name} is out of its range", expected=f"at least {least}", got=str(value), where=where)
    chosen = list(selected(unwrap_model(model), select, "offload_activations").values())
    by = _OffloadState(min_bytes, max_pinned_bytes, prefetch)
    add_mixin(chosen, Offloaded)
    for at, each in enumerate(chosen):
        note_module(each, offload=_BlockPlace(by, is_first=at == 0, is_last=at == len(chosen) - 1))
    return model


def use_streams(model: nn.Module, streams: DeviceStreams) -> None:
    """Let the blocks of a model copy by the streams of a context. Mutates the model."""
    seen: Collection[_OffloadState] = {each: None for each in map(_running, model.modules()) if each is not None}
    for each in seen:
        each.use(streams)


def _running(module: nn.Module) -> _OffloadState | None:
    place: _BlockPlace | None = notes_of(module).get("offload")
    return None if place is None else place.by
