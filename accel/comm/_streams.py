# SPDX-License-Identifier: Apache-2.0
"""The one door to a device's streams: copies of batches, blocks that stream and snapshots order their work through it.

Its implementations are torch's streams of an accelerator, the host, which does everything at once, and in tests
`accel.testing.SimulatedDevice`, which does it in any order that the events allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

DeviceStream: TypeAlias = Any  # made by the door that takes it
DeviceEvent: TypeAlias = Any


class DeviceStreams(Protocol):
    """Streams, events and memory of one device.

    Attributes:
        device: the device.
        is_asynchronous: whether its work runs beside the host, so that events are needed.
        is_pinnable: whether it copies to and from pinned memory while the host goes on.
    """

    device: torch.device
    is_asynchronous: bool
    is_pinnable: bool

    def side(self) -> DeviceStream:
        """Return a new stream."""
        ...

    def current(self) -> DeviceStream:
        """Return the calling thread's stream."""
        ...

    def name(self, stream: DeviceStream) -> int:
        """Return a stream's number, the same for each handle on it."""
        ...

    def on(self, stream: DeviceStream) -> AbstractContextManager[object]:
        """Let the calling thread's work go to a stream. Not reentrant: one `with` at a time for a stream."""
        ...

    def record(self, stream: DeviceStream) -> DeviceEvent:
        """Return an event after the stream's work so far."""
        ...

    def wait(self, stream: DeviceStream, event: DeviceEvent) -> None:
        """Let the stream's later work follow an event; the host goes on."""
        ...

    def synchronize(self, what: DeviceStream | DeviceEvent) -> None:
        """Let the host wait for a stream's work so far, or for an event."""
        ...

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's memory is the device's."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the device, which belongs to the current stream."""
        ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return host memory that copies can use while the host goes on."""
        ...

    def to(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device, by a copy on the current stream; the host waits unless it is pinned."""
        ...

    def take(self, module: nn.Module) -> None:
        """Put a module's parameters and buffers on the device. Mutates it."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on the current stream; the host goes on, and leaves both alone until it knows the copy's end."""
        ...

    def last_use(self, tensor: torch.Tensor, stream: DeviceStream) -> None:
        """Keep a tensor's memory, once freed, from reuse before the stream's work so far."""
        ...


class TorchStreams:
    """Streams of an accelerator, by torch."""

    is_asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # elsewhere the host waits for each copy: torch promises nothing of pinned memory there
        self.is_pinnable = device.type == "cuda"

    def side(self) -> DeviceStream:
        """Return a new stream."""
        return torch.Stream(self.device)

    def current(self) -> DeviceStream:
        """Return the calling thread's stream."""
        return torch.accelerator.current_stream(self.device)

    def name(self, stream: DeviceStream) -> int:
        """Return a stream's number."""
        return stream.stream_id

    def on(self, stream: DeviceStream) -> AbstractContextManager[object]:
        """Let the calling thread's work go to a stream."""
        return stream

    def record(self, stream: DeviceStream) -> DeviceEvent:
        """Return an event after the stream's work so far."""
        return stream.record_event()

    def wait(self, stream: DeviceStream, event: DeviceEvent) -> None:
        """Let the stream's later work follow an event."""
        stream.wait_event(event)

    def synchronize(self, what: DeviceStream | DeviceEvent) -> None:
        """Let the host wait for a stream's work so far, or for an event."""
        what.synchronize()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's memory is the device's."""
        return tensor.device == self.device

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the device."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return pinned host memory."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def to(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device."""
        return tensor.to(self.device, non_blocking=tensor.is_pinned())

    def take(self, module: nn.Module) -> None:
        """Put a module's parameters and buffers on the device."""
        module.to(self.device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on the current stream."""
        target.copy_(source, non_blocking=True)

    def last_use(self, tensor: torch.Tensor, stream: DeviceStream) -> None:
        """Keep a tensor's memory from reuse before the stream's work so far."""
        tensor.record_stream(stream)


class HostStreams:
    """The host, and devices that answer like it: everything is done when its call returns."""

    is_asynchronous = False
    is_pinnable = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def side(self) -> DeviceStream:
        """Return nothing: the host has no streams."""
        return None

    def current(self) -> DeviceStream:
        """Return nothing."""
        return None

    def name(self, stream: DeviceStream) -> int:
        """Return 0."""
        return 0

    def on(self, stream: DeviceStream) -> AbstractContextManager[object]:
        """Change nothing."""
        return nullcontext()

    def record(self, stream: DeviceStream) -> DeviceEvent:
        """Return nothing: all is done."""
        return None

    def wait(self, stream: DeviceStream, event: DeviceEvent) -> None:
        """Return at once."""

    def synchronize(self, what: DeviceStream | DeviceEvent) -> None:
        """Return at once."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's memory is the device's."""
        return tensor.device == self.device

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the device."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return plain host memory."""
        return torch.empty(shape, dtype=dtype, device="cpu")

    def to(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device."""
        return tensor.to(self.device)

    def take(self, module: nn.Module) -> None:
        """Put a module's parameters and buffers on the device."""
        module.to(self.device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy."""
        target.copy_(source)

    def last_use(self, tensor: torch.Tensor, stream: DeviceStream) -> None:
        """Return at once."""


def streams_of(device: torch.device) -> DeviceStreams:
    """Return the door to a device; XLA, which orders work itself, has the host's."""
    return HostStreams(device) if device.type in ("cpu", "meta", "xla") else TorchStreams(device)
