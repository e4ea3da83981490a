# SPDX-License-Identifier: Apache-2.0
"""Homes and computing devices of a model's segments, planned from plain values. Free of torch."""

from accel.bigmodel.plan._device_map import STORES as STORES, DeviceMap as DeviceMap, check_map as check_map
from accel.bigmodel.plan._dtype_names import format_name as format_name, torch_name as torch_name
from accel.bigmodel.plan._explain import explain as explain
from accel.bigmodel.plan._headers import guess_skeleton as guess_skeleton
from accel.bigmodel.plan._infer import infer_device_map as infer_device_map
from accel.bigmodel.plan._own_map import check_device_map as check_device_map
from accel.bigmodel.plan._ranges import Fill as Fill
from accel.bigmodel.plan._seconds import pass_seconds as pass_seconds
from accel.bigmodel.plan._skeleton import Segment as Segment, Skeleton as Skeleton
from accel.bigmodel.plan._slots import Placement as Placement
from accel.bigmodel.plan._weight import Weight as Weight
