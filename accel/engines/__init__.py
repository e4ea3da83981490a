# SPDX-License-Identifier: Apache-2.0
"""Engines: one folder each, which nothing below imports; import the one you use by its name.

Begin with `accel/parallel/_engines.py`, the record `Engine` of one that owns prepare, backward and step, as `deepspeed`
does. The others bring a context (`megatron`), weights (`quantized`), groups (`torchft`) or a launcher (`ray`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import declared, exports

if TYPE_CHECKING:
    from accel.engines import (
        deepspeed as deepspeed,
        megatron as megatron,
        quantized as quantized,
        ray as ray,
        torchft as torchft,
    )

__all__ = ["deepspeed", "megatron", "quantized", "ray", "torchft"]

__getattr__ = exports(__name__, declared())
__dir__ = __all__.copy
