# SPDX-License-Identifier: Apache-2.0
"""Batches to the device: on CUDA on a separate stream, so that copying and computing overlap; else at once.

An asynchronous copy from pinned memory is safe on CUDA only; the host waits for every other copy.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

import torch

from accel import xla
from accel.comm._streams import DeviceEvent, DeviceStreams
from accel.errors import TreeError
from accel.tree import Container
from accel.tree._walk import has_method, map_leaves, map_movable

T = TypeVar("T")
P = TypeVar("P")


def moved(
    items: Iterator[tuple[Any, T]], streams: DeviceStreams, containers: Sequence[Container] = (), *, ahead: bool
) -> Iterator[tuple[Any, T]]:
    """Yield each batch on the device, with its companion.

    On CUDA, `ahead` reads and copies one batch ahead of the one in use; the first is yielded at once.
    """
    if streams.is_pinnable:
        copier = _Copier(streams, containers)
        copies = one_ahead(items, copier.start) if ahead else ((copier.start(data), other) for data, other in items)
        return ((copier.finish(copy), other) for copy, other in copies)
    device = streams.device
    if device.type == "cpu":
        return items
    if device.type == "xla":
        return _by_steps(items, device, containers)
    return ((to_device(data, device, containers), other) for data, other in items)


def to_device(data: Any, device: torch.device, containers: Sequence[Container] = ()) -> Any:
    """Return a batch on the device, itself if that is the CPU; the host waits for the copy.

    Tensors and objects with `.to` move, the rest is kept. Raises `TreeError` for a container of an unknown kind.
    """
    return data if device.type == "cpu" else map_movable(lambda leaf: leaf.to(device), data, containers)


def check_movable(data: Any, containers: Sequence[Container] = ()) -> None:
    """Raise `TreeError` for a batch that could not be moved to another device, even if it stays on the CPU."""
    _ = map_movable(lambda leaf: leaf, data, containers)


def pin(data: Any) -> Any:
    """Return a batch in pinned memory, as far as it can be flattened or pins itself."""
    try:
        return map_leaves(lambda leaf: leaf.pin_memory() if _pins(leaf) else leaf, data, is_leaf=_pins)
    except TreeError:
        return data


def one_ahead(items: Iterator[tuple[Any, T]], start: Callable[[Any], P]) -> Generator[tuple[P, T]]:
    """Read one item ahead of the one in use, but for the first; an error of reading comes after the items before it."""
    for data, other in items:
        yield start(data), other
        break
    waiting: list[tuple[P, T]] = []
    failure: Exception | None = None
    while failure is None:
        try:
            data, other = next(items)
        except StopIteration:
            break
        except Exception as error:
            failure = error
        else:
            waiting.append((start(data), other))
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting
    if failure is not None:
        raise failure


def _by_steps(
    items: Iterator[tuple[Any, T]], device: torch.device, containers: Sequence[Container]
) -> Generator[tuple[Any, T]]:
    """Yield each batch, and end its computation as a step of XLA's, so that each step is the same graph."""
    for data, other in items:
        yield to_device(data, device, containers), other
        xla.end_step()


class _Copy:
    """A copy under way."""

    __slots__ = ("data", "done", "tensors")

    def __init__(self, data: Any, done: DeviceEvent, tensors: list[torch.Tensor]) -> None:
        self.data = data
        self.done = done
        self.tensors = tensors


class _Copier:
    """Copies to a device on a separate stream."""

    def __init__(self, streams: DeviceStreams, containers: Sequence[Container]) -> None:
        self._streams = streams
        self._containers = containers
        self._side = streams.side()

    def start(self, data: Any) -> _Copy:
        """Begin to copy a batch; from pinned memory without waiting."""
        tensors: list[torch.Tensor] = []

        def copy(leaf: Any) -> object:
            if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cpu" or not _has_one_memory(leaf):
                return leaf.to(self._streams.device)
            with self._streams.on(self._side):
                tensors.append(self._streams.to(leaf))
            return tensors[-1]

        moving = map_movable(copy, data, self._containers)
        return _Copy(moving, self._streams.record(self._side), tensors)

    def finish(self, copy: _Copy) -> Any:
        """Make later computation wait for the copy; return the batch."""
        current = self._streams.current()
        self._streams.wait(current, copy.done)
        for tensor in copy.tensors:  # its memory is not given to another copy while the computation may need it
            self._streams.last_use(tensor, current)
        return copy.data


def _has_one_memory(tensor: torch.Tensor) -> bool:
    """Return whether torch can note a stream's use of a tensor: of sparse and of older nested ones it cannot."""
    return tensor.layout is torch.jagged or (tensor.layout is torch.strided and not tensor.is_nested)


def _pins(node: object) -> bool:
    return has_method(node, "pin_memory")
