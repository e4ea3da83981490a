# SPDX-License-Identifier: Apache-2.0
"""Nested containers of tensors. Begin with `_walk.py`: leaves with their paths, and trees rebuilt from other leaves.

`_batches.py` has functions of batches made of these two. An unknown container is an error, never a leaf.
"""

from accel.tree._batches import (
    concatenate as concatenate,
    convert_to_fp32 as convert_to_fp32,
    find_batch_size as find_batch_size,
    send_to_device as send_to_device,
    slice_tensors as slice_tensors,
    tensors_equal as tensors_equal,
)
from accel.tree._walk import (
    Container as Container,
    Containers as Containers,
    Leaf as Leaf,
    flatten as flatten,
    has_method as has_method,
    is_its_values as is_its_values,
    leaves as leaves,
    map_leaves as map_leaves,
    map_movable as map_movable,
    map_tensors as map_tensors,
    nodes as nodes,
    replace_tensors as replace_tensors,
    structure as structure,
    tensors as tensors,
)
