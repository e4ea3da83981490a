# SPDX-License-Identifier: Apache-2.0
"""Destinations of a load: by name of a tensor, the device that it goes to and the dtype that it has there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple, cast

import torch

from accel.bigmodel._devices import device_of
from accel.bigmodel._dtypes import dtype_of
from accel.bigmodel.plan import STORES, DeviceMap, check_map
from accel.errors import ConfigError

DeviceChoice = DeviceMap | int | str | torch.device | None

_WHERE = "load_checkpoint_in_model(device_map=)"


class Destination(NamedTuple):
    """The place that a tensor is loaded to.

    Attributes:
        device: the device; None for a tensor that stays in files.
        dtype: dtype that its home has for it; None where that is the model's.
        is_planned: whether a device map says so, and not one device for all.
    """

    device: torch.device | None
    dtype: torch.dtype | None = None
    is_planned: bool = False


def find_destinations(device_map: DeviceChoice, default: torch.device) -> Callable[[str], Destination]:
    """Return the function that gives the destination of a tensor by its name.

    Args:
        device_map: home of each segment, or one device; None for `default`.
        default: the context's device.

    Raises:
        ConfigError: neither a map nor a device. The function raises it for a tensor that the map does not have.
        DeviceError: the device is not there.
    """
    if not isinstance(device_map, DeviceMap):
        everywhere = Destination(default if device_map is None else _one_device(device_map))
        return lambda name: everywhere
    found = _of_map(device_map)

    def find(name: str) -> Destination:
        if name not in found:
            raise ConfigError(
                "the device map is of another model",
                got=f"no {name!r}",
                where=_WHERE,
                fix="Make the map of this model: infer_device_map(describe(model), ...).",
            )
        return found[name]

    return find


def _of_map(device_map: DeviceMap) -> dict[str, Destination]:
    devices = {name: device_of(name, where=_WHERE) for name in {*device_map.devices, "cpu"}}
    found: dict[str, Destination] = {}
    for segment in device_map.skeleton.segments:
        home, runs = device_map.home[segment.name], device_map.runs[segment.name]
        for weight in segment.weights:
            moves = weight.moves and segment.movable
            place = home if moves else runs
            is_cast = segment.casts(weight) if home == runs else moves and weight.storage_dtype is not None
            dtype = dtype_of(cast("str", weight.storage_dtype)) if is_cast else None
            destination = Destination(None if place in STORES else devices[place], dtype, True)
            found |= dict.fromkeys((weight.name, *weight.tied), destination)
    return found


def _one_device(choice: object) -> torch.device:
    is_name = isinstance(choice, torch.device) or type(choice) is int
    if isinstance(choice, str):
        with contextlib.suppress(RuntimeError):
            is_name = bool(torch.device(choice))
    if not is_name:
        check_map(choice, where=_WHERE)
    return device_of(cast("int | str | torch.device", choice), where=_WHERE)
