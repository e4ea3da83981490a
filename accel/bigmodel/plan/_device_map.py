# SPDX-License-Identifier: Apache-2.0
"""`DeviceMap`: home and computing device of each segment, inferred or written by hand, under one law of memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import cast, overload

import msgspec

from accel.bigmodel.plan._skeleton import Segment, Skeleton
from accel.errors import ConfigError, PlacementError
from accel.errors._checks import check_count, did_you_mean
from accel.storage import parse_size

HOST = "cpu"
STORES = ("mmap", "disk")  # homes that compute nothing


class DeviceMap(msgspec.Struct, frozen=True, kw_only=True):
    """Home and computing device of each segment. It keeps the law: on each device, resident + window <= limit.

    Devices have torch's names, such as "cuda:0". "cpu" is the host's memory, "mmap" are files mapped into memory, which
    the system may drop and read again, "disk" are files read past its cache. A segment with another home than its
    computing device streams: its bytes pass through the slots of that device whenever it runs. Mapped files compute on
    the host in place, and embeddings away from home move rows alone: neither takes a slot. Segments reach a GPU through
    pinned memory of the host, as much as the GPU's slots. A weight with a storage dtype has it at home, and its own
    dtype on the slot; so a mapped segment with such a weight takes a slot of the host. Segments that stay on their
    computing device have a smaller storage dtype there too. Each call casts its block: the window has room for one.

    Attributes:
        skeleton: the model.
        home: by segment, the place of its bytes between uses.
        runs: by segment, the device that computes it.
        slots: number of streamed segments that a device holds at a time.
        limits: bytes by device, "cpu" and home; places without a limit are absent.
        chosen: the ways that `infer_device_map` tried, with their bytes, as a text; "" where it had no choice.

    Raises:
        ConfigError: a map of other segments, an unknown place, a segment that streams but may not, tied segments on two
            devices, or a number of slots below 1.
        PlacementError: more bytes in a place than its limit.
    """

    skeleton: Skeleton
    home: Mapping[str, str]
    runs: Mapping[str, str]
    slots: int = 2
    limits: Mapping[str, int] = {}
    chosen: str = ""

    def __post_init__(self) -> None:
        check_count(self.slots, "the number of slots is not valid", where="DeviceMap")
        _check_names(self)
        _check_places(self)
        used = self.used_everywhere()
        for place, limit in self.limits.items():
            if used.get(place, 0) > limit:
                raise _overfull(self, place, used[place], limit)

    @property
    def devices(self) -> tuple[str, ...]:
        """Computing devices, in the order in which the model reaches them."""
        return tuple(dict.fromkeys(self.runs[segment.name] for segment in self.skeleton.segments))

    @property
    def order(self) -> tuple[str, ...]:
        """Streamed segments in the order of execution; after the last comes the first."""
        return tuple(segment.name for segment in self.skeleton.segments if self._streams(segment))

    def streams(self, segment: str) -> bool:
        """Return whether a segment, by name, passes through the slots of its computing device."""
        return any(self._streams(each) for each in self.skeleton.segments if each.name == segment)

    def slot_bytes(self, device: str) -> int:
        """Return the size of each slot of a device: its largest streamed segment; 0 without one."""
        streamed = (each for each in self.skeleton.segments if self.runs[each.name] == device and self._streams(each))
        return max((each.moving for each in streamed), default=0)

    def cast_bytes(self, device: str) -> int:
        """Return the bytes in which a device casts the resident segment of a call: its largest; 0 without a cast."""
        return max((each.casting for each in self._at_home(device)), default=0)

    def window(self, device: str) -> int:
        """Return the bytes of a device's slots and casts; of "cpu", also pinned memory that leads to other devices."""
        served = self.devices if device == HOST else (device,)
        slots = sum(self.slot_bytes(each) for each in served if each == device or is_accelerator(each))
        return self.slots * slots + self.cast_bytes(device)

    def resident(self, place: str) -> int:
        """Return the bytes that stay in a place: on a device, in "cpu", or in files ("mmap", "disk")."""
        return self._resident().get(place, 0)

    def used(self, place: str) -> int:
        """Return `resident` + `window` of a place."""
        return self.resident(place) + self.window(place)

    def used_everywhere(self) -> dict[str, int]:
        """Return `used` by place, of all places that hold something."""
        used = self._resident()
        for place in {*self.devices, HOST}:
            used[place] = used.get(place, 0) + self.window(place)
        return {place: size for place, size in used.items() if size}

    def encode(self) -> bytes:
        """Return the map as JSON."""
        return msgspec.json.format(msgspec.json.encode(self))

    @staticmethod
    def decode(data: bytes | str) -> DeviceMap:
        """Return the map of a JSON text.

        Raises:
            ConfigError: not the text of a map, or of one that `DeviceMap` refuses.
        """
        try:
            return msgspec.json.decode(data, type=DeviceMap)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            if isinstance(error.__cause__, ConfigError):
                raise error.__cause__ from None
            raise ConfigError("the device map is not valid", got=str(error), where="DeviceMap.decode") from error

    def _streams(self, segment: Segment) -> bool:
        home, runs = self.home[segment.name], self.runs[segment.name]
        in_place = home == runs or (home == "mmap" and runs == HOST and not segment.is_cast)
        return not in_place and not segment.rows and segment.moving > 0

    def _at_home(self, device: str) -> Iterator[Segment]:
        for segment in self.skeleton.segments:
            if self.home[segment.name] == self.runs[segment.name] == device:
                yield segment

    def _resident(self) -> dict[str, int]:
        held = dict[str, int]()
        for segment in self.skeleton.segments:
            home, runs = self.home[segment.name], self.runs[segment.name]
            moving = segment.resident_memory if home == runs else segment.home_memory
            for place, size in ((home, moving), (runs, segment.fixed)):
                held[place] = held.get(place, 0) + size
        return held


def is_accelerator(place: str) -> bool:
    """Return whether a computing device has separate memory, which "cpu:0" has not."""
    return place.partition(":")[0] != HOST


def check_map(device_map: object, *, where: str) -> None:
    """Refuse other things than device maps, such as "auto", a dict of places or a skeleton, by a `ConfigError`."""
    if isinstance(device_map, DeviceMap):
        return
    make = "accel.infer_device_map(accel.bigmodel.describe(model), max_memory)"
    if isinstance(device_map, Mapping):
        make = "accel.bigmodel.check_device_map(accel.bigmodel.describe(model), places)"
    is_short = isinstance(device_map, str | int | Mapping)
    got = repr(cast(object, device_map)) if is_short else type(device_map).__name__
    raise ConfigError(
        "the device map is not valid", expected="an accel.bigmodel.DeviceMap", got=got, where=where, fix=f"Pass {make}."
    )


def _check_names(found: DeviceMap) -> None:
    names = {segment.name for segment in found.skeleton.segments}
    for field, given in (("home", found.home), ("runs", found.runs)):
        if set(given) != names:
            missing = sorted(names - given.keys())
            unknown = sorted(given.keys() - names)
            facts = [f"without {', '.join(map(repr, missing[:5]))}"] if missing else []
            facts += [f"with {', '.join(map(repr, unknown[:5]))}"] if unknown else []
            raise ConfigError(
                "a map of other segments", expected="each once", got=" and ".join(facts), where=f"DeviceMap.{field}"
            )


def _check_places(found: DeviceMap) -> None:
    for segment in found.skeleton.segments:
        home, runs = found.home[segment.name], found.runs[segment.name]
        if runs in STORES:
            raise ConfigError(
                f"{runs!r} computes nothing",
                expected="a device or 'cpu'",
                got=repr(runs),
                where=f"DeviceMap.runs[{segment.name!r}]",
            )
        if home not in (runs, HOST, *STORES):
            raise ConfigError(
                "a segment that streams from another device",
                expected=f"{runs!r}, 'cpu', 'mmap' or 'disk'",
                got=repr(home),
                where=f"DeviceMap.home[{segment.name!r}]",
            )
        if home != runs and not segment.movable:
            raise ConfigError(
                "a segment that cannot move",
                expected=f"{runs!r}, its computing device",
                got=repr(home),
                where=f"DeviceMap.home[{segment.name!r}]",
                fix="A parent's own parameters, modules below 1 MiB, and embeddings with max_norm=, which write to "
                "their weights, stay where they compute.",
            )
    for group in found.skeleton.tied_segments():
        if len({found.runs[name] for name in group}) > 1:
            raise ConfigError(
                "tied weights on two devices",
                expected="one device for all of them",
                got=", ".join(f"{name!r} on {found.runs[name]}" for name in group),
                where="DeviceMap.runs",
            )


def _overfull(found: DeviceMap, place: str, used: int, limit: int) -> PlacementError:
    window = found.window(place)
    cast = found.cast_bytes(place)
    slots = f" and {window - cast} in {found.slots} slots" if window > cast else ""
    slots += f" and {cast} to cast" if cast else ""
    return PlacementError(
        f"{place!r} is too small",
        expected=f"at most {limit} bytes",
        got=f"{used}: {used - window} resident{slots}",
        where=f"DeviceMap.limits[{place!r}]",
        fix=f"Give it {used} bytes, or place fewer segments there.",
    )


_DEVICE = re.compile(r"[a-z_]+:[0-9]+|mps")

_EXAMPLE = "a limit for each device, such as {0: '20GB', 'cpu': '60GB', 'disk': None}"

# A mapping's keys are invariant. Overloads separate the two kinds, so that mypy types a literal of mixed keys.
MixedLimits = Mapping[int | str, int | str | None]
PlainLimits = Mapping[str, int | str | None] | Mapping[int, int | str | None]
Limits = MixedLimits | PlainLimits


class Places(msgspec.Struct, frozen=True, kw_only=True):
    """Places that a plan may use.

    Attributes:
        devices: computing devices with their limits in bytes, in order; only the host if there is no other.
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
    """Return the places of `max_memory`; unknown ones, two names of one, and no device are a `ConfigError`."""
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
            fix="accel.bigmodel.available_memory(device, reserve='2GB') asks a device for what is free.",
        )
    homes = {name: limits[name] for name in (HOST, *(key for key in limits if key in STORES)) if name in limits}
    return Places(devices=devices, homes=homes)


def place_name(key: int | str, *, where: str) -> str:
    """Return the name of a place: of 1, "cuda:1". Other keys are a `ConfigError`."""
    if type(key) is int and key >= 0:
        return f"cuda:{key}"
    if key in (HOST, *STORES) or (isinstance(key, str) and _DEVICE.fullmatch(key)):
        return str(key)
    raise ConfigError(
        "the place is not valid",
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
            fix="accel.bigmodel.available_memory(device, reserve='2GB') asks a device for what is free.",
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


_WHERE = "places"


@overload
def check_device_map(
    skeleton: Skeleton, places: Mapping[str, int | str], *, max_memory: MixedLimits | None = None, slots: int = 2
) -> DeviceMap: ...


@overload
def check_device_map(
    skeleton: Skeleton, places: Mapping[str, int | str], *, max_memory: PlainLimits, slots: int = 2
) -> DeviceMap: ...


def check_device_map(
    skeleton: Skeleton, places: Mapping[str, int | str], *, max_memory: Limits | None = None, slots: int = 2
) -> DeviceMap:
    """Make a device map of places by path, such as {"": 0, "model.layers.7": "cpu"}. Pure.

    A path means everything below it, and the longest path counts. A segment on "cpu", "mmap" or "disk" computes
    on the device of the segment before it, the first ones on the first device. Segments that cannot move stay on that
    device. Without a device the host computes.

    Args:
        skeleton: the model, as `describe` returns it.
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
    _check_named_places(places)
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


def _check_named_places(places: object) -> None:
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
