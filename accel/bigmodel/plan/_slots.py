# SPDX-License-Identifier: Apache-2.0
"""The segments of one device that stream, so that the others and the slots fit: as few bytes as possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        resident: bytes of `moving` that it takes while it stays: fewer if it is cast.
        casting: further bytes of a call that casts it while it stays.
    """

    name: str
    moving: int
    fixed: int
    rows: bool
    at_home: int
    resident: int
    casting: int


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

    Embeddings leave first, as only rows of theirs move. Then slots of several sizes are tried, and the fewest bytes
    stream.

    Args:
        segments: segments that the device computes, in the order of execution.
        limit: bytes of the device.
        slots: number of slots; 0 for segments that leave the device without passing through slots.
        placement: "spread" for streamed segments as far apart as possible, "last" for the last ones.
    """
    casting = casting_of(segments)
    needed = sum(each.resident + each.fixed for each in segments) - limit
    if needed + casting <= 0:
        return ()
    tables = fewest([each for each in segments if each.rows], needed + casting, placement)
    needed -= sum(table.resident for table in tables)
    if needed + casting <= 0:
        return tables
    movable = [each for each in segments if each.moving and not each.rows]
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
