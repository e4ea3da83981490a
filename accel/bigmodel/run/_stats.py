# SPDX-License-Identifier: Apache-2.0
"""Counts of a dispatched model by segment: blocks that waited for weights, and weights used outside of their block."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import msgspec
import torch

from accel.terminal import show_seconds, show_size


@dataclass(eq=False, slots=True)
class Fetches:
    """Counts of what a segment's weights moved outside of calls of blocks."""

    fetches: int = 0  # number of whole weights
    fetched_bytes: int = 0  # bytes of them
    rows: int = 0  # number of rows
    rows_bytes: int = 0  # bytes of them
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fetched(self, nbytes: int) -> None:
        """Count a whole weight."""
        with self._lock:
            self.fetches += 1
            self.fetched_bytes += nbytes

    def gathered(self, rows: torch.Tensor, count: int) -> None:
        """Count rows."""
        with self._lock:
            self.rows += count
            self.rows_bytes += rows.nbytes


class SegmentStats(msgspec.Struct, frozen=True):
    """Counts of one segment since the model was dispatched.

    Attributes:
        name: path of the segment.
        home: place of its bytes between uses.
        hits: calls that found the weights on a slot.
        waits: calls that did not.
        waited_s: seconds in which calls waited for the weights.
        moved_bytes: bytes that were brought to slots.
        fetches: whole weights fetched outside of calls of the segment, each alone, while computation waited.
        fetched_bytes: bytes of them.
        rows: rows of an embedding that were looked up in its home.
        rows_bytes: bytes of them.
    """

    name: str
    home: str
    hits: int = 0
    waits: int = 0
    waited_s: float = 0.0
    moved_bytes: int = 0
    fetches: int = 0
    fetched_bytes: int = 0
    rows: int = 0
    rows_bytes: int = 0


_COUNTS = SegmentStats.__struct_fields__[2:]


class RunStats(msgspec.Struct, frozen=True):
    """Counts of a dispatched model. `str` gives a table.

    Attributes:
        segments: counts of the segments that do not stay on their device, in the order of execution.
        slots: number of slots of each device.
        seconds: seconds since the model was dispatched.
    """

    segments: tuple[SegmentStats, ...]
    slots: int
    seconds: float

    @property
    def hits(self) -> int:
        """Calls of blocks that found the weights on a slot."""
        return sum(each.hits for each in self.segments)

    @property
    def waits(self) -> int:
        """Calls of blocks that did not."""
        return sum(each.waits for each in self.segments)

    @property
    def waited_s(self) -> float:
        """Seconds in which calls waited for weights."""
        return sum(each.waited_s for each in self.segments)

    @property
    def moved_bytes(self) -> int:
        """Bytes brought to slots."""
        return sum(each.moved_bytes for each in self.segments)

    @property
    def fetches(self) -> int:
        """Whole weights fetched outside of calls of their block."""
        return sum(each.fetches for each in self.segments)

    @property
    def fetched_bytes(self) -> int:
        """Bytes of them."""
        return sum(each.fetched_bytes for each in self.segments)

    def since(self, earlier: RunStats) -> RunStats:
        """Return the counts since an earlier record of the same model."""
        before = {each.name: each for each in earlier.segments}
        segments = tuple(_less(each, before[each.name]) for each in self.segments)
        return RunStats(segments, self.slots, self.seconds - earlier.seconds)

    def __str__(self) -> str:
        header = (
            f"{'segment':32} {'home':5} {'hits':>7} {'waits':>7} {'waited':>9} {'moved':>10} {'alone':>10} {'rows':>8}"
        )
        counts = {name: sum(getattr(each, name) for each in self.segments) for name in _COUNTS}
        total = SegmentStats("all", "", **counts)
        lines = [header, *(_line(each) for each in self.segments), _line(total)]
        return "\n".join([*lines, *_advice(self)])


def _line(each: SegmentStats) -> str:
    name = each.name if len(each.name) <= 32 else f"...{each.name[-29:]}"
    moved = f"{show_size(each.moved_bytes):>10} {show_size(each.fetched_bytes):>10} {each.rows:8}"
    return f"{name:32} {each.home:5} {each.hits:7} {each.waits:7} {show_seconds(each.waited_s):>9} {moved}"


def _less(each: SegmentStats, before: SegmentStats) -> SegmentStats:
    counts = {name: getattr(each, name) - getattr(before, name) for name in _COUNTS}
    return SegmentStats(each.name, each.home, **counts)


def _advice(stats: RunStats) -> list[str]:
    """Return the sentences on what to change."""
    found = [f"waited {show_seconds(stats.waited_s)} of {show_seconds(stats.seconds)}"]
    if stats.seconds and stats.waited_s > 0.1 * stats.seconds:
        found.append(
            "Computation waits for weights: more memory keeps more of them, or a nearer home sends them faster."
        )
    if stats.fetches:
        worst = max(stats.segments, key=lambda each: each.fetched_bytes)
        found.append(
            f"Weights of {worst.name!r} are used outside of its calls, and fetched one by one: keep it on its device."
        )
    return found
