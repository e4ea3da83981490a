# SPDX-License-Identifier: Apache-2.0
"""Limits of memory by place, and the names of places."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from accel.bigmodel.plan._device_map import HOST, STORES
from accel.errors import ConfigError, did_you_mean
from accel.storage import parse_size

_DEVICE = re.compile(r"[a-z_]+:[0-9]+|mps")

_EXAMPLE = "a limit for each device, such as {0: '20GB', 'cpu': '60GB', 'disk': None}"

Limits = Mapping[int | str, int | str | None] | Mapping[str, int | str | None] | Mapping[int, int | str | None]


class Places(msgspec.Struct, frozen=True, kw_only=True):
    """Places that a plan may use.

    Attributes:
        devices: computing devices with their limits in bytes, in order; the host alone if there is no other.
        homes: places for segments that leave their device, in order: the host, then files. None for no limit.
    """

    devices: Mapping[str, int]
    homes: Mapping[str, int | None]

    @property
    def limits(self) -> dict[str, int]:
        """The limits of all places that have one."""
        homes = {name: limit for name, limit in self.homes.items() if limit is not None}
        return {**self.devices, **homes}


def read_limits(max_memory: Limits, *, where: str) -> Places:
    """Return the places of `max_memory`.

    Raises:
        ConfigError: no device, an unknown place, one with two names, or a limit that is none.
    """
    _check_is_mapping(max_memory, where)
    limits: dict[str, int | None] = {}
    for key, size in max_memory.items():
        name = place_name(key, where=where)
        if name in limits:
            raise ConfigError("a place with two limits", got=repr(name), where=where)
        limits[name] = _limit(name, size, where)
    devices = {name: limit for name, limit in limits.items() if name not in (HOST, *STORES) and limit is not None}
    if not devices and (host := limits.pop(HOST, None)) is not None:
        devices[HOST] = host
    if not devices:
        raise ConfigError(
            "no device that computes",
            expected=_EXAMPLE,
            got=repr(dict(max_memory)),
            where=where,
            fix="accel.available_memory(device, reserve='2GB') asks a device for what is free.",
        )
    homes = {name: limits[name] for name in (HOST, *(key for key in limits if key in STORES)) if name in limits}
    return Places(devices=devices, homes=homes)


def place_name(key: int | str, *, where: str) -> str:
    """Return the name of a place: of 1, "cuda:1".

    Raises:
        ConfigError: neither a number nor the name of a place.
    """
    if type(key) is int and key >= 0:
        return f"cuda:{key}"
    if key in (HOST, *STORES) or (isinstance(key, str) and _DEVICE.fullmatch(key)):
        return str(key)
    raise ConfigError(
        "not a place",
        expected="a GPU's number, torch's name of a device such as 'xpu:0', 'cpu', 'mmap' or 'disk'",
        got=repr(key),
        where=where,
        fix=did_you_mean(str(key), STORES, "A GPU is its number, such as 0 or 'cuda:0'; others have theirs, too."),
    )


def _check_is_mapping(max_memory: object, where: str) -> None:
    if not isinstance(max_memory, Mapping):
        raise ConfigError(
            "limits are given by place",
            expected=_EXAMPLE,
            got=repr(max_memory),
            where=where,
            fix="accel.available_memory(device, reserve='2GB') asks a device for what is free.",
        )


def _limit(name: str, size: int | str | None, where: str) -> int | None:
    if size is None and name in STORES:
        return None
    if size is None:
        raise ConfigError(
            "a limit is missing",
            expected="bytes, or a text such as '20GB'; None is for 'mmap' and 'disk'",
            got="None",
            where=f"{where}[{name!r}]",
        )
    return 0 if type(size) is int and size == 0 else parse_size(size, f"{where}[{name!r}]")
