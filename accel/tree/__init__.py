# SPDX-License-Identifier: Apache-2.0
"""Nested containers of tensors. Begin with `_walk.py`: leaves with their paths, and trees rebuilt from other leaves.

`_batches.py` has functions of batches made of these two. An unknown container is an error, never a leaf.
"""

from accel.tree._batches import (
    concatenate,
    convert_to_fp32,
    find_batch_size,
    send_to_device,
    slice_tensors,
    tensors_equal,
)
from accel.tree._walk import Container, map_tensors

__all__ = [
    "Container",
    "concatenate",
    "convert_to_fp32",
    "find_batch_size",
    "map_tensors",
    "send_to_device",
    "slice_tensors",
    "tensors_equal",
]
__dir__ = __all__.copy
