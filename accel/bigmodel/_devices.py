# SPDX-License-Identifier: Apache-2.0
"""Devices as callers name them, checked before anything moves."""

from __future__ import annotations

import torch

from accel.errors import DeviceError


def device_of(device: int | str | torch.device, *, where: str) -> torch.device:
    """Return a device with its number, as its tensors have it; the host is "cpu", also for "cpu:0".

    Args:
        device: a CUDA device's number, or a device of torch.
        where: the function, for errors.

    Raises:
        DeviceError: there is no such device, or it holds no values, as "meta".
    """
    try:
        found = torch.empty(0, device=device).device
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        fix = str(error).partition("\n")[0]
        raise DeviceError("no such device", got=repr(device), where=where, fix=f"torch: {fix}") from error
    if found.type == "meta":
        raise DeviceError("a device without memory", expected="one that holds values", got=repr(device), where=where)
    return found
