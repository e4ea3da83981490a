# SPDX-License-Identifier: Apache-2.0
"""Curves of metrics over steps, built line by line, and thinned for drawing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from accel.run_folder import MetricsLine

AT = "at"  # reading of the clock in a line, in seconds since the epoch


class Curve:
    """The values of one metric, in order of their steps.

    Attributes:
        steps: steps with a finite value.
        values: their values.
        marks: steps with a value that is not finite, and its text: "nan", "inf" or "-inf".
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []
        self.marks: list[tuple[int, str]] = []

    def add(self, step: int, value: float) -> None:
        """Add a value at the last step or behind it; a second value of a step replaces the first."""
        self.cut(step)
        if math.isfinite(value):
            self.steps.append(step)
            self.values.append(value)
        else:
            self.marks.append((step, str(float(value))))

    def cut(self, step: int) -> None:
        """Drop the values of a step and of those behind it."""
        while self.steps and self.steps[-1] >= step:
            _ = self.steps.pop()
            _ = self.values.pop()
        while self.marks and self.marks[-1][0] >= step:
            _ = self.marks.pop()

    @property
    def last(self) -> tuple[int, float] | None:
        """The last step and its value, finite or not; None for a curve without values."""
        ends = [(self.steps[-1], self.values[-1])] if self.steps else []
        ends += [(step, float(text)) for step, text in self.marks[-1:]]
        return max(ends, key=lambda end: end[0], default=None)


class Curves:
    """The curves of a run.

    Attributes:
        values: a curve for each metric, in the order in which they appeared.
        time: a curve for each reading of a clock.
        last_step: step of the last line; None before the first.
        damaged: number of lines that could not be read.
    """

    def __init__(self) -> None:
        self.values: dict[str, Curve] = {}
        self.time: dict[str, Curve] = {}
        self.last_step: int | None = None
        self.damaged = 0

    def add(self, lines: Iterable[MetricsLine | None]) -> None:
        """Add lines; None counts as damaged.

        A line of an earlier step means that the run went on from there: what stood behind it no longer counts.
        """
        for line in lines:
            if line is None:
                self.damaged += 1
                continue
            if self.last_step is not None and line.step < self.last_step:
                for curve in (*self.values.values(), *self.time.values()):
                    curve.cut(line.step)
            self.last_step = line.step
            for group, found in ((self.values, line.values), (self.time, line.time)):
                for name, value in found.items():
                    group.setdefault(name, Curve()).add(line.step, value)

    def speed(self, over: int = 20) -> float | None:
        """Return steps per second over the last lines, by the clock; None where it cannot be told."""
        clock = self.time.get(AT)
        if clock is None or len(clock.steps) < 2:
            return None
        steps, times = clock.steps[-over:], clock.values[-over:]
        return (steps[-1] - steps[0]) / (times[-1] - times[0]) if times[-1] > times[0] else None


def thin(steps: Sequence[float], values: Sequence[float], most: int = 2000) -> tuple[list[float], list[float]]:
    """Return at most `most` points of a curve with the lowest and the highest of each bucket, and both ends.

    Args:
        steps: steps in ascending order.
        values: a finite value for each.
        most: number of points, 4 or more.

    Returns:
        Steps and values, in order.
    """
    count = len(values)
    if count <= most:
        return list(steps), list(values)
    buckets = (most - 2) // 2
    kept = {0, count - 1}
    for at in range(buckets):
        part = range(at * count // buckets, (at + 1) * count // buckets)
        kept.add(min(part, key=values.__getitem__))
        kept.add(max(part, key=values.__getitem__))
    order = sorted(kept)
    return [steps[at] for at in order], [values[at] for at in order]
