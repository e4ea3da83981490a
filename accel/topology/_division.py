# SPDX-License-Identifier: Apache-2.0
"""Costs, one of each call of a forward, divided into contiguous parts. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from accel.topology._axes import Balance

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


SCHEDULES_IN_A_V = ("ZBVZeroBubble", "DualPipeV")


def stages_of_rank(schedule: str, ranks: int, stages: int, rank: int) -> tuple[int, ...]:
    """Return the stages of a rank along pp: in a V for schedules that need one, else round and round."""
    if schedule in SCHEDULES_IN_A_V and ranks > 1:
        return rank, stages - 1 - rank
    return tuple(range(rank, stages, ranks))


class CallCosts(NamedTuple):
    """Costs of a call of a forward, by each balance of stages."""

    path: str  # of the module
    time: float  # FLOPs of its forward
    memory: float  # bytes of its parameters
    blocks: float  # 1 for a block, 0 for another module
    price: float  # of a stage that begins at the call, as in `divide`

    def cost(self, balance: Balance) -> float:
        """Return the cost by a balance."""
        return {"time": self.time, "memory": self.memory, "blocks": self.blocks}[balance]


def begins_of(costs: Sequence[float], stages: int, prices: Sequence[float]) -> tuple[int, ...]:
    """Return the first call of each stage, from the costs and the prices of calls; equal costs if all are 0."""
    ends = divide(costs if any(costs) else [1.0] * len(costs), stages, prices)
    return (0, *ends[:-1])
