# SPDX-License-Identifier: Apache-2.0
"""Homes of the segments that leave their device: the host first, then files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from accel.bigmodel.plan._device_map import HOST, STORES
from accel.bigmodel.plan._slots import Placement, Sizes, fewest
from accel.errors import PlacementError
from accel.terminal import show_size

Homes = Mapping[str, int | None]


def choose_homes(
    segments: Sequence[Sizes], homes: Homes, placement: Placement, *, pinned: int, where: str
) -> dict[str, str]:
    """Return the home of each segment.

    A place that cannot hold all keeps as many as fit. Blocks leave it before embeddings, in the order that `placement`
    says.

    Args:
        segments: segments that leave their device, in the order of execution.
        homes: limits in bytes by place, in order; None for no limit.
        placement: "spread" for segments of the next place as far apart as possible, "last" for the last ones.
        pinned: bytes of the host's limit that the way to other devices takes.
        where: source of the limits, for errors.

    Raises:
        PlacementError: no place is left for some.
    """
    found = _place(segments, homes, placement, pinned)
    if found is not None:
        return found
    total = sum(each.moving for each in segments)
    limited = next((name for name, limit in homes.items() if limit is not None), None)
    if limited is None:
        raise PlacementError(
            "no home for the segments that stream",
            expected="'cpu' with a limit, 'mmap' or 'disk'",
            got=f"{len(segments)} segments, {total} bytes",
            where=where,
            fix=f"Add 'disk': None, or 'cpu': {total + pinned}.",
        )
    least = _least_limit(segments, homes, placement, pinned, limited)
    way = f", {pinned} of them pinned on the way to devices" if pinned and limited == HOST else ""
    files = "" if any(name in STORES for name in homes) else ", or add 'disk': None"
    raise PlacementError(
        f"no room for {len(segments)} segments that stream",
        expected=f"at least {least} bytes ({show_size(least)}){way}",
        got=f"{homes[limited]}",
        where=f"{where}[{limited!r}]",
        fix=f"Give it {least} bytes{files}.",
    )


def _place(segments: Sequence[Sizes], homes: Homes, placement: Placement, pinned: int) -> dict[str, str] | None:
    """Return the home of each segment, None if a place is too small."""
    found: dict[str, str] = {}
    rest = segments
    for place, limit in homes.items():
        room = limit if limit is None or place != HOST else limit - pinned
        if room is not None and room < 0:
            return None
        leaving = _leaving(rest, room, placement)
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
    """Return the smallest limit of a place with which all segments have a home, given those of the others."""
    low = homes[place] or 0
    high = sum(each.moving for each in segments) + pinned
    while low + 1 < high:
        middle = (low + high) // 2
        if _place(segments, {**homes, place: middle}, placement, pinned) is None:
            low = middle
        else:
            high = middle
    return high
