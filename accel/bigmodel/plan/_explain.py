# SPDX-License-Identifier: Apache-2.0
"""`explain`: a device map as a table and a picture that a person reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from accel.bigmodel.plan._device_map import DeviceMap, check_map
from accel.bigmodel.plan._seconds import Bandwidth, check_compute, pass_limit, pass_seconds, travel_seconds
from accel.terminal import show_size, show_table

_WIDTH = 96  # characters of a picture
_MOST_RANGES = 4  # of numbers in a line
_MARKS = {"cpu": "c", "mmap": "m", "disk": "d"}  # of segments away from their device, by home


class _Kind(NamedTuple):
    """Facts that the segments of a line share.

    Attributes:
        path: of the list that holds them.
        home, runs: places.
        way: to the device.
        size: bytes of each.
        seconds: travel and compute of each; those that are known.
    """

    path: str
    home: str
    runs: str
    way: str
    size: int
    seconds: tuple[float, ...]


def explain(
    device_map: DeviceMap,
    *,
    compute: Mapping[str, float] | None = None,
    bandwidth: Bandwidth | None = None,
    picture: bool = False,
) -> str:
    """Return a device map as text: a line for each kind of segment, then bytes by place. Pure.

    With a bandwidth, seconds of a pass follow, beside the limit that no order of transfers beats.

    Args:
        device_map: the map.
        compute: seconds by segment, for a pass; 0 for absent ones.
        bandwidth: bytes a second into a device, or by home, as for `pass_seconds`.
        picture: whether to draw the segments of each device, a character for one or several.

    Raises:
        ConfigError: no map, or as `pass_seconds`.
    """
    check_map(device_map, where="explain")
    check_compute(device_map, compute or {})
    parts = [_segments(device_map, compute, bandwidth), _places(device_map)]
    if bandwidth is not None:
        parts.append(_seconds(device_map, compute, bandwidth))
    if picture:
        parts.append(_picture(device_map))
    return "\n\n".join(parts)


def _segments(device_map: DeviceMap, compute: Mapping[str, float] | None, bandwidth: Bandwidth | None) -> str:
    kinds: dict[_Kind, list[str]] = {}
    streamed = frozenset(device_map.order)
    for segment in device_map.skeleton.segments:
        name = segment.name
        home, runs = device_map.home[name], device_map.runs[name]
        way = "rows" if segment.rows else "streams" if name in streamed else "in place"
        if home == runs:
            way = "casts" if segment.casting else ""
        travel = () if bandwidth is None else (travel_seconds(device_map, segment, bandwidth),)
        seconds = (*travel, *(() if compute is None else (compute.get(name, 0.0),)))
        path, number = _numbered(name)
        size = segment.fixed + (segment.resident_memory if home == runs else segment.home_memory)
        kinds.setdefault(_Kind(path, home, runs, way, size, seconds), []).append(number)
    times = [*(["TRAVEL"] if bandwidth is not None else []), *(["COMPUTE"] if compute is not None else [])]
    table = [["SEGMENTS", "COUNT", "HOME", "COMPUTES ON", "", "EACH", "TOGETHER", *times]]
    for kind, numbers in kinds.items():
        sizes = [show_size(kind.size), show_size(kind.size * len(numbers))]
        label = kind.path + _ranges(numbers) or "(the model's own)"
        table.append([label, str(len(numbers)), kind.home, kind.runs, kind.way, *sizes, *map(_time, kind.seconds)])
    return show_table(table)


def _numbered(name: str) -> tuple[str, str]:
    """Divide the path of a block into that of its list and its number; "" for no number."""
    path = name.rstrip("0123456789")
    return (path, name[len(path) :]) if path.endswith(".") or not path else (name, "")


def _ranges(numbers: Sequence[str]) -> str:
    """Return numbers as text: of 0, 1, 2, 5, "0-2,5"; the first of many."""
    runs: list[list[int]] = []
    for number in (int(each) for each in numbers if each):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [f"{low}" if low == high else f"{low}-{high}" for low, high in runs]
    return ",".join(texts if len(texts) <= _MOST_RANGES else [*texts[:_MOST_RANGES], "..."])


def _places(device_map: DeviceMap) -> str:
    table = [["PLACE", "RESIDENT", "SLOTS", "USED", "LIMIT"]]
    for place, used in sorted(device_map.used_everywhere().items(), key=lambda each: each[0] in _MARKS):
        slot = device_map.slot_bytes(place)
        window = device_map.window(place)
        cast = device_map.cast_bytes(place)
        parts = [f"{device_map.slots} x {show_size(slot)}"] if slot else [show_size(window)] if window > cast else []
        parts += [f"{show_size(cast)} to cast"] if cast else []
        limit = device_map.limits.get(place)
        share = "" if not limit else f", {used / limit:.1%} used"
        table.append(
            [
                place,
                show_size(device_map.resident(place)),
                " + ".join(parts),
                show_size(used),
                "none" if limit is None else show_size(limit) + share,
            ]
        )
    return show_table(table)


def _seconds(device_map: DeviceMap, compute: Mapping[str, float] | None, bandwidth: Bandwidth) -> str:
    if compute is None:
        return f"The transfers of a pass take {_time(pass_limit(device_map, {}, bandwidth))}."
    whole = pass_seconds(device_map, compute, bandwidth)
    alone = pass_seconds(device_map, compute, bandwidth, overlap=False)
    limit = pass_limit(device_map, compute, bandwidth)
    ratio = f", {whole / limit:.2f} times the limit" if limit else ""
    working = f"{_time(sum(compute.values()))} of it compute"
    return f"A pass: {_time(whole)}{ratio} of {_time(limit)}; {working}. Without overlap: {_time(alone)}."


def _picture(device_map: DeviceMap) -> str:
    lines: list[str] = []
    seen = set[str]()
    for device in device_map.devices:
        marks = ""
        for segment in device_map.skeleton.segments:
            if device_map.runs[segment.name] == device:
                home = device_map.home[segment.name]
                marks += "#" if home == device else "r" if segment.rows else _MARKS[home]
        step = max(1, math.ceil(len(marks) / _WIDTH))
        cells = [marks[at : at + step] for at in range(0, len(marks), step)]
        seen |= set(marks)
        drawn = "".join(max(cell, key=lambda mark: mark != "#") for cell in cells)
        lines.append(f"{device}  {drawn}" + (f"  ({step} segments a character)" if step > 1 else ""))
    legend = {"#": "on its device", "r": "rows alone move", **{mark: f"in {home}" for home, mark in _MARKS.items()}}
    return "\n".join([*lines, ", ".join(f"{mark} {text}" for mark, text in legend.items() if mark in seen)])


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return "0 s" if not seconds else f"{seconds / 1e-9:.3g} ns"
