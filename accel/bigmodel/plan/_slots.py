# SPDX-License-Identifier: Apache-2.0
"""The segments of one device that stream, so that the others and the slots fit: as few bytes as possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from accel.bigmodel.plan._skeleton import Segment

Placement = Literal["spread", "last"]

_MOST_SIZES = 12  # of slots that are tried


class Sizes(NamedTuple):
    """A segment's bytes of memory.

    Attributes:
        name: of the segment.
        moving: bytes that stream.
        fixed: bytes that stay on the computing device.
        rows: whether only rows of it stream, without a slot.
        at_home: bytes that it takes in a home other than the computing device.
    """

    name: str
    moving: int
    fixed: int
    rows: bool
    at_home: int


def sizes_of(segment: Segment) -> Sizes:
    """Return the sizes of a segment."""
    return Sizes(segment.name, segment.moving, segment.fixed, segment.rows, segment.home_memory)


def least_memory(segments: Sequence[Sizes], slots: int) -> int:
    """Return the smallest limit of a device that can compute the segments.

    The largest segments stay and all others stream: for some number of them this takes the least.
    """
    sizes = Counter([each.moving for each in segments if not each.rows])
    resident = 0
    least = sum(size * count for size, count in sizes.items())
    for size in sorted(sizes, reverse=True):
        least = min(least, resident + slots * size)
        if resident >= least:
            break
        resident += size * sizes[size]
    return least + sum(each.fixed for each in segments)


def choose_streamed(segments: Sequence[Sizes], limit: int, slots: int, placement: Placement) -> Sequence[Sizes] | None:
    """Return the segments that leave a device, so that the rest and the slots fit; None if nothing makes them fit.

    Embeddings leave first, as only rows of theirs move. Then slots of several sizes are tried, and the fewest bytes
    stream.

    Args:
        segments: segments that the device computes, in the order of execution.
        limit: bytes of the device.
        slots: number of slots; 0 for segments that leave the device without passing through slots.
        placement: "spread" for streamed segments as far apart as possible, "last" for the last ones.
    """
    needed = sum(each.moving + each.fixed for each in segments) - limit
    if needed <= 0:
        return ()
    tables = fewest([each for each in segments if each.rows], needed, placement)
    needed -= sum(table.moving for table in tables)
    if needed <= 0:
        return tables
    movable = [each for each in segments if each.moving and not each.rows]
    best: Sequence[Sizes] | None = None
    least = 0
    for size in _slot_sizes(movable, needed, slots):
        if best is not None and needed + slots * size >= least:
            break  # slots of this size need more bytes to stream than do already
        picked = fewest([each for each in movable if each.moving <= size], needed, placement, slots=slots)
        moved = sum(each.moving for each in picked)
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
    for each in sorted(picked, key=lambda each: each.moving, reverse=True):
        if each.moving <= spare:
            spare -= each.moving
            kept.add(each.name)
    return [each for each in picked if each.name not in kept]


def _slot_sizes(movable: Sequence[Sizes], needed: int, slots: int) -> Sequence[int]:
    """Return sizes of slots for which all segments up to it free enough, ascending; some of many."""
    sizes = Counter([each.moving for each in movable])
    possible: list[int] = []
    freed = 0
    for size in sorted(sizes):
        freed += size * sizes[size]
        if freed - slots * size >= needed:
            possible.append(size)
    return possible[:: max(1, len(possible) // _MOST_SIZES)]


def _pick(segments: Sequence[Sizes], count: int, placement: Placement) -> Sequence[Sizes]:
    """Return so many of the segments: the last ones, or evenly spread ones."""
    total = len(segments)
    if placement == "last":
        return segments[total - count :]
    return [segments[(2 * at + 1) * total // (2 * count)] for at in range(count)]


def _spare(picked: Sequence[Sizes], needed: int, slots: int) -> int:
    """Return the bytes that the picked segments free beyond those needed."""
    moving = [each.moving for each in picked]
    return sum(moving) - slots * max(moving, default=0) - needed
