# SPDX-License-Identifier: Apache-2.0
"""Blocks that pass through a device's slots, made from plain tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from accel.bigmodel.run._slots import (
    Block as Block,
    DeviceTransfer as DeviceTransfer,
    Slot as Slot,
    StreamedWeight,
    part as part,
)
from accel.bigmodel.run._supplies import Supply


def block_of(
    at: int, values: Mapping[str, Tensor], offsets: Sequence[int], dtype: torch.dtype = torch.float32
) -> Block:
    """Make a block of weights that are used in a dtype, each at its offset in bytes of a slot."""
    weights = [
        StreamedWeight(Supply(name, tuple(value.shape), dtype, value, None), offset, (), value)
        for (name, value), offset in zip(values.items(), offsets, strict=True)
    ]
    return Block(at, str(at), nn.Identity(), weights)
