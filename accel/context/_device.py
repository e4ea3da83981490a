# SPDX-License-Identifier: Apache-2.0
"""The device that a rank computes on."""

from __future__ import annotations

from typing import cast

import torch

from accel import xla
from accel.devices import count_devices, find_accelerator, kind_of_device
from accel.env import LaunchEnv
from accel.errors import DeviceError, EnvError


def choose_device(explicit: torch.device | str | None, env: LaunchEnv) -> torch.device:
    """Return the device of a rank: the argument's, else the environment's, else the machine's accelerator.

    Raises:
        DeviceError: no such device, or it is not there.
        EnvError: one of several TPU hosts, and a process without a place among theirs.
        MissingExtraError: an XLA device without torch_xla.
    """
    wanted = explicit if explicit is not None else env.device
    where = "device=" if explicit is not None else env.sources.get("device", "the default device")
    if wanted == "auto":
        wanted = find_accelerator()
    if str(wanted).partition(":")[0] == "xla":
        xla.require_xla()  # before torch knows the device
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(
            "unknown device", expected="such as cpu, cuda, cuda:0", got=repr(wanted), where=where
        ) from error
    if device.type == "cpu":
        return torch.device("cpu")  # tensors never say cpu:0
    if device.type == "xla":
        return _choose_xla(device, env, where)
    count = count_devices(device.type)
    if not kind_of_device(device).numbered or (device.type != "cuda" and not count):
        return _check_present(device, where)
    index = cast(int | None, device.index)
    index = env.local_rank if index is None else index
    if not 0 <= index < count:  # torch wraps large numbers
        name = "GPU" if device.type == "cuda" else f"{device.type} device"
        raise DeviceError(
            f"rank {env.rank} has no {name}",
            expected=f"{name} {index} for local rank {env.local_rank}",
            got=f"{count} visible {name}s",
            where=where,
            fix=f"Start fewer processes a node, make more {name}s visible, or pass device='cpu'.",
        )
    return torch.device(device.type, index)


def _choose_xla(device: torch.device, env: LaunchEnv, where: str) -> torch.device:
    """Return the one XLA device of a process; nothing may touch it before processes have found each other."""
    if env.tpu_hosts > 1 and env.launcher == "none":
        raise EnvError(
            "this host is one of several of a TPU slice, and this process was started without a place among theirs",
            expected=f"a process for each TPU chip of all {env.tpu_hosts} hosts",
            got="TPU_WORKER_HOSTNAMES, and no launcher's variables",
            where=where,
            fix="Run `accel launch --device xla train.py` on every host.",
        )
    own = torch.device("xla", device.index or 0)
    return own if env.world_size > 1 else _check_present(own, where)


def _check_present(device: torch.device, where: str) -> torch.device:
    try:
        _ = torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(
            "nothing can be computed there", expected="a device of this machine", got=str(device), where=where
        ) from error
    return device
