# SPDX-License-Identifier: Apache-2.0
"""`explain`: a device map as a table and a picture, with the simulated seconds of a pass."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from accel.bigmodel.plan._device_map import DeviceMap, check_map
from accel.bigmodel.plan._skeleton import Segment
from accel.errors import ConfigError
from accel.terminal import show_seconds, show_size, show_table

Bandwidth = Mapping[str, float] | float

_PASSES = 3  # the last one is steady: its first segments were copied during the pass before


def pass_seconds(
    device_map: DeviceMap, compute: Mapping[str, float], bandwidth: Bandwidth, *, overlap: bool = True
) -> float:
    """Return the seconds of one of many passes through a model, such as a token of `generate`. Pure.

    Segments compute one after the other. Each device has a link that moves one streamed segment at a time into the next
    free slot. Mapped files that the host computes are read while it waits.

    Args:
        device_map: the map.
        compute: seconds by segment; 0 for absent ones.
        bandwidth: bytes a second into a device; or by home.
        overlap: whether segments are copied while others compute; else each when it is needed, as without prefetch.

    Raises:
        ConfigError: a segment that the map does not have, or a home without a bandwidth above 0.
    """
    check_compute(device_map, compute)
    segments = device_map.skeleton.segments
    transfer = {segment.name: transfer_seconds(device_map, segment, bandwidth) for segment in segments}
    streamed = frozenset(device_map.order)
    link = dict.fromkeys(device_map.devices, 0.0)
    free = {device: [0.0] * device_map.slots for device in link}
    turn = dict.fromkeys(link, 0)
    clock = begun = 0.0
    for _ in range(_PASSES):
        begun = clock
        for segment in segments:
            name = segment.name
            device = device_map.runs[name]
            if name not in streamed:
                clock += compute.get(name, 0.0) + transfer[name]
                continue
            slot = turn[device]
            start = max(link[device], free[device][slot], 0.0 if overlap else clock)
            link[device] = start + transfer[name]
            clock = max(clock, link[device]) + compute.get(name, 0.0)
            free[device][slot] = clock
            turn[device] = (slot + 1) % device_map.slots
    return clock - begun


def pass_limit(device_map: DeviceMap, compute: Mapping[str, float], bandwidth: Bandwidth) -> float:
    """Return the seconds that no schedule of the map's transfers beats: all compute, or all bytes of a link."""
    check_compute(device_map, compute)
    streamed = frozenset(device_map.order)
    busy = dict.fromkeys(device_map.devices, 0.0)
    working = 0.0
    for segment in device_map.skeleton.segments:
        seconds = transfer_seconds(device_map, segment, bandwidth)
        working += compute.get(segment.name, 0.0)
        if segment.name in streamed:
            busy[device_map.runs[segment.name]] += seconds
        else:
            working += seconds
    return max(working, *busy.values(), 0.0)


def transfer_seconds(device_map: DeviceMap, segment: Segment, bandwidth: Bandwidth) -> float:
    """Return the seconds in which a segment reaches its device; 0 if it is there, or if only rows of it move."""
    home = device_map.home[segment.name]
    if home == device_map.runs[segment.name] or segment.rows or not segment.home_memory:
        return 0.0
    speed = bandwidth.get(home, 0.0) if isinstance(bandwidth, Mapping) else bandwidth
    if type(speed) not in (int, float) or not speed > 0:
        raise ConfigError(
            "no bandwidth",
            expected="bytes a second above 0",
            got=repr(speed),
            where=f"bandwidth[{home!r}]" if isinstance(bandwidth, Mapping) else "bandwidth=",
        )
    return segment.home_memory / speed


def check_compute(device_map: object, compute: object) -> None:
    """Refuse other things than a map and seconds by its segments, by a `ConfigError`."""
    check_map(device_map, where="pass_seconds")
    assert isinstance(device_map, DeviceMap)
    if not isinstance(compute, Mapping):
        raise ConfigError(
            "seconds are given by segment",
            expected="a mapping from a name to seconds",
            got=repr(compute),
            where="compute=",
            fix=f"Write dict.fromkeys(device_map.home, {compute!r})." if isinstance(compute, int | float) else "",
        )
    unknown = sorted(set(cast("Mapping[str, float]", compute)) - set(device_map.home))
    if unknown:
        raise ConfigError("no such segment", got=", ".join(map(repr, unknown[:5])), where="compute=")


_WIDTH = 96  # characters of a picture
_MOST_RANGES = 4  # of numbers in a line
_MARKS = {"cpu": "c", "mmap": "m", "disk": "d"}  # of segments away from their device, by home


class _Kind(NamedTuple):
    """Facts that the segments of a line share."""

    path: str  # of the list that holds them
    home: str  # place between uses
    runs: str  # computing device
    way: str  # to the device
    size: int  # bytes of each
    seconds: tuple[float, ...]  # copy and compute of each; those that are known


def explain(
    device_map: DeviceMap,
    *,
    compute: Mapping[str, float] | None = None,
    bandwidth: Bandwidth | None = None,
    picture: bool = False,
) -> str:
    """Return a device map as text: a line for each kind of segment, then bytes by place. Pure.

    The choice of `infer_device_map` follows, with the other ways that it tried. With a bandwidth, seconds of a pass
    follow, and the limit that no order of transfers beats.

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
    if device_map.chosen:
        parts.append(device_map.chosen)
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
        transfer = () if bandwidth is None else (transfer_seconds(device_map, segment, bandwidth),)
        seconds = (*transfer, *(() if compute is None else (compute.get(name, 0.0),)))
        path, number = _numbered(name)
        size = segment.fixed + (segment.resident_memory if home == runs else segment.home_memory)
        kinds.setdefault(_Kind(path, home, runs, way, size, seconds), []).append(number)
    times = [*(["TRAVEL"] if bandwidth is not None else []), *(["COMPUTE"] if compute is not None else [])]
    table = [["SEGMENTS", "COUNT", "HOME", "COMPUTES ON", "", "EACH", "TOGETHER", *times]]
    for kind, numbers in kinds.items():
        sizes = [show_size(kind.size), show_size(kind.size * len(numbers))]
        label = kind.path + _ranges(numbers) or "(the model's own)"
        table.append(
            [label, str(len(numbers)), kind.home, kind.runs, kind.way, *sizes, *map(show_seconds, kind.seconds)]
        )
    return show_table(table)


def _numbered(name: str) -> tuple[str, str]:
    """Divide the path of a block into the path of its list and its number; "" for no number."""
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
        return f"The transfers of a pass take {show_seconds(pass_limit(device_map, {}, bandwidth))}."
    whole = pass_seconds(device_map, compute, bandwidth)
    alone = pass_seconds(device_map, compute, bandwidth, overlap=False)
    limit = pass_limit(device_map, compute, bandwidth)
    ratio = f", {whole / limit:.2f} times the limit" if limit else ""
    working = f"{show_seconds(sum(compute.values()))} of it compute"
    without = f"Without overlap: {show_seconds(alone)}."
    return f"A pass: {show_seconds(whole)}{ratio} of {show_seconds(limit)}; {working}. {without}"


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
    legend = {"#": "on its device", "r": "fetched by row", **{mark: f"in {home}" for home, mark in _MARKS.items()}}
    return "\n".join([*lines, ", ".join(f"{mark} {text}" for mark, text in legend.items() if mark in seen)])
