# SPDX-License-Identifier: Apache-2.0
"""Device maps that users write, as places by path, checked by the law of those that are inferred."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from accel.bigmodel.plan._device_map import HOST, STORES, DeviceMap
from accel.bigmodel.plan._limits import Limits, place_name, read_limits
from accel.bigmodel.plan._skeleton import Segment, Skeleton
from accel.errors import ConfigError, did_you_mean

_WHERE = "places"


def check_device_map(
    skeleton: Skeleton, places: Mapping[str, int | str], *, max_memory: Limits | None = None, slots: int = 2
) -> DeviceMap:
    """Make a device map of places by path, such as {"": 0, "model.layers.7": "cpu"}. Pure.

    A path stands for all that lies below it, and the longest path counts. A segment on "cpu", "mmap" or "disk" computes
    on the device of the segment before it, the first ones on the first device. Segments that cannot move stay on that
    device. Without a device the host computes.

    Args:
        skeleton: the model, as of `describe`.
        places: a GPU's number, a device's name, "cpu", "mmap" or "disk" by path of a segment or of a module around
            several; "" for the model.
        max_memory: limits as for `infer_device_map`; None to check none.
        slots: number of streamed segments that a device holds at a time.

    Returns:
        The map, with the limits.

    Raises:
        ConfigError: no mapping, a path that the model does not have or that divides a segment, a segment without a
            place, a place that is none or that `max_memory` lacks, or tied segments on two devices.
        PlacementError: more bytes in a place than its limit.
    """
    _check_places(places)
    named = {path: place_name(place, where=f"{_WHERE}[{path!r}]") for path, place in places.items()}
    _check_paths(skeleton, named)
    chosen = {segment.name: _place_of(segment, named) for segment in skeleton.segments}
    devices = [place for place in chosen.values() if place not in (HOST, *STORES)]
    device = devices[0] if devices else HOST
    home: dict[str, str] = {}
    runs: dict[str, str] = {}
    first = {name: group[0] for group in skeleton.tied_segments() for name in group}
    for segment in skeleton.segments:
        place = chosen[segment.name]
        device = place if place in devices else device
        leader = first.get(segment.name, segment.name)
        runs[segment.name] = runs.get(leader, device) if place not in devices else device
        home[segment.name] = place if segment.moving else runs[segment.name]
    limits = {} if max_memory is None else read_limits(max_memory, where="max_memory").limits
    unlimited = {place for place in (*home.values(), *runs.values()) if place not in (*limits, *STORES)}
    if max_memory is not None and unlimited:
        raise ConfigError(
            "a place without a limit",
            expected="a limit for each device that is used, and for 'cpu'",
            got=repr(min(unlimited)),
            where="max_memory",
            fix="Name it there, or leave max_memory= out to check nothing.",
        )
    return DeviceMap(skeleton=skeleton, home=home, runs=runs, slots=slots, limits=limits)


def _check_places(places: object) -> None:
    paths = [*cast("Mapping[object, object]", places)] if isinstance(places, Mapping) else [None]
    if not all(isinstance(path, str) for path in paths):
        raise ConfigError(
            "places are given by path",
            expected='a mapping such as {"": 0, "model.layers.7": "cpu"}',
            got=repr(cast(object, places)),
            where=_WHERE,
            fix="accel.infer_device_map(skeleton, max_memory) finds places.",
        )


def _check_paths(skeleton: Skeleton, named: Mapping[str, str]) -> None:
    names = [segment.name for segment in skeleton.segments]
    weights = [path for weight in skeleton.weights() for path in (weight.name, *weight.tied)]
    for path in named:
        if not path or path in names or any(name.startswith(f"{path}.") for name in names):
            continue
        if any(name == path or name.startswith(f"{path}.") for name in weights):
            holder = skeleton.segment_of(path)
            raise ConfigError(
                "a path that divides a segment",
                expected=f"{holder!r}, which moves as one",
                got=repr(path),
                where=_WHERE,
                fix="Name the segment, or describe the model with smaller blocks.",
            )
        raise ConfigError("no such path", got=repr(path), where=_WHERE, fix=did_you_mean(path, names))


def _place_of(segment: Segment, named: Mapping[str, str]) -> str:
    path = segment.name
    while path not in named:
        if not path:
            raise ConfigError(
                "a segment without a place",
                got=repr(segment.name),
                where=_WHERE,
                fix='Give it one, or "" for all that no other path names.',
            )
        path = path.rpartition(".")[0]
    return named[path]
