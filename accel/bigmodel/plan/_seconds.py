# SPDX-License-Identifier: Apache-2.0
"""Seconds of a pass through a model with streamed segments, simulated; and the limit that no schedule beats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from accel.bigmodel.plan._device_map import DeviceMap, check_map
from accel.bigmodel.plan._skeleton import Segment
from accel.errors import ConfigError

Bandwidth = Mapping[str, float] | float

_PASSES = 3  # the last one is steady: its first segments travelled during the pass before


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
        overlap: whether segments travel while others compute; else each when it is needed, as without prefetch.

    Raises:
        ConfigError: a segment that the map does not have, or a home without a bandwidth above 0.
    """
    check_compute(device_map, compute)
    segments = device_map.skeleton.segments
    travel = {segment.name: travel_seconds(device_map, segment, bandwidth) for segment in segments}
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
                clock += compute.get(name, 0.0) + travel[name]
                continue
            slot = turn[device]
            start = max(link[device], free[device][slot], 0.0 if overlap else clock)
            link[device] = start + travel[name]
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
        seconds = travel_seconds(device_map, segment, bandwidth)
        working += compute.get(segment.name, 0.0)
        if segment.name in streamed:
            busy[device_map.runs[segment.name]] += seconds
        else:
            working += seconds
    return max(working, *busy.values(), 0.0)


def travel_seconds(device_map: DeviceMap, segment: Segment, bandwidth: Bandwidth) -> float:
    """Return the seconds in which a segment reaches its device; 0 if it is there, or if only rows of it move.

    Raises:
        ConfigError: its home has no bandwidth above 0.
    """
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
    """Refuse other things than a map and seconds by its segments.

    Raises:
        ConfigError: no map, no mapping, or a segment that the map does not have.
    """
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
