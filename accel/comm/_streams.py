# SPDX-License-Identifier: Apache-2.0
"""The one door to a device's streams: copies of batches, blocks that stream and snapshots order their work through it.

`DeviceStreams` is the host, which does everything at once; others are torch's streams of an accelerator, and in tests
`accel.testing.SimulatedDevice`, which does it in any order that the events allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import nn
from typing_extensions import override

DeviceStream: TypeAlias = Any  # made by the door that takes it
DeviceEvent: TypeAlias = Any


class DeviceStreams:
    """Streams, events and memory of one device. Here of the host: all is done when a call returns.

    Attributes:
        device: the device.
        is_asynchronous: whether its work runs next to the host, so that events are needed.
        is_pinnable: whether it copies to and from pinned memory while the host continues.
    """

    device: torch.device
    is_asynchronous: bool = False
    is_pinnable: bool = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def side(self) -> DeviceStream:
        """Return a new stream; None for the host, which has none."""
        return None

    def current(self) -> DeviceStream:
        """Return the calling thread's stream."""
        return None

    def name(self, stream: DeviceStream) -> int:
        """Return a stream's number, the same for each handle on it."""
        return 0

    def on(self, stream: DeviceStream) -> AbstractContextManager[object]:
        """Let the calling thread's work go to a stream. Not reentrant: one `with` at a time for a stream."""
        return nullcontext()

    def record(self, stream: DeviceStream) -> DeviceEvent:
        """Return an event after the stream's work so far."""
        return None

    def wait(self, stream: DeviceStream, event: DeviceEvent) -> None:
        """Let the stream's later work follow an event; the host continues."""

    def synchronize(self, what: DeviceStream | DeviceEvent) -> None:
        """Let the host wait for a stream's work so far, or for an event."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's memory is the device's."""
        return tensor.device == self.device

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the device, which belongs to the current stream."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return host memory that copies can use while the host continues."""
        return torch.empty(shape, dtype=dtype, device="cpu")

    def to(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device, by a copy on the current stream; the host waits unless it is pinned."""
        return tensor.to(self.device)

    def take(self, module: nn.Module) -> None:
        """Put a module's parameters and buffers on the device. Mutates it."""
        module.to(self.device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on the current stream; the host continues, and leaves both alone until it knows the copy's end."""
        target.copy_(source)

    def last_use(self, tensor: torch.Tensor, stream: DeviceStream) -> None:
        """Keep a tensor's memory, once freed, from reuse before the stream's work so far."""


class TorchStreams(DeviceStreams):
    """Streams of an accelerator, by torch."""

    is_asynchronous = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        # elsewhere the host waits for each copy: torch promises nothing of pinned memory there
        self.is_pinnable = device.type == "cuda"

    @override
    def side(self) -> DeviceStream:
        return torch.Stream(self.device)

    @override
    def current(self) -> DeviceStream:
        return torch.accelerator.current_stream(self.device)

    @override
    def name(self, stream: DeviceStream) -> int:
        return stream.stream_id

    @override
    def on(self, stream: DeviceStream) -> AbstractContextManager[object]:
        return stream

    @override
    def record(self, stream: DeviceStream) -> DeviceEvent:
        return stream.record_event()

    @override
    def wait(self, stream: DeviceStream, event: DeviceEvent) -> None:
        stream.wait_event(event)

    @override
    def synchronize(self, what: DeviceStream | DeviceEvent) -> None:
        what.synchronize()

    @override
    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    @override
    def to(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=tensor.is_pinned())

    @override
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    @override
    def last_use(self, tensor: torch.Tensor, stream: DeviceStream) -> None:
        tensor.record_stream(stream)


def streams_of(device: torch.device) -> DeviceStreams:
    """Return the door to a device; XLA, which orders work itself, has the host's."""
    return DeviceStreams(device) if device.type in ("cpu", "meta", "xla") else TorchStreams(device)
