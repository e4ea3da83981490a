# SPDX-License-Identifier: Apache-2.0
"""Values and bytes of a simulated device, read behind its streams."""

from __future__ import annotations

import gc
from typing import Any

from torch import Tensor


def read(streams: Any, tensor: Tensor) -> Tensor:
    """A tensor of the device, copied to the host after the work before it."""
    there = streams.pinned(tensor.shape, tensor.dtype)
    streams.copy(there, tensor.detach())
    streams.synchronize(streams.current())
    return there.clone()


def alive(streams: Any) -> int:
    """Bytes of the device that tensors hold after all work."""
    gc.collect()
    streams.settle()
    return sum(each.bytes.numel() for each in list(streams.memory._blocks.values()) if each.kind == "device")
