# SPDX-License-Identifier: Apache-2.0
"""Collectives over nested containers of tensors: one packed message per call, compared between ranks.

Begin with `_reduce.py`, the shortest way: a tree is listed, checked and described (`_packing.py`), its first message
compares the calls and carries small tensors (`accel.comm`), and the leaves go back into the tree. `_gather.py` joins
rows of any number; `_objects.py` pickles.
"""

from accel.collectives._gather import gather as gather, pad_across_processes as pad_across_processes
from accel.collectives._objects import broadcast_object_list as broadcast_object_list, gather_object as gather_object
from accel.collectives._packing import (
    check_packable as check_packable,
    check_rank as check_rank,
    flat_bytes as flat_bytes,
    is_large as is_large,
    pack as pack,
    unpack as unpack,
)
from accel.collectives._reduce import (
    broadcast as broadcast,
    broadcast_from_holder as broadcast_from_holder,
    reduce as reduce,
)
