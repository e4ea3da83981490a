# SPDX-License-Identifier: Apache-2.0
"""Time in collectives spent waiting for a rank that came later, found without a common clock.

A collective ends on all ranks about when the last one comes. What one rank spends in it beyond the rank that spends the
least is its wait. Only ranks that ran the same list of collectives in a step can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from accel.report.traces._intervals import Span
from accel.report.traces._trace import Communication, Trace


class Waits(msgspec.Struct, frozen=True, eq=False):
    """Waits for later ranks.

    Attributes:
        spans: waits of each rank, by rank.
        compared: number of collectives that several ranks ran.
        skipped: number of those left out, as the ranks ran different lists of them.
    """

    spans: dict[int, list[Span]]
    compared: int = 0
    skipped: int = 0


def find_waits(traces: Sequence[Trace]) -> Waits:
    """Return each rank's waits in collectives.

    Args:
        traces: traces of the ranks, of the same steps.
    """
    lists = {trace.rank: _by_step(trace) for trace in traces}
    keys = dict.fromkeys(key for each in lists.values() for key in each)
    spans: dict[int, list[Span]] = {trace.rank: [] for trace in traces}
    compared = skipped = 0
    for key in keys:
        ran = {rank: each[key] for rank, each in lists.items() if key in each}
        if len(ran) < 2:
            continue
        names = {tuple(call.name for call in calls) for calls in ran.values()}
        count = max(map(len, ran.values()))
        compared += count
        if len(names) > 1:
            skipped += count
            continue
        for at in range(count):
            least = min(calls[at].end - calls[at].start for calls in ran.values())
            for rank, calls in ran.items():
                spans[rank].append((calls[at].start, calls[at].end - least))
    return Waits(spans, compared, skipped)


def _by_step(trace: Trace) -> dict[tuple[int, str], list[Communication]]:
    """Return the collectives of a rank by step and group."""
    found: dict[tuple[int, str], list[Communication]] = {}
    steps = sorted(trace.steps.items(), key=lambda step: step[1])
    at = 0
    for call in trace.communications:
        while at < len(steps) and steps[at][1][1] <= call.start:
            at += 1
        if at < len(steps) and steps[at][1][0] <= call.start:
            found.setdefault((steps[at][0], call.group), []).append(call)
    return found
