# SPDX-License-Identifier: Apache-2.0
"""`infer_device_map`: the device map of a model under limits of memory; arithmetic on integers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, get_args

import msgspec

from accel.bigmodel.plan._device_map import HOST, DeviceMap, is_accelerator
from accel.bigmodel.plan._dtype_names import format_name
from accel.bigmodel.plan._homes import choose_homes
from accel.bigmodel.plan._limits import Limits, Places, read_limits
from accel.bigmodel.plan._ranges import Fill, TooSmall, Units, divide_resident, divide_streamed
from accel.bigmodel.plan._skeleton import Skeleton
from accel.bigmodel.plan._slots import Placement, Sizes, choose_streamed, sizes_of
from accel.errors import ConfigError, PlacementError, check_choice
from accel.terminal import show_size

if TYPE_CHECKING:
    import torch

_WHERE = "max_memory"


def infer_device_map(
    skeleton: Skeleton,
    max_memory: Limits,
    *,
    slots: int = 2,
    placement: Placement = "spread",
    fill: Fill = "balanced",
    dtype: torch.dtype | str | None = None,
) -> DeviceMap:
    """Choose the home and the computing device of each segment. Pure: no memory is asked for or used.

    Each device computes neighbouring segments. If not all fit, those that stream are as few bytes as can be found, and
    on each device `resident + window <= limit` holds to the byte. Embeddings leave a device before blocks do. Limits
    are for weights: leave room for activations and caches.

    Args:
        skeleton: the model, as of `describe`.
        max_memory: bytes, or a text such as "20GB", by place, in the order in which devices compute. Places are the
            number of a GPU or a device's name, "cpu" for the host's memory, "mmap" and "disk" for files, where None
            means no limit. Absent ones are not used. Without another device the host computes.
        slots: number of streamed segments that a device holds at a time: two let the next one travel while one runs.
        placement: "spread" for streamed segments as far apart as possible, so that they travel while resident ones
            compute; "last" for the last ones.
        fill: several devices: "balanced" for equal shares of their limits, "sequential" for one after the other,
            "low_first" for as little as possible on the first and equal shares of the others.
        dtype: dtype that floating-point weights will have; None for the skeleton's.

    Returns:
        The map, with the limits.

    Raises:
        PlacementError: the model does not fit; with the smallest limit that works.
        ConfigError: an argument that means nothing.
    """
    _check(skeleton, slots, placement, fill)
    if dtype is not None:
        skeleton = skeleton.cast(format_name(dtype, where="dtype="))
    places = read_limits(max_memory, where=_WHERE)
    if HOST in places.devices and not places.homes and skeleton.memory > places.devices[HOST]:
        raise _host_alone_is_too_small(skeleton, places)
    mapped = _mapped(skeleton, places, places.devices.get(HOST, -1), placement)
    if mapped is not None:
        runs = dict.fromkeys((segment.name for segment in skeleton.segments), HOST)
        homes = {"mmap": places.homes["mmap"]}
        return _finished(skeleton, msgspec.structs.replace(places, homes=homes), runs, mapped, slots, placement)
    units = Units(skeleton, slots)
    cuts = divide_resident(units, places.devices, fill)
    if cuts is None:
        cuts = divide_streamed(units, places.devices, fill)
    if isinstance(cuts, TooSmall):
        if HOST in places.devices:
            cuts = TooSmall(HOST, _least_mapped(skeleton, places, cuts.least, placement))
        raise _refusal(units, places, cuts, slots)
    runs: dict[str, str] = {}
    away: list[Sizes] = []
    start = 0
    for (device, limit), end in zip(places.devices.items(), cuts, strict=True):
        segments = units.segments(start, end)
        runs |= dict.fromkeys((each.name for each in segments), device)
        streamed = choose_streamed(segments, limit, slots, placement)
        assert streamed is not None, f"{device} was found large enough"
        away += streamed
        start = end
    return _finished(skeleton, places, runs, away, slots, placement)


def _check(skeleton: object, slots: object, placement: str, fill: str) -> None:
    if not isinstance(skeleton, Skeleton):
        raise ConfigError(
            "not a skeleton",
            expected="an accel.Skeleton",
            got=type(skeleton).__name__,
            where="infer_device_map",
            fix="Pass accel.describe(model).",
        )
    if type(slots) is not int or slots < 1:
        raise ConfigError("not a number of slots", expected="1 or more", got=repr(slots), where="slots=")
    check_choice(placement, get_args(Placement), "unknown placement", where="placement=")
    check_choice(fill, get_args(Fill), "unknown way to fill devices", where="fill=")


def _mapped(skeleton: Skeleton, places: Places, limit: int, placement: Placement) -> Sequence[Sizes] | None:
    """Return the segments that the host computes from mapped files, which take no slots; None if that is no way."""
    if HOST not in places.devices or "mmap" not in places.homes:
        return None
    if any(segment.is_cast and not segment.rows for segment in skeleton.segments):
        return None
    away = choose_streamed([sizes_of(segment) for segment in skeleton.segments], limit, 0, placement)
    most = places.homes["mmap"]
    fits = away is not None and (most is None or sum(each.at_home for each in away) <= most)
    return away if fits else None


def _least_mapped(skeleton: Skeleton, places: Places, least: int, placement: Placement) -> int:
    """Return the smallest limit of the host with which it computes the model, if `least` is that with slots."""
    low = places.devices[HOST]
    while low + 1 < least:
        middle = (low + least) // 2
        if _mapped(skeleton, places, middle, placement) is None:
            low = middle
        else:
            least = middle
    return least


def _finished(
    skeleton: Skeleton,
    places: Places,
    runs: Mapping[str, str],
    away: Sequence[Sizes],
    slots: int,
    placement: Placement,
) -> DeviceMap:
    names = [segment.name for segment in skeleton.segments]
    order = {name: at for at, name in enumerate(names)}
    leaving = sorted(away, key=lambda each: order[each.name])
    largest: dict[str, int] = {}
    for each in leaving:
        device = runs[each.name]
        if is_accelerator(device) and not each.rows:
            largest[device] = max(largest.get(device, 0), each.moving)
    pinned = slots * sum(largest.values())
    at_home = [each._replace(moving=each.at_home, resident=each.at_home) for each in leaving]
    homes = choose_homes(at_home, places.homes, placement, pinned=pinned, where=_WHERE)
    return DeviceMap(
        skeleton=skeleton,
        home={name: homes.get(name, runs[name]) for name in names},
        runs={name: runs[name] for name in names},
        slots=slots,
        limits=places.limits,
    )


def _host_alone_is_too_small(skeleton: Skeleton, places: Places) -> PlacementError:
    return PlacementError(
        f"no room for the model in {HOST!r}, its only place",
        expected=f"at least {skeleton.memory} bytes ({show_size(skeleton.memory)})",
        got=f"{places.devices[HOST]}",
        where=f"{_WHERE}[{HOST!r}]",
        fix=f"Give it {skeleton.memory} bytes, or add files for the rest: 'mmap': None, or 'disk': None.",
    )


def _refusal(units: Units, places: Places, short: TooSmall, slots: int) -> PlacementError:
    movable = [each for each in units.segments(0, len(units)) if each.moving and not each.rows]
    largest = max(movable, key=lambda each: each.moving, default=None)
    block = "" if largest is None else f"; its largest block is {largest.name!r}, {show_size(largest.moving)}"
    fewer = ", fewer slots" if slots > 1 else ""
    return PlacementError(
        f"the model does not fit on {short.device!r}",
        expected=f"at least {short.least} bytes ({show_size(short.least)})",
        got=f"{places.devices[short.device]}{block}",
        where=f"{_WHERE}[{short.device!r}]",
        fix=f"Give it {short.least} bytes{fewer}, or describe the model with smaller blocks.",
    )
