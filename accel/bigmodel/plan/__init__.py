# SPDX-License-Identifier: Apache-2.0
"""Homes and computing devices of a model's segments, planned from plain values. Free of torch.

Begin with `_infer.py`: a `_skeleton.py` and limits of memory become a `DeviceMap` (`_device_map.py`). `_placement.py`
keeps its segments with their neighbours. `_explain.py` prints it.
"""

from accel.bigmodel.plan._device_map import (
    HOST as HOST,
    STORES as STORES,
    DeviceMap as DeviceMap,
    check_device_map as check_device_map,
    check_map as check_map,
)
from accel.bigmodel.plan._explain import explain as explain, pass_seconds as pass_seconds
from accel.bigmodel.plan._infer import infer_device_map as infer_device_map
from accel.bigmodel.plan._placement import Fill as Fill, Placement as Placement
from accel.bigmodel.plan._skeleton import (
    Segment as Segment,
    Skeleton as Skeleton,
    Weight as Weight,
    format_name as format_name,
    guess_skeleton as guess_skeleton,
    torch_name as torch_name,
)
