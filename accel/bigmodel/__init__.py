# SPDX-License-Identifier: Apache-2.0
"""Models bigger than memory: plans of plain values, loads at the disk's speed, runs while the next block is copied.

Begin with `_describe.py`: a model becomes a skeleton. `plan/` maps it to homes and computing devices, `load/` reads a
checkpoint into a model made without values (`_empty.py`), `run/` computes with weights that are elsewhere.
`_arguments.py` checks what callers pass to all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import declared, exports

if TYPE_CHECKING:
    from accel.bigmodel._arguments import available_memory
    from accel.bigmodel._describe import StoredTensor, WeightSource, describe
    from accel.bigmodel._empty import init_on_device, initialize_weights
    from accel.bigmodel.load import expert_recipes, load_checkpoint_in_model, open_weights
    from accel.bigmodel.plan import DeviceMap, Segment, Skeleton, Weight, check_device_map, explain, pass_seconds
    from accel.bigmodel.run import Dispatched, RunStats, SegmentStats, Swap, swap_models

__all__ = [
    "DeviceMap",
    "Dispatched",
    "RunStats",
    "Segment",
    "SegmentStats",
    "Skeleton",
    "StoredTensor",
    "Swap",
    "Weight",
    "WeightSource",
    "available_memory",
    "check_device_map",
    "describe",
    "expert_recipes",
    "explain",
    "init_on_device",
    "initialize_weights",
    "load_checkpoint_in_model",
    "open_weights",
    "pass_seconds",
    "swap_models",
]

__getattr__ = exports(__name__, declared())
__dir__ = __all__.copy
