# SPDX-License-Identifier: Apache-2.0
"""Devices, dtypes, limits and models as callers name them, checked before anything moves."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch

from accel.devices import free_memory
from accel.errors import ConfigError, DeviceError
from accel.storage import parse_size, torch_dtypes

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
    place = device_of(device, where="available_memory")
    free = _host_bytes() if place.type == "cpu" else _device_bytes(place)
    if free <= kept:
        raise ConfigError(
            "the reserve takes all of the memory", expected=f"below {free}", got=f"{kept}", where="reserve="
        )
    return free - kept


def _device_bytes(device: torch.device) -> int:
    try:
        return free_memory(device)
    except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
        raise DeviceError(
            "the memory of the device is not known", got=str(device), where="available_memory", fix=f"torch: {error}"
        ) from error


def _host_bytes() -> int:
    if not sys.platform.startswith("linux"):
        raise DeviceError(
            "the free memory of the host is known on Linux only",
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


def device_of(device: int | str | torch.device, *, where: str) -> torch.device:
    """Return a device with its number, as its tensors have it; the host is "cpu", also for "cpu:0".

    Raises `DeviceError` where there is no such device, or none that holds values, such as "meta".
    """
    try:
        found = torch.empty(0, device=device).device
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        fix = str(error).partition("\n")[0]
        raise DeviceError("no such device", got=repr(device), where=where, fix=f"torch: {fix}") from error
    if found.type == "meta":
        raise DeviceError("a device without memory", expected="one that holds values", got=repr(device), where=where)
    return found


ONLY_READ = {"F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}


def dtypes() -> dict[str, torch.dtype]:
    """Return the dtypes that weights may have, by name."""
    only_read = {key: getattr(torch, name) for key, name in ONLY_READ.items() if hasattr(torch, name)}
    return {**torch_dtypes(), "C128": torch.complex128, **only_read}


@functools.lru_cache(maxsize=64)
def dtype_of(name: str) -> torch.dtype:
    """Return torch's dtype of a name; an unknown one is a `ConfigError`."""
    known = dtypes()
    if name not in known:
        raise ConfigError("torch has no such dtype", expected=", ".join(sorted(known)), got=repr(name))
    return known[name]


def check_dtype(dtype: object, *, where: str) -> None:
    """Refuse all but None and torch's floating-point dtypes, by a `ConfigError`."""
    if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
        raise ConfigError(
            "invalid dtype of weights",
            expected="a floating-point dtype, such as torch.bfloat16",
            got=str(dtype),
            where=where,
            fix="accel.engines.quantized.load_quantized loads weights as integers, with their scales.",
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        fix = f"Pass torch.{dtype}." if isinstance(getattr(torch, str(dtype), None), torch.dtype) else ""
        raise ConfigError("the dtype is not valid", expected="one of torch's", got=repr(dtype), where=where, fix=fix)


@functools.lru_cache(maxsize=64)
def name_of(dtype: torch.dtype) -> str:
    """Return the name of torch's dtype; one that no file stores is a `ConfigError`."""
    for name, known in dtypes().items():
        if known == dtype:
            return name
    raise ConfigError("weights of this dtype cannot be stored", got=str(dtype))


def copy_in_range(target: torch.Tensor, source: torch.Tensor, *, name: str) -> None:
    """Copy values to a tensor of any dtype; those that a float of 8 bits would clip or lose are a `ConfigError`."""
    if target.dtype.is_floating_point and target.itemsize == 1 and source.dtype != target.dtype and source.numel():
        largest = torch.finfo(target.dtype).max
        low, high = (source.float() if source.itemsize == 1 else source).aminmax()
        got = max(-low.item(), high.item())
        if got > largest:
            raise ConfigError(
                f"a weight with values that {name_of(target.dtype)} does not hold",
                expected=f"up to {largest:g}",
                got=f"{got:g}",
                where=f"{name!r}, storage_dtype",
                fix=f"Leave it out: storage_skip=[{name!r}].",
            )
    _ = target.copy_(source)
