# SPDX-License-Identifier: Apache-2.0
"""The device of each segment, neighbours together, and the segments that stream so that the others fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Literal, NamedTuple

from accel.bigmodel.plan._skeleton import Segment, Skeleton

Placement = Literal["spread", "last"]

_MOST_SIZES = 12  # of slots that are tried


class Sizes(NamedTuple):
    """A segment's bytes of memory."""

    name: str  # of the segment
    moving: int  # bytes that stream
    fixed: int  # bytes that stay on the computing device
    rows: bool  # whether only rows of it stream, without a slot
    at_home: int  # bytes that it takes in a home other than the computing device
    resident: int  # bytes of `moving` that it takes while it stays: fewer if it is cast
    casting: int  # further bytes of a call that casts it while it stays


def sizes_of(segment: Segment) -> Sizes:
    """Return the sizes of a segment."""
    return Sizes(
        segment.name,
        segment.moving,
        segment.fixed,
        segment.rows,
        segment.home_memory,
        segment.resident_memory,
        segment.casting,
    )


def casting_of(segments: Iterable[Sizes]) -> int:
    """Return the bytes in which a device casts the segments that stay, one at a time."""
    return max((each.casting for each in segments), default=0)


def least_memory(segments: Sequence[Sizes], slots: int) -> int:
    """Return the smallest limit of a device that can compute the segments.

    The largest segments stay and all others stream: for some number of them this takes the least.
    """
    resident = casting = 0
    blocks = [each for each in segments if not each.rows]
    least = casting_of(blocks) + sum(each.resident for each in blocks)
    for size, same in _by_size(blocks):
        least = min(least, resident + casting + slots * size)
        if resident >= least:
            break
        resident += sum(each.resident for each in same)
        casting = max(casting, casting_of(same))
    return least + sum(each.fixed for each in segments)


def choose_streamed(segments: Sequence[Sizes], limit: int, slots: int, placement: Placement) -> Sequence[Sizes] | None:
    """Return the segments that leave a device, so that the rest and the slots fit; None if nothing makes them fit.

    Without slots, segments leave the device for good. "spread" leaves them as far apart as possible.
    """
    casting = casting_of(segments)
    needed = sum(each.resident + each.fixed for each in segments) - limit
    if needed + casting <= 0:
        return ()
    # embeddings first: only rows of theirs move, and need no slot
    tables = fewest([each for each in segments if each.rows], needed + casting, placement)
    needed -= sum(table.resident for table in tables)
    if needed + casting <= 0:
        return tables
    movable = [each for each in segments if each.moving and not each.rows]
    # a smaller slot frees memory, but then larger blocks stay: of several sizes, the fewest bytes stream
    best: Sequence[Sizes] | None = None
    least = 0
    for size in _slot_sizes(movable, needed, slots):
        if best is not None and needed + slots * size >= least:
            break  # slots of this size need more bytes to stream than do already
        picked = fewest([each for each in movable if each.moving <= size], needed + casting, placement, slots=slots)
        moved = sum(each.at_home for each in picked)
        if best is None or moved < least:
            best = picked
            least = moved
    return None if best is None else (*tables, *best)


def fewest(segments: Sequence[Sizes], needed: int, placement: Placement, *, slots: int = 0) -> Sequence[Sizes]:
    """Return few of the segments, which free as many bytes as are needed beyond their slots; all if none do.

    Their number is found by bisection. Then those that can stay after all do, the largest first.
    """
    low = 0
    high = len(segments)
    while low < high:
        middle = (low + high) // 2
        if _spare(_pick(segments, middle, placement), needed, slots) >= 0:
            high = middle
        else:
            low = middle + 1
    picked = _pick(segments, low, placement)
    spare = _spare(picked, needed, slots)
    kept = set[str]()
    for each in sorted(picked, key=lambda each: each.resident, reverse=True):
        if each.resident <= spare:
            spare -= each.resident
            kept.add(each.name)
    return [each for each in picked if each.name not in kept]


def _slot_sizes(movable: Sequence[Sizes], needed: int, slots: int) -> Sequence[int]:
    """Return sizes of slots for which all segments up to it free enough, ascending; some of many."""
    possible: list[int] = []
    freed = sum(each.resident for each in movable)
    casting = 0  # of the larger ones, which stay
    for size, same in _by_size(movable):
        if freed - slots * size - casting >= needed:
            possible.append(size)
        freed -= sum(each.resident for each in same)
        casting = max(casting, casting_of(same))
    possible.reverse()
    return possible[:: max(1, len(possible) // _MOST_SIZES)]


def _by_size(segments: Iterable[Sizes]) -> list[tuple[int, list[Sizes]]]:
    """Return segments by size of their slots, the largest first."""
    found: dict[int, list[Sizes]] = {}
    for each in segments:
        found.setdefault(each.moving, []).append(each)
    return sorted(found.items(), reverse=True)


def _pick(segments: Sequence[Sizes], count: int, placement: Placement) -> Sequence[Sizes]:
    """Return so many of the segments: the last ones, or evenly spread ones."""
    total = len(segments)
    if placement == "last":
        return segments[total - count :]
    return [segments[(2 * at + 1) * total // (2 * count)] for at in range(count)]


def _spare(picked: Sequence[Sizes], needed: int, slots: int) -> int:
    """Return the bytes that the picked segments free beyond those needed."""
    window = slots * max((each.moving for each in picked), default=0)
    return sum(each.resident for each in picked) - window - needed


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
        """Return the smallest limit of a device that computes some units, as `least_memory` defines it."""
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
    """A device without room."""

    device: str  # the device of all that needs the fewest further bytes
    least: int  # its smallest limit with which the model runs, given the other limits


def divide_resident(units: Units, limits: Mapping[str, int], fill: Fill) -> Cuts | None:
    """Return the end of each device's units if all fit without streaming, None if they do not.

    "low_first" leaves as much of the first device free as it can; "balanced" takes equal shares of the limits.
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
    low = first_working(0, _SHARES, lambda low: packed(low, _SHARES) is not None)
    return packed(low, first_working(0, _SHARES, lambda share: packed(low, share) is not None))


def divide_streamed(units: Units, limits: Mapping[str, int], fill: Fill) -> Cuts | TooSmall:
    """Return the end of each device's units if some must stream, or the device that lacks room."""
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
        # in sequence only the last units stream; elsewhere shares of the limits let devices stream alike
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


def first_working(low: int, most: int, works: Callable[[int], bool]) -> int:
    """Return the first number from `low` on that works, as all after it do; `most` if none below it does."""
    while low < most:
        middle = (low + most) // 2
        if works(middle):
            most = middle
        else:
            low = middle + 1
    return low


def _last(most: int, works: Callable[[int], bool]) -> int:
    """Return the last number up to `most` that works, 0 at least."""
    return first_working(0, most, lambda number: not works(number + 1))
