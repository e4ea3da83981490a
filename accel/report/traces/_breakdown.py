# SPDX-License-Identifier: Apache-2.0
"""Parts of each rank's time, and of collectives the time spent waiting for a later rank; as values and as text."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

import msgspec

from accel.report.traces._trace import Communication, Span, Trace, intersect, length, subtract, union
from accel.terminal import show_seconds, show_table


class Waits(msgspec.Struct, frozen=True, eq=False):
    """Waits for later ranks."""

    spans: dict[int, list[Span]]  # waits of each rank, by rank
    compared: int = 0  # number of collectives that several ranks ran
    skipped: int = 0  # number of those left out, as the ranks ran different lists of them


def find_waits(traces: Sequence[Trace]) -> Waits:
    """Return each rank's waits in collectives, from traces of the same steps."""
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


PARTS = ("computing", "waiting", "exposed", "data", "idle")


class RankBreakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a rank in its steps, in microseconds; the parts other than `hidden` add up to `total`."""

    rank: int
    steps: int  # number of steps
    total: float  # time of all steps
    computing: float  # computing, with or without messages at the same time
    waiting: float  # communication without computing, spent waiting for a later rank
    exposed: float  # other communication without computing
    hidden: float  # communication during computing
    data: float  # waits for data without computing and communication
    idle: float  # the rest


def rank_times(trace: Trace, waits: Waits) -> RankBreakdown:
    """Return the parts of a rank's time."""
    window = union(trace.steps.values())
    data = intersect(trace.data, window)
    # Operators that make a batch on the CPU are part of the wait for it.
    work = intersect(trace.work if trace.on_gpu else subtract(trace.work, data), window)
    messages = intersect(union((each.start, each.end) for each in trace.communications), window)
    alone = subtract(messages, work)
    late = intersect(alone, union(waits.spans.get(trace.rank, ())))
    starved = subtract(subtract(data, work), messages)
    rest = subtract(subtract(subtract(window, work), messages), data)
    return RankBreakdown(
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
    """The rank that the others wait for."""

    rank: int
    own: float  # its time a step without waits for others, in microseconds
    usual: float  # lower median of this time over all ranks
    part: str  # the part of the step that is longest against the lower median of all ranks
    more: float  # that part's time beyond the median, in microseconds a step


def slowest(times: Sequence[RankBreakdown]) -> Slowest | None:
    """Return the rank with the longest step without waiting; None for fewer than two ranks with steps."""
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


_HEAD = ("RANK", "MS/STEP", "COMPUTING", "WAITING", "EXPOSED", "HIDDEN", "DATA", "IDLE")
_LONGEST = 70  # characters of an operator's name
_CLEAR = 1.05  # times the median, from which a rank counts as slow


def describe_profile(traces: Sequence[Trace], *, operators: int = 10) -> str:
    """Return the parts of each rank's time as text, with the longest operators."""
    waits = find_waits(traces)
    times = [rank_times(trace, waits) for trace in traces]
    parts = [_title(traces, times), show_table([_HEAD, *map(_row, times)]), *_notes(traces, times, waits)]
    listed = _operators(traces, operators)
    if len(listed) > 1:
        parts += ["", "longest " + ("kernels" if traces[0].on_gpu else "operators"), show_table(listed)]
    return "\n".join(parts) + "\n"


def _title(traces: Sequence[Trace], times: Sequence[RankBreakdown]) -> str:
    size = traces[0].world_size
    of = f" of {size}" if size is not None and size != len(traces) else ""
    steps = sorted({each.steps for each in times})
    device = "on the GPU" if traces[0].on_gpu else "on the CPU"
    return f"{len(traces)}{of} ranks, {' to '.join(map(str, dict.fromkeys((steps[0], steps[-1]))))} steps, {device}"


def _row(times: RankBreakdown) -> tuple[str, ...]:
    parts = (times.computing, times.waiting, times.exposed, times.hidden, times.data, times.idle)
    shares = (f"{part / times.total:.1%}" if times.total else "-" for part in parts)
    return (str(times.rank), f"{times.total / times.steps / 1e3:.2f}" if times.steps else "-", *shares)


def _notes(traces: Sequence[Trace], times: Sequence[RankBreakdown], waits: Waits) -> list[str]:
    notes: list[str] = []
    if (found := slowest(times)) is not None:
        own = show_seconds(found.own / 1e6)
        usual = show_seconds(found.usual / 1e6)
        if found.own > _CLEAR * found.usual:
            part = f"{found.part}, {show_seconds(found.more / 1e6)} a step above the median"
            notes.append(f"slowest: rank {found.rank}, {own} a step without waiting, median {usual}; {part}")
        else:
            notes.append(f"no rank is slow: {own} a step without waiting at most, median {usual}")
    if waits.skipped:
        notes.append(
            f"{waits.skipped} of {waits.compared} collectives differ between ranks: waits in them count as exposed"
        )
    bare = [str(trace.rank) for trace in traces if not trace.steps]
    if bare:
        notes.append(f"no step boundaries in the traces of ranks {', '.join(bare)}: call profile.step()")
    return notes


def _operators(traces: Sequence[Trace], most: int) -> list[tuple[str, ...]]:
    names = dict.fromkeys(name for trace in traces for name in trace.operators)
    steps = sum(len(trace.steps) for trace in traces)
    rows: list[tuple[float, int, str]] = []
    for name in names:
        found = [trace.operators[name] for trace in traces if name in trace.operators]
        rows.append((sum(each.time_us for each in found), sum(each.calls for each in found), name))
    rows.sort(key=lambda row: (-row[0], row[2]))
    each_step = max(1, steps)
    shown = [
        (
            name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…",
            f"{time_us / each_step / 1e3:.3f}",
            f"{calls / each_step:.1f}",
        )
        for time_us, calls, name in rows[:most]
    ]
    return [("NAME", "MS/STEP", "CALLS/STEP"), *shown]
