# SPDX-License-Identifier: Apache-2.0
"""The two packages behind one set of functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accel.engines.quantized import _bitsandbytes, _torchao
from accel.engines.quantized._config import Bitsandbytes, Quantization
from accel.engines.quantized._packages import package
from accel.tensors import Packed


def check_installed(config: Quantization) -> None:
    """Raise `MissingExtraError` unless the package of a record imports."""
    _ = package("bitsandbytes" if isinstance(config, Bitsandbytes) else "torchao.quantization")


def take_apart(module: nn.Module, key: str, tensor: Any) -> Packed | None:
    """Return a parameter of a module as plain tensors; None for one that is no quantized weight.

    Args:
        module: the module.
        key: name of the parameter in it.
        tensor: the parameter, of a class of bitsandbytes or torchao.
    """
    if type(tensor).__module__.partition(".")[0] == "bitsandbytes":
        return _bitsandbytes.take_apart(module, tensor)
    return _torchao.take_apart(key, tensor) if hasattr(tensor, "__tensor_flatten__") else None


def quantize(weight: torch.Tensor, config: Quantization) -> Packed:
    """Quantize a matrix on its device."""
    if isinstance(config, Bitsandbytes):
        return _bitsandbytes.quantize(weight, config)
    return _torchao.quantize(weight, config)


def empty(shape: tuple[int, int], dtype: torch.dtype, config: Quantization) -> Packed:
    """Return a quantized weight without values."""
    if isinstance(config, Bitsandbytes):
        return _bitsandbytes.empty(shape, dtype, config)
    return _torchao.empty(shape, dtype, config)


def empty_layer(old: nn.Linear, config: Quantization) -> nn.Linear:
    """Return a layer with another one's bias, whose weight is still to come."""
    if isinstance(config, Bitsandbytes):
        return _bitsandbytes.empty_layer(old, config)
    return _torchao.empty_layer(old, config)
