# SPDX-License-Identifier: Apache-2.0
"""Parts of each rank's time, by the arithmetic of intervals."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

import msgspec

from accel.report.traces._intervals import intersect, length, subtract, union
from accel.report.traces._trace import Trace
from accel.report.traces._waits import Waits

PARTS = ("computing", "waiting", "exposed", "data", "idle")


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a rank in its steps, in microseconds; the parts other than `hidden` add up to `total`.

    Attributes:
        rank: the rank.
        steps: number of steps.
        total: time of all steps.
        computing: computing, whether or not messages travel meanwhile.
        waiting: communication without computing, spent waiting for a later rank.
        exposed: other communication without computing.
        hidden: communication during computing.
        data: waits for data without computing and communication.
        idle: the rest.
    """

    rank: int
    steps: int
    total: float
    computing: float
    waiting: float
    exposed: float
    hidden: float
    data: float
    idle: float


def rank_times(trace: Trace, waits: Waits) -> RankTimes:
    """Return where the time of a rank went.

    Args:
        trace: trace of the rank.
        waits: waits of all ranks.
    """
    window = union(trace.steps.values())
    data = intersect(trace.data, window)
    # Operators that make a batch on the CPU are part of the wait for it.
    work = intersect(trace.work if trace.on_gpu else subtract(trace.work, data), window)
    messages = intersect(union((each.start, each.end) for each in trace.communications), window)
    alone = subtract(messages, work)
    late = intersect(alone, union(waits.spans.get(trace.rank, ())))
    starved = subtract(subtract(data, work), messages)
    rest = subtract(subtract(subtract(window, work), messages), data)
    return RankTimes(
        rank=trace.rank,
        steps=len(trace.steps),
        total=length(window),
        computing=length(work),
        waiting=length(late),
        exposed=length(alone) - length(late),
        hidden=length(messages) - length(alone),
        data=length(starved),
        idle=length(rest),
    )


class Slowest(msgspec.Struct, frozen=True):
    """The rank that the others wait for.

    Attributes:
        rank: the rank.
        own: its time a step without waits for others, in microseconds.
        usual: lower median of this time over all ranks.
        part: the part of the step that is longest against the lower median of all ranks.
        more: that part's time beyond the median, in microseconds a step.
    """

    rank: int
    own: float
    usual: float
    part: str
    more: float


def slowest(times: Sequence[RankTimes]) -> Slowest | None:
    """Return the slowest rank: the one with the longest step of its own; None for fewer than two ranks with steps."""
    known = [each for each in times if each.steps]
    if len(known) < 2:
        return None
    own = {each.rank: (each.total - each.waiting) / each.steps for each in known}
    last = max(known, key=lambda each: own[each.rank])
    more: dict[str, float] = {}
    for part in PARTS:
        if part != "waiting":
            usual = median_low(getattr(each, part) / each.steps for each in known)
            more[part] = getattr(last, part) / last.steps - usual
    part = max(more, key=more.__getitem__)
    return Slowest(last.rank, own[last.rank], median_low(own.values()), part, more[part])
