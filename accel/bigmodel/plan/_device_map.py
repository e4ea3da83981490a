# SPDX-License-Identifier: Apache-2.0
"""`DeviceMap`: where each segment of a model lies and where it computes, with the law of memory that it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import msgspec

from accel.bigmodel.plan._skeleton import Segment, Skeleton
from accel.errors import ConfigError, PlacementError

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

    def __post_init__(self) -> None:
        if type(self.slots) is not int or self.slots < 1:
            raise ConfigError("not a number of slots", expected="1 or more", got=repr(self.slots), where="DeviceMap")
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
            raise ConfigError("not a device map", got=str(error), where="DeviceMap.decode") from error

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
    """Return whether a computing device has memory of its own, as "cpu:0" has not."""
    return place.partition(":")[0] != HOST


def check_map(device_map: object, *, where: str) -> None:
    """Refuse other things than device maps, such as "auto", a dict of places or a skeleton.

    Raises:
        ConfigError: no map; with the call that makes one of it.
    """
    if isinstance(device_map, DeviceMap):
        return
    make = "accel.infer_device_map(accel.describe(model), max_memory)"
    if isinstance(device_map, Mapping):
        make = "accel.check_device_map(accel.describe(model), places)"
    is_short = isinstance(device_map, str | int | Mapping)
    got = repr(cast(object, device_map)) if is_short else type(device_map).__name__
    raise ConfigError("not a device map", expected="an accel.DeviceMap", got=got, where=where, fix=f"Pass {make}.")


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
                fix="A parent's own parameters, and modules below 1 MiB, stay where they compute.",
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
        fix=f"Give it {used} bytes, or let fewer segments lie there.",
    )
