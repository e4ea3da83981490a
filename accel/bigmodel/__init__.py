# SPDX-License-Identifier: Apache-2.0
"""Models bigger than memory: plans of plain values, loads at the disk's speed, runs while the next block travels.

Begin with `_describe.py`: a model becomes a skeleton. `plan/` maps it to homes and computing devices, `load/` reads a
checkpoint (`_source.py`) into a model made without values (`_empty.py`), `run/` computes with weights that are
elsewhere. `_arguments.py` checks what callers pass to all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.lazy import exports

if TYPE_CHECKING:
    from accel.bigmodel._arguments import available_memory as available_memory
    from accel.bigmodel._describe import describe as describe
    from accel.bigmodel._empty import (
        init_empty_weights as init_empty_weights,
        init_on_device as init_on_device,
        initialize_weights as initialize_weights,
    )
    from accel.bigmodel._source import StoredTensor as StoredTensor, WeightSource as WeightSource
    from accel.bigmodel.load import (
        expert_recipes as expert_recipes,
        load_checkpoint_in_model as load_checkpoint_in_model,
        open_weights as open_weights,
    )
    from accel.bigmodel.plan import (
        DeviceMap as DeviceMap,
        Segment as Segment,
        Skeleton as Skeleton,
        Weight as Weight,
        check_device_map as check_device_map,
        explain as explain,
        infer_device_map as infer_device_map,
        pass_seconds as pass_seconds,
    )
    from accel.bigmodel.run import (
        Dispatched as Dispatched,
        RunStats as RunStats,
        SegmentStats as SegmentStats,
        Swap as Swap,
        cpu_offload as cpu_offload,
        disk_offload as disk_offload,
        dispatch_model as dispatch_model,
        load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
        swap_models as swap_models,
    )

__getattr__ = exports(
    __name__,
    {
        "_arguments": ("available_memory",),
        "_describe": ("describe",),
        "_empty": (
            "init_empty_weights",
            "init_on_device",
            "initialize_weights",
        ),
        "_source": (
            "StoredTensor",
            "WeightSource",
        ),
        "load": (
            "expert_recipes",
            "load_checkpoint_in_model",
            "open_weights",
        ),
        "plan": (
            "DeviceMap",
            "Segment",
            "Skeleton",
            "Weight",
            "check_device_map",
            "explain",
            "infer_device_map",
            "pass_seconds",
        ),
        "run": (
            "Dispatched",
            "RunStats",
            "SegmentStats",
            "Swap",
            "cpu_offload",
            "disk_offload",
            "dispatch_model",
            "load_checkpoint_and_dispatch",
            "swap_models",
        ),
    },
)
