# SPDX-License-Identifier: Apache-2.0
"""Formats that a device supports, others are refused; and submodules by name and pattern."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import cast

import torch
from torch import nn

from accel.errors import ConfigError, DeviceError
from accel.errors._checks import did_you_mean
from accel.formats import Compute

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_compute(device: torch.device, compute: Compute) -> None:
    """Raise `DeviceError` unless a device supports a format; the CPU has bf16 and fp16, slowly, only CUDA tf32."""
    if reason := _reason(device, compute):
        formats: tuple[Compute, ...] = ("fp32", "bf16", "fp16")
        others = [other for other in formats if not _reason(device, other)]
        raise DeviceError(
            f"this device does not compute in {compute}",
            expected=" or ".join(others),
            got=f"{compute} on {device}: {reason}",
            where="precision",
            fix=f"Pass precision={(others[1:] or others)[0]!r}, or choose another device.",
        )


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device, such as (8, 9)."""
    return torch.cuda.get_device_capability(device)


def _reason(device: torch.device, compute: Compute) -> str:
    """Return why a device does not support a format; "" if it does."""
    if compute == "fp32" or (device.type == "cpu" and compute != "tf32"):
        return ""
    if device.type == "cuda":
        needs_ampere = compute in ("bf16", "tf32") and torch.version.hip is None
        found = capability(device)
        return f"compute capability {found[0]}.{found[1]}, it takes 8.0" if needs_ampere and found < (8, 0) else ""
    if compute == "tf32":
        return f"{device.type} has no tf32"
    return "" if _autocasts(device.type, DTYPES[compute]) else f"torch has no {compute} autocast for {device.type}"


def _autocasts(device_type: str, dtype: torch.dtype) -> bool:
    """Whether autocast supports a dtype; if not, it disables itself with a warning."""
    if not torch.amp.is_autocast_available(device_type):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autocast(device_type, dtype=dtype):
            return torch.is_autocast_enabled(device_type)


def submodules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List submodules with their names; first the model itself, named ""."""
    return list(cast("Iterable[tuple[str, nn.Module]]", model.named_modules()))


def matched(model: nn.Module, patterns: Sequence[str], where: str) -> set[str]:
    """Return the submodules that match a pattern, such as "blocks.*.router", with those inside; a pattern without a
    match raises `ConfigError`."""
    every = list(cast("Iterable[tuple[str, nn.Module]]", model.named_modules(remove_duplicate=False)))
    names = [name for name, _ in every if name]
    found: set[str] = set()
    for pattern in patterns:
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            raise ConfigError(
                "no submodule has such a name",
                expected=f"a name in {type(model).__name__}",
                got=repr(pattern),
                where=where,
                fix=did_you_mean(pattern, names) if names else "Leave it out.",
            )
        found.update(hits)
    inside = {id(module) for name, module in every if any(f"{name}.".startswith(f"{hit}.") for hit in found)}
    return {name for name, module in submodules(model) if id(module) in inside}
