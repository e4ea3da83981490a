# SPDX-License-Identifier: Apache-2.0
"""Devices of a model's segments: each computes neighbours, so that activations cross from one to the next once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Literal, NamedTuple

from accel.bigmodel.plan._skeleton import Skeleton
from accel.bigmodel.plan._slots import Sizes, casting_of, least_memory, sizes_of

Fill = Literal["balanced", "sequential", "low_first"]
Cuts = Sequence[int]

_SHARES = 4096  # steps of a share of a device's limit


class Units:
    """A model's segments in the order of execution, in units that compute on one device.

    Args:
        skeleton: the model; segments with tied weights are one unit, at the place of the first.
        slots: number of slots of each device.
    """

    def __init__(self, skeleton: Skeleton, slots: int) -> None:
        first = {name: group[0] for group in skeleton.tied_segments() for name in group}
        units: dict[str, list[Sizes]] = {}
        for segment in skeleton.segments:
            units.setdefault(first.get(segment.name, segment.name), []).append(sizes_of(segment))
        self._units = list(units.values())
        self._slots = slots
        memory = (sum(each.resident + each.fixed for each in unit) for unit in self._units)
        self._ends = [0, *accumulate(memory)]
        self._casting = [casting_of(unit) for unit in self._units]

    def __len__(self) -> int:
        return len(self._units)

    @property
    def memory(self) -> int:
        """Bytes of all units."""
        return self._ends[-1]

    def segments(self, start: int, end: int) -> Sequence[Sizes]:
        """Return the segments of some units."""
        return list(chain.from_iterable(self._units[start:end]))

    def least(self, start: int, end: int) -> int:
        """Return the smallest limit of a device that computes some units, as `least_memory` says."""
        return least_memory(self.segments(start, end), self._slots)

    def longest_resident(self, start: int, limit: int) -> int:
        """Return the end of as many units as fit without streaming."""
        end = max(start, bisect_right(self._ends, self._ends[start] + limit) - 1)
        if not any(self._casting[start:end]):
            return end
        return start + _last(end - start, lambda count: self._memory(start, start + count) <= limit)

    def _memory(self, start: int, end: int) -> int:
        return self._ends[end] - self._ends[start] + max(self._casting[start:end], default=0)

    def longest_streamed(self, start: int, limit: int) -> int:
        """Return the end of as many units as fit if most of them stream."""
        return start + _last(len(self) - start, lambda count: self.least(start, start + count) <= limit)

    def earliest_streamed(self, end: int, limit: int) -> int:
        """Return the start of as many units up to an end as fit if most of them stream."""
        return end - _last(end, lambda count: self.least(end - count, end) <= limit)

    def at_share(self, part: int, whole: int) -> int:
        """Return the end of the units that make up a share of the model's bytes."""
        return bisect_right(self._ends, self.memory * part // max(whole, 1)) - 1


class TooSmall(NamedTuple):
    """A device without room.

    Attributes:
        device: the device of all that needs the fewest further bytes.
        least: its smallest limit with which the model runs, given those of the others.
    """

    device: str
    least: int


def divide_resident(units: Units, limits: Mapping[str, int], fill: Fill) -> Cuts | None:
    """Return the end of each device's units if all fit without streaming, None if they do not.

    Args:
        units: the model.
        limits: bytes by device, in order.
        fill: "sequential" fills one device after the other; "balanced" takes equal shares of their limits; "low_first"
            leaves as much of the first device free as it can, and balances the others.
    """
    sizes = list(limits.values())

    def packed(low: int, share: int) -> Cuts | None:
        cuts = [0]
        for at, limit in enumerate(sizes):
            part = low if fill == "low_first" and at == 0 else share
            cuts.append(units.longest_resident(cuts[-1], limit * part // _SHARES))
        return cuts[1:] if cuts[-1] == len(units) else None

    if packed(_SHARES, _SHARES) is None or fill == "sequential":
        return packed(_SHARES, _SHARES)
    low = _first(_SHARES, lambda low: packed(low, _SHARES) is not None)
    return packed(low, _first(_SHARES, lambda share: packed(low, share) is not None))


def divide_streamed(units: Units, limits: Mapping[str, int], fill: Fill) -> Cuts | TooSmall:
    """Return the end of each device's units if some must stream, or the device that lacks room.

    Args:
        units: the model.
        limits: bytes by device, in order.
        fill: "sequential" lets devices hold as many units as fit without streaming, and the last ones stream; others
            divide units by the limits, so that devices stream alike.
    """
    earliest = [len(units)]  # where each device may begin at the earliest, from the last to the first
    for limit in reversed([*limits.values()]):
        earliest.append(units.earliest_streamed(earliest[-1], limit))
    if earliest.pop() > 0:
        return _too_small(units, limits, earliest[::-1])
    cuts = [0]
    given = 0
    for limit, least_end in zip(limits.values(), reversed(earliest), strict=True):
        given += limit
        start = cuts[-1]
        share = units.at_share(given, sum(limits.values()))
        wanted = units.longest_resident(start, limit) if fill == "sequential" else share
        end = max(wanted, least_end, start)
        cuts.append(end if units.least(start, end) <= limit else units.longest_streamed(start, limit))
    return cuts[1:]


def _too_small(units: Units, limits: Mapping[str, int], ends: Sequence[int]) -> TooSmall:
    found: list[tuple[int, TooSmall]] = []
    start = 0
    for (device, limit), end in zip(limits.items(), ends, strict=True):
        least = units.least(start, max(start, end))
        found.append((least - limit, TooSmall(device, least)))
        start = units.longest_streamed(start, limit)
    return min(found)[1]


def _first(most: int, works: Callable[[int], bool]) -> int:
    """Return the first number from 0 that works, `most` for none below it."""
    low = 0
    while low < most:
        middle = (low + most) // 2
        if works(middle):
            most = middle
        else:
            low = middle + 1
    return low


def _last(most: int, works: Callable[[int], bool]) -> int:
    """Return the last number up to `most` that works, 0 at least."""
    return _first(most, lambda number: not works(number + 1))
