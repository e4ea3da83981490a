# SPDX-License-Identifier: Apache-2.0
"""Memory that a device or the host has free at the moment, for limits of a device map."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from accel.devices import free_memory
from accel.errors import ConfigError, DeviceError
from accel.storage import parse_size

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_memory(device: int | str | torch.device, *, reserve: int | str) -> int:
    """Return the bytes that a device has free now, less a reserve. No communication.

    Memory that torch has cached counts as free. Of the host it is the memory that processes can take without swapping,
    within the limit of the container. The answer holds until another process takes some.

    Args:
        device: a GPU's number, or a device such as "cuda:0" or "cpu".
        reserve: bytes, or a text such as "2GB", to leave for activations, caches and others.

    Raises:
        DeviceError: there is no such device, or its memory is not known.
        ConfigError: no size, or one that leaves nothing.
    """
    kept = 0 if type(reserve) is int and reserve == 0 else parse_size(reserve, "reserve=")
    place = _device(device)
    free = _host_bytes() if place.type == "cpu" else _device_bytes(place)
    if free <= kept:
        raise ConfigError("nothing is left of the memory", expected=f"below {free}", got=f"{kept}", where="reserve=")
    return free - kept


def _device(device: int | str | torch.device) -> torch.device:
    try:
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError as error:
        raise DeviceError(
            "no such device", got=repr(device), where="available_memory", fix=f"torch: {error}"
        ) from error


def _device_bytes(device: torch.device) -> int:
    try:
        return free_memory(device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DeviceError(
            "the memory of the device is not known", got=str(device), where="available_memory", fix=f"torch: {error}"
        ) from error


def _host_bytes() -> int:
    if not sys.platform.startswith("linux"):
        raise DeviceError(
            "the free memory of the host is known on Linux alone",
            got=sys.platform,
            where="available_memory('cpu')",
            fix="Give a size for 'cpu', or use 'mmap'.",
        )
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    return min([free, *_container_bytes()])


def _container_bytes() -> list[int]:
    """Return the bytes left in this process's control group, of version 2; none without a limit."""
    try:
        most = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return []
    cached = int(stat.get("inactive_file", 0))  # given back when others need it
    return [] if most == "max" else [int(most) - used + cached]
