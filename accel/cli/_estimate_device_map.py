# SPDX-License-Identifier: Apache-2.0
"""`accel estimate --device-map`: homes and devices of a model's blocks under limits of memory."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_args

from accel.bigmodel.plan import (
    DeviceMap,
    Fill,
    Placement,
    Skeleton,
    explain,
    format_name,
    guess_skeleton,
    infer_device_map,
    torch_name,
)
from accel.errors import ConfigError, check_choice
from accel.estimate import built, function_of, name_headers, read_config, read_headers, timm_maker
from accel.storage import parse_size

if TYPE_CHECKING:
    from torch import nn

PLACEMENTS: tuple[str, ...] = get_args(Placement)
FILLS: tuple[str, ...] = get_args(Fill)


class _Stored(NamedTuple):
    """Storage of matrices at home.

    Attributes:
        dtype: safetensors' name of their dtype; None for their own.
        skip: names of weights that keep theirs, or patterns.
    """

    dtype: str | None
    skip: tuple[str, ...]


class _Found(NamedTuple):
    """A model that a source gives.

    Attributes:
        source: origin, in words.
        skeleton: the model.
        dtype: name of the dtype of its weights, if it is another.
    """

    source: str
    skeleton: Skeleton
    dtype: str | None


def add_device_map_flags(built_parser: argparse.ArgumentParser) -> None:
    """Give a parser the flags of a device map."""
    group = built_parser.add_argument_group("inference within limits, without --input")
    add = group.add_argument
    _ = add(
        "--device-map", metavar="TEXT", help="limits by place, such as 0=20GB,cpu=60GB,disk: accel.infer_device_map"
    )
    _ = add("--dtype", metavar="NAME", help="dtype of weights, such as bfloat16 (default: that of the file)")
    _ = add("--storage-dtype", metavar="NAME", help="dtype of matrices at home, such as float8_e4m3fn, cast for calls")
    _ = add("--storage-skip", metavar="NAMES", help="weights that keep theirs, or patterns: *.router.*,head.weight")
    _ = add("--slots", type=int, default=None, metavar="N", help="streamed blocks on a device at a time (default: 2)")
    _ = add("--placement", metavar="NAME", help=f"of streamed blocks: {', '.join(PLACEMENTS)} (default: spread)")
    _ = add("--fill", metavar="NAME", help=f"of several devices: {', '.join(FILLS)} (default: balanced)")
    _ = add("--bandwidth", metavar="SIZE", help="bytes a second into a device, such as 20GB: seconds of a pass")


def check_without_device_map(known: argparse.Namespace) -> None:
    """Raise `ConfigError` for flags of a device map without one."""
    names = ("dtype", "storage_dtype", "storage_skip", "slots", "placement", "fill", "bandwidth")
    if named := [f"--{name.replace('_', '-')}" for name in names if getattr(known, name) is not None]:
        raise ConfigError(
            "flags of a device map have no effect without one",
            got=", ".join(named),
            where="accel estimate",
            fix="Give limits: --device-map 0=20GB,cpu=60GB,disk.",
        )


def run_device_map(known: argparse.Namespace) -> int:
    """Print the device map of a model; return the exit status."""
    _check_without_step(known)
    placement = known.placement or "spread"
    fill = known.fill or "balanced"
    check_choice(placement, PLACEMENTS, "unknown placement", where="--placement")
    check_choice(fill, FILLS, "unknown way to fill devices", where="--fill")
    limits = _limits(known.device_map)
    found = _skeleton(known.source, _stored(known.storage_dtype, known.storage_skip))
    device_map = infer_device_map(
        found.skeleton,
        limits,
        slots=2 if known.slots is None else known.slots,
        placement=placement,
        fill=fill,
        dtype=known.dtype or found.dtype,
    )
    print(device_map.encode().decode() if known.json else _text(found, device_map, known.bandwidth))
    return 0


def _check_without_step(known: argparse.Namespace) -> None:
    names = ("input", "memory", "mesh", "precision", "strategy")
    given = [f"--{name}" for name in names if getattr(known, name) is not None]
    if named := [*given, *(["--nproc"] if known.nproc != 1 else [])]:
        raise ConfigError(
            "flags of a training step beside a device map",
            got=", ".join(named),
            where="--device-map",
            fix="Leave them out: a device map is for inference.",
        )


def _limits(text: str) -> dict[int | str, int | str | None]:
    limits: dict[int | str, int | str | None] = {}
    for part in text.split(","):
        name, given, size = part.strip().partition("=")
        key = int(name) if name.isdecimal() else name
        if key in limits:
            raise ConfigError("a place with two limits", got=repr(name), where="--device-map")
        limits[key] = size if given else None
    return limits


def _stored(dtype: str | None, skip: str | None) -> _Stored:
    if dtype is None and skip is not None:
        problem = "--storage-skip has no effect without --storage-dtype"
        raise ConfigError(problem, got=repr(skip), fix="Give --storage-dtype float8_e4m3fn.")
    names = tuple(name.strip() for name in (skip or "").split(",") if name.strip())
    return _Stored(None if dtype is None else format_name(dtype, where="--storage-dtype"), names)


def _skeleton(source: str, stored: _Stored) -> _Found:
    path = Path(source)
    if source.startswith("timm/") and not path.exists():
        return _Found(source, _described(timm_maker(source.removeprefix("timm/")), source, stored), None)
    if not path.exists() and ":" in source:
        sys.path.insert(0, os.getcwd())  # as `python -m` would have it
        return _Found(source, _described(function_of(source), source, stored), None)
    if path.is_dir() and (path / "config.json").is_file():
        path /= "config.json"
    if path.is_file() and path.suffix == ".json" and not path.name.endswith(".index.json"):
        described = read_config(path)
        return _Found(described.source, _described(described.make, described.source, stored), described.dtype)
    if not path.exists():
        fix = "`accel estimate --help` lists what SOURCE may be."
        raise ConfigError("there is no such source", expected="a path or module:function", got=repr(source), fix=fix)
    headers = read_headers(path)
    entries = {name: entry for header in headers for name, entry in header.tensors.items()}
    skeleton = guess_skeleton(entries)
    if stored.dtype is not None:
        skeleton = skeleton.store(stored.dtype, skip=stored.skip)
    return _Found(f"{name_headers(path, headers)}; blocks by name", skeleton, None)


def _described(make: Callable[[], nn.Module], source: str, stored: _Stored) -> Skeleton:
    import torch

    from accel.bigmodel import describe

    dtype = None if stored.dtype is None else getattr(torch, torch_name(stored.dtype))
    with built(make, source) as model:
        return describe(model, storage_dtype=dtype, storage_skip=stored.skip)


def _text(found: _Found, device_map: DeviceMap, bandwidth: str | None) -> str:
    skeleton = device_map.skeleton
    dtypes = ", ".join(sorted({weight.dtype for weight in skeleton.weights()}))
    stored = sorted({str(weight.storage_dtype) for weight in skeleton.weights() if weight.is_cast})
    dtypes += f", matrices at home in {', '.join(stored)}" if stored else ""
    speed = None if bandwidth is None else float(parse_size(bandwidth, "--bandwidth"))
    lines = [found.source, f"{len(skeleton.segments)} segments, {skeleton.memory:,} bytes of {dtypes}", ""]
    return "\n".join([*lines, explain(device_map, bandwidth=speed, picture=True)])
