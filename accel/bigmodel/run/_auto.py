# SPDX-License-Identifier: Apache-2.0
"""The device map of "auto": inferred from the memory that devices and the host have free."""

from __future__ import annotations

import torch
from torch import nn

from accel.bigmodel._arguments import available_memory
from accel.bigmodel._describe import describe
from accel.bigmodel.plan import HOST, DeviceMap, explain, infer_device_map
from accel.devices import count_devices, find_accelerator, kind_of_device
from accel.tensors import local_part

_SHARE = 0.9  # of free memory; the rest is for activations, caches and others


def auto_map(
    model: nn.Module, *, has_files: bool, device: torch.device | None = None, ranks: int = 1, shows: bool = True
) -> DeviceMap:
    """Infer a device map and, with `shows`, print it.

    `ranks` processes share the host's memory; `device` None is for all accelerators, or for the host without one.
    """
    own = _held(model)
    limits = {name: own.get(name, 0) + _free(name) for name in _devices(device) if name != HOST}
    # What the model holds already is free for it to use again.
    limits[HOST] = own.get(HOST, 0) + _free(HOST) // ranks
    found = infer_device_map(describe(model), {**limits, "disk": None} if has_files else limits)
    if shows:
        print(explain(found), flush=True)
    return found


def _devices(device: torch.device | None) -> list[str]:
    if device is not None:
        return [HOST if device.type == HOST else str(device)]
    kind = find_accelerator()
    if kind == HOST:
        return [HOST]
    if not kind_of_device(kind).numbered:
        return [kind]
    return [f"{kind}:{at}" for at in range(count_devices(kind))]


def _free(device: str) -> int:
    """Return the bytes of a device that further weights may take."""
    return int(available_memory(device, reserve=0) * _SHARE)


def _held(model: nn.Module) -> dict[str, int]:
    """Return the bytes of the model's values by device."""
    found: dict[str, int] = {}
    for each in {id(each): each for each in (*model.parameters(), *model.buffers())}.values():
        if not each.is_meta:
            part = local_part(each)
            found[str(part.device)] = found.get(str(part.device), 0) + part.nbytes
    return found
