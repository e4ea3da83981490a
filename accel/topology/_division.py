# SPDX-License-Identifier: Apache-2.0
"""A list of costs divided into contiguous parts. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def divide(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Return the ends of contiguous, non-empty parts of a list so that the costliest part costs least; ties make
    earlier parts longer."""
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[n]: highest cost of a part, and sum of squares, of the first n costs in the parts so far
    best: list[tuple[float, float]] = [(sums[n], sums[n] ** 2) if n else (math.inf, math.inf) for n in range(len(sums))]
    ends: list[list[int]] = []
    for part in range(1, parts):
        chosen = [0] * len(sums)
        following = [(math.inf, math.inf)] * len(sums)
        for n in range(part + 1, len(sums)):
            for begin in range(part, n):
                own = sums[n] - sums[begin]
                found = (max(best[begin][0], own), best[begin][1] + own**2)
                if found <= following[n]:
                    following[n] = found
                    chosen[n] = begin
        best = following
        ends.append(chosen)
    cuts = [len(costs)]
    for chosen in reversed(ends):
        cuts.append(chosen[cuts[-1]])
    return tuple(reversed(cuts))
