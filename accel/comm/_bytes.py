# SPDX-License-Identifier: Apache-2.0
"""Bytes as tensors, and back."""

from __future__ import annotations

import ctypes

import torch


def as_bytes(data: torch.Tensor) -> bytes:
    """Copy a uint8 tensor on the CPU to bytes."""
    data = data.contiguous()
    return ctypes.string_at(data.data_ptr(), data.numel())


def as_tensor(data: bytes) -> torch.Tensor:
    """Copy bytes to a uint8 tensor on the CPU."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
