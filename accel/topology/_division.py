# SPDX-License-Identifier: Apache-2.0
"""A list of costs divided into contiguous parts. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

_EQUAL = 1e-9  # differences of sums below this are rounding


def divide(costs: Sequence[float], parts: int, prices: Sequence[float] = ()) -> tuple[int, ...]:
    """Return the ends of contiguous, non-empty parts of a list, with the least sum of squares of their costs.

    Ties make earlier parts longer.

    Args:
        costs: cost of each entry.
        parts: number of parts, at most the number of entries.
        prices: addition to the sum for a part that begins at each entry, if a part of equal cost adds 1; infinity for
            an entry at which no part begins. None by default.
    """
    total = sum(costs) or 1.0
    sums = [0.0, *itertools.accumulate(cost * parts / total for cost in costs)]
    begin_prices = prices or [0.0] * len(costs)
    least = [0.0, *[math.inf] * len(costs)]  # of the first n entries in the parts so far
    chosen: list[list[int]] = []
    for _ in range(parts):
        found = [math.inf] * len(sums)
        begins = [0] * len(sums)
        for end in range(1, len(sums)):
            for begin in reversed(range(end)):
                cost = least[begin] + begin_prices[begin] + (sums[end] - sums[begin]) ** 2
                if cost < found[end] - _EQUAL:
                    found[end], begins[end] = cost, begin
        least = found
        chosen.append(begins)
    ends = [len(costs)]
    for begins in reversed(chosen[1:]):
        ends.append(begins[ends[-1]])
    return tuple(reversed(ends))
