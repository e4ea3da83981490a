# SPDX-License-Identifier: Apache-2.0
"""Safetensors' names of torch's dtypes, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.errors import check_choice

if TYPE_CHECKING:
    import torch

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def torch_name(name: str) -> str:
    """Return torch's name of a dtype by that of safetensors, as `format_name` gives it."""
    return next(key for key, known in _NAMES.items() if known == name)


def format_name(dtype: torch.dtype | str, *, where: str) -> str:
    """Return safetensors' name of a floating-point dtype: of torch.bfloat16 and of "bfloat16", "BF16".

    Raises:
        ConfigError: no such dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if name in _NAMES.values():
        return name
    check_choice(name, list(_NAMES), "not a dtype of weights", where=where)
    return _NAMES[name]
