# SPDX-License-Identifier: Apache-2.0
"""`infer_device_map`: the device map of a model under limits of memory; pure arithmetic on integers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, get_args, overload

import msgspec

from accel.bigmodel.plan._device_map import (
    HOST,
    STORES,
    DeviceMap,
    Limits,
    MixedLimits,
    Places,
    PlainLimits,
    is_accelerator,
    read_limits,
)
from accel.bigmodel.plan._placement import (
    Fill,
    Placement,
    Sizes,
    TooSmall,
    Units,
    choose_streamed,
    divide_resident,
    divide_streamed,
    fewest,
    first_working,
    sizes_of,
)
from accel.bigmodel.plan._skeleton import Skeleton, format_name
from accel.errors import PlacementError
from accel.errors._checks import check_choice, check_count, check_kind
from accel.terminal import show_size

if TYPE_CHECKING:
    import torch


Homes = Mapping[str, int | None]


class Homeless(NamedTuple):
    """Segments for which no place is left."""

    least: int  # the smallest limit of the host, or of the first place that has one, with which they all have a home
    error: PlacementError  # the refusal


def choose_homes(
    segments: Sequence[Sizes], homes: Homes, placement: Placement, *, pinned: int, where: str
) -> dict[str, str] | Homeless:
    """Return the home of each segment, or a refusal; a place that cannot hold all keeps as many as fit.

    `homes` has limits by place, in order. The way to devices takes `pinned` bytes of the host's limit.
    """
    found = _place(segments, homes, placement, pinned)
    if found is not None:
        return found
    total = sum(each.moving for each in segments)
    limited = next((name for name, limit in homes.items() if limit is not None), None)
    if limited is None:
        error = PlacementError(
            "no home for the segments that stream",
            expected="'cpu' with a limit, 'mmap' or 'disk'",
            got=f"{len(segments)} segments, {total} bytes",
            where=where,
            fix=f"Add 'disk': None, or 'cpu': {total + pinned}.",
        )
        return Homeless(total + pinned, error)
    least = _least_limit(segments, homes, placement, pinned, limited)
    way = f", {pinned} of them pinned on the way to devices" if pinned and limited == HOST else ""
    files = "" if any(name in STORES for name in homes) else ", or add 'disk': None"
    error = PlacementError(
        f"no room for {len(segments)} segments that stream",
        expected=f"at least {least} bytes ({show_size(least)}){way}",
        got=f"{homes[limited]}",
        where=f"{where}[{limited!r}]",
        fix=f"Give it {least} bytes{files}.",
    )
    return Homeless(least, error)


def _place(segments: Sequence[Sizes], homes: Homes, placement: Placement, pinned: int) -> dict[str, str] | None:
    """Return the home of each segment, None if a place is too small."""
    found: dict[str, str] = {}
    rest = segments
    for place, limit in homes.items():
        room = limit if limit is None or place != HOST else limit - pinned
        if room is not None and room < 0:
            return None
        leaving = _leaving(rest, room, placement)  # blocks before embeddings
        found |= dict.fromkeys((each.name for each in rest if each.name not in leaving), place)
        rest = [each for each in rest if each.name in leaving]
    return None if rest else found


def _leaving(segments: Sequence[Sizes], limit: int | None, placement: Placement) -> set[str]:
    needed = 0 if limit is None else sum(each.moving for each in segments) - limit
    if needed <= 0:
        return set()
    blocks = [each for each in segments if not each.rows]
    enough = sum(each.moving for each in blocks) >= needed
    return {each.name for each in fewest(blocks if enough else segments, needed, placement)}


def _least_limit(segments: Sequence[Sizes], homes: Homes, placement: Placement, pinned: int, place: str) -> int:
    """Return the smallest limit of a place with which all segments have a home, given the other limits."""
    enough = sum(each.moving for each in segments) + pinned
    too_little = homes[place] or 0
    return first_working(
        too_little + 1, enough, lambda limit: _place(segments, {**homes, place: limit}, placement, pinned) is not None
    )


_WHERE = "max_memory"
# Numbers that are tried, the one to prefer first. The last is tried only where the others leave bytes in files, as the
# search for what streams is greedy: in rare models three slots leave less in files than one or two.
_SLOTS = (2, 1, 3)


@overload
def infer_device_map(
    skeleton: Skeleton,
    max_memory: MixedLimits,
    *,
    slots: int | None = None,
    placement: Placement = "spread",
    fill: Fill | None = None,
    dtype: torch.dtype | str | None = None,
) -> DeviceMap: ...


@overload
def infer_device_map(
    skeleton: Skeleton,
    max_memory: PlainLimits,
    *,
    slots: int | None = None,
    placement: Placement = "spread",
    fill: Fill | None = None,
    dtype: torch.dtype | str | None = None,
) -> DeviceMap: ...


def infer_device_map(
    skeleton: Skeleton,
    max_memory: Limits,
    *,
    slots: int | None = None,
    placement: Placement = "spread",
    fill: Fill | None = None,
    dtype: torch.dtype | str | None = None,
) -> DeviceMap:
    """Choose the home and the computing device of each segment. Pure: no memory is asked for or used.

    Each device computes neighbouring segments. If not all fit, those that stream are as few bytes as can be found, and
    on each device `resident + window <= limit` holds to the byte. Embeddings leave a device before blocks do. Limits
    are for weights: leave room for activations and caches.

    Args:
        skeleton: the model, as `describe` returns it.
        max_memory: bytes, or a text such as "20GB", by place, in the order in which devices compute. Places are the
            number of a GPU or a device's name, "cpu" for the host's memory, "mmap" and "disk" for files, where None
            means no limit. Absent ones are not used. Without another device the host computes.
        slots: number of streamed segments on a device at a time: with two, the next one is copied while one runs.
            None for two, or for one or three where that leaves fewer bytes in files.
        placement: "spread" for streamed segments as far apart as possible, so that they are copied while resident ones
            compute; "last" for the last ones.
        fill: several devices: "balanced" for equal shares of their limits, "sequential" for one after the other,
            "low_first" for as little as possible on the first and equal shares of the others. None for "balanced" if
            all segments fit; else for the way that leaves the fewest bytes on "disk", then in "mmap", and then has the
            device that streams most stream the least. `explain` prints which that is.
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
        places = msgspec.structs.replace(places, homes={"mmap": places.homes["mmap"]})
        return _map_or_error(
            _finished(skeleton, places, runs, mapped, _SLOTS[0] if slots is None else slots, placement)
        )
    units = {each: Units(skeleton, each) for each in (_SLOTS if slots is None else (slots,))}
    fills: Sequence[Fill] = _fills(places) if fill is None else (fill,)
    first = next(iter(units))
    cuts = divide_resident(units[first], places.devices, fills[0])
    if cuts is not None:
        chosen = f"All segments fit on their devices: {_named(fills[0])}." if len(fills) > 1 else ""
        return _map_or_error(_filled(units[first], skeleton, places, cuts, first, placement, chosen))
    return _streamed(units, fills, skeleton, places, placement)


def _streamed(
    units: Mapping[int, Units], fills: Sequence[Fill], skeleton: Skeleton, places: Places, placement: Placement
) -> DeviceMap:
    """Return the map of the best of several ways, by number of slots and filling, or raise what the nearest lacks."""
    tried: dict[tuple[int, Fill], DeviceMap | Homeless | TooSmall] = {}
    for count, fill in itertools.product(units, fills):
        if len(units) > 1 and count == _SLOTS[-1] and any(_needs_no_files(each) for each in tried.values()):
            break
        found = divide_streamed(units[count], places.devices, fill)
        if not isinstance(found, TooSmall):
            found = _filled(units[count], skeleton, places, found, count, placement)
        tried[count, fill] = found
    maps = {way: each for way, each in tried.items() if isinstance(each, DeviceMap)}
    if maps:
        return next(iter(maps.values())) if len(tried) == 1 else _best(maps)
    homeless = [each for each in tried.values() if isinstance(each, Homeless)]
    if homeless:
        raise min(homeless, key=lambda each: each.least).error
    count = min(units)
    short = tried[count, fills[0]]  # fewer slots need less, and each filling as much
    assert isinstance(short, TooSmall)
    if HOST in places.devices:
        short = TooSmall(HOST, _least_mapped(skeleton, places, short.least, placement))
    raise _refusal(units[count], places, short, count)


def _fills(places: Places) -> Sequence[Fill]:
    """Return the ways to fill the devices that are to be tried, the one to prefer first."""
    return get_args(Fill) if len(places.devices) > 1 else get_args(Fill)[:1]


def _map_or_error(found: DeviceMap | Homeless) -> DeviceMap:
    if isinstance(found, Homeless):
        raise found.error
    return found


def _best(maps: Mapping[tuple[int, Fill], DeviceMap]) -> DeviceMap:
    """Return the map that reads the least from files, then a map with two slots, then the map with the evenest
    streams."""
    costs = {way: _cost(each) for way, each in maps.items()}
    best = min(costs, key=lambda way: (costs[way][:2], _SLOTS.index(way[0]) if way[0] in _SLOTS else 0, costs[way][2]))
    names = [f"{_named(fill)}, slots={slots}" for slots, fill in maps]
    lines = [f"{name}: {_shown(cost)}" for name, cost in zip(names, costs.values(), strict=True)]
    at = list(maps).index(best)
    lines.insert(0, f"Chosen: {lines.pop(at)}.")
    if len(lines) > 1:
        lines[0] += " The other ways:"
    return msgspec.structs.replace(maps[best], chosen="\n".join(lines))


def _needs_no_files(found: DeviceMap | Homeless | TooSmall) -> bool:
    return isinstance(found, DeviceMap) and _cost(found)[:2] == (0, 0)


def _cost(found: DeviceMap) -> tuple[int, int, int]:
    """Return the bytes on disk, those in mapped files, and those that the device streams that streams most."""
    streamed: dict[str, int] = {}
    order = frozenset(found.order)
    for segment in found.skeleton.segments:
        if segment.name in order:
            device = found.runs[segment.name]
            streamed[device] = streamed.get(device, 0) + segment.home_memory
    return found.resident("disk"), found.resident("mmap"), max(streamed.values(), default=0)


def _shown(cost: tuple[int, int, int]) -> str:
    disk, mapped, streamed = map(show_size, cost)
    return f"{disk} on disk, {mapped} in mmap, at most {streamed} streamed by a device"


def _named(fill: Fill) -> str:
    return f"fill={fill!r}"


def _filled(
    units: Units,
    skeleton: Skeleton,
    places: Places,
    cuts: Sequence[int],
    slots: int,
    placement: Placement,
    chosen: str = "",
) -> DeviceMap | Homeless:
    """Return the map of devices that compute up to these ends of units."""
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
    return _finished(skeleton, places, runs, away, slots, placement, chosen)


def _check(skeleton: object, slots: object, placement: str, fill: str | None) -> None:
    check_kind(
        skeleton,
        Skeleton,
        "the value is not a skeleton",
        expected="an accel.bigmodel.Skeleton",
        where="infer_device_map",
        fix="Pass accel.bigmodel.describe(model).",
    )
    if slots is not None:
        check_count(slots, "the number of slots is not valid", where="slots=")
    check_choice(placement, get_args(Placement), "unknown placement", where="placement=")
    check_choice("balanced" if fill is None else fill, get_args(Fill), "unknown way to fill devices", where="fill=")


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
    too_little = places.devices[HOST]
    return first_working(too_little + 1, least, lambda limit: _mapped(skeleton, places, limit, placement) is not None)


def _finished(
    skeleton: Skeleton,
    places: Places,
    runs: Mapping[str, str],
    away: Sequence[Sizes],
    slots: int,
    placement: Placement,
    chosen: str = "",
) -> DeviceMap | Homeless:
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
    if isinstance(homes, Homeless):
        return homes
    return DeviceMap(
        skeleton=skeleton,
        home={name: homes.get(name, runs[name]) for name in names},
        runs={name: runs[name] for name in names},
        slots=slots,
        limits=places.limits,
        chosen=chosen,
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
