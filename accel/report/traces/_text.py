# SPDX-License-Identifier: Apache-2.0
"""A profile as text: a row for each rank, the slowest, the longest operators."""

from __future__ import annotations

from collections.abc import Sequence

from accel.report.traces._breakdown import RankTimes, rank_times, slowest
from accel.report.traces._trace import Trace
from accel.report.traces._waits import Waits, find_waits
from accel.terminal import show_table

_HEAD = ("RANK", "MS/STEP", "COMPUTING", "WAITING", "EXPOSED", "HIDDEN", "DATA", "IDLE")
_LONGEST = 70  # characters of an operator's name
_CLEAR = 1.05  # times the median, from which a rank counts as slow


def describe_profile(traces: Sequence[Trace], *, operators: int = 10) -> str:
    """Return where the time of each rank went.

    Args:
        traces: traces of the ranks.
        operators: number of the longest operators to list.
    """
    waits = find_waits(traces)
    times = [rank_times(trace, waits) for trace in traces]
    parts = [_title(traces, times), show_table([_HEAD, *map(_row, times)]), *_notes(traces, times, waits)]
    listed = _operators(traces, operators)
    if len(listed) > 1:
        parts += ["", "longest " + ("kernels" if traces[0].on_gpu else "operators"), show_table(listed)]
    return "\n".join(parts) + "\n"


def _title(traces: Sequence[Trace], times: Sequence[RankTimes]) -> str:
    size = traces[0].world_size
    of = f" of {size}" if size is not None and size != len(traces) else ""
    steps = sorted({each.steps for each in times})
    device = "on the GPU" if traces[0].on_gpu else "on the CPU"
    return f"{len(traces)}{of} ranks, {' to '.join(map(str, dict.fromkeys((steps[0], steps[-1]))))} steps, {device}"


def _row(times: RankTimes) -> tuple[str, ...]:
    parts = (times.computing, times.waiting, times.exposed, times.hidden, times.data, times.idle)
    shares = (f"{part / times.total:.1%}" if times.total else "-" for part in parts)
    return (str(times.rank), f"{times.total / times.steps / 1e3:.2f}" if times.steps else "-", *shares)


def _notes(traces: Sequence[Trace], times: Sequence[RankTimes], waits: Waits) -> list[str]:
    notes: list[str] = []
    if (found := slowest(times)) is not None:
        own, usual = found.own / 1e3, found.usual / 1e3
        if own > _CLEAR * usual:
            told = f"{found.part}, {found.more / 1e3:.2f} ms a step above the median"
            notes.append(
                f"slowest: rank {found.rank}, {own:.2f} ms a step without waiting, median {usual:.2f} ms; {told}"
            )
        else:
            notes.append(f"no rank is slow: {own:.2f} ms a step without waiting at most, median {usual:.2f} ms")
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
