# SPDX-License-Identifier: Apache-2.0
"""The first screen of a page: state, the metrics that matter with small curves, throughput, and warnings in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

from msgspec.structs import replace

from accel.report._run_data import MetricCurve, RunData
from accel.report._run_state import RunState
from accel.report._series import ChartData, best_of, clock_of, condense
from accel.report._tables import NONE, Html, duration_of, element, join, ranks_of, show_source, show_time, table
from accel.terminal import show_duration, show_names, show_seconds, show_size, show_value

_RATES = ("tokens_per_s", "samples_per_s")
_UNEVEN = 1.1  # times the median step, from which a rank counts as slow
_PAUSE_S = 60.0
_MOST_NAMES = 5
_MOST_ALERTS = 5
_WIDTH, _HEIGHT, _POINTS = 120, 28, 60  # of a small curve


def sparkline(curve: MetricCurve, run: int) -> Html | None:
    """Return a small curve in the colour of a run, by its number; None for fewer than two values."""
    if len(curve.values) < 2:
        return None
    found = condense(curve.steps, curve.values, _POINTS)
    low = min(found.mean)
    high = max(found.mean)
    across = (found.x[-1] - found.x[0]) or 1
    up = (high - low) or 1
    points = " ".join(
        f"{(x - found.x[0]) / across * _WIDTH:.1f},{_HEIGHT - 2 - (y - low) / up * (_HEIGHT - 4):.1f}"
        for x, y in zip(found.x, found.mean, strict=True)
    )
    line = element("polyline", points=points, vector_effect="non-scaling-stroke")
    box = f"0 0 {_WIDTH} {_HEIGHT}"
    return element(
        "svg", line, class_="spark", viewBox=box, preserveAspectRatio="none", aria_hidden="true", data_run=str(run)
    )


def rates_of(run: RunData) -> list[tuple[str, float, MetricCurve]]:
    """Return the rates of a run, the newest value and the curve of each: its own, else steps by the clock."""
    found: list[tuple[str, float, MetricCurve]] = []
    for name in _RATES:
        curve = run.curves.time.get(name)
        if curve is not None and curve.values:
            found.append((name.replace("_per_s", "/s"), curve.values[-1], curve))
    speed = run.curves.speed()
    if speed is not None:
        found.append(("steps/s", speed, _step_rates(run)))
    return found


def _step_rates(run: RunData) -> MetricCurve:
    """Return steps per second between parts of a run."""
    clock = condense(*_clock(run), _POINTS)
    made = MetricCurve()
    pairs = list(zip(clock.x, clock.mean, strict=True))
    for (step, before), (then, after) in pairwise(pairs):
        if after > before:
            made.steps.append(int(then))
            made.values.append((then - step) / (after - before))
    return made


def _clock(run: RunData) -> tuple[list[int], list[float]]:
    clock = clock_of(run)
    return clock.steps, clock.values


def warnings_of(run: RunData) -> Iterator[str]:
    """Yield what a reader should know of a run, a sentence each."""
    yield from run.problems
    bad = {name: curve for name, curve in {**run.curves.values, **run.curves.time}.items() if curve.marks}
    if bad:
        first = min(curve.marks[0][0] for curve in bad.values())
        count = len({step for curve in bad.values() for step, _ in curve.marks})
        names = show_names(list(bad), _MOST_NAMES)
        yield f"{count} step{'s' * (count > 1)} with values that are not finite, from step {show_value(first)}: {names}"
    for alert in run.alerts[-_MOST_ALERTS:]:
        times = f", {alert.count} times" if alert.count > 1 else ""
        yield f"{alert.level}, {show_time(alert.time_s)}{times}: {alert.line}"
    if len(run.alerts) > _MOST_ALERTS:
        yield f"{len(run.alerts) - _MOST_ALERTS} earlier alerts"
    if (slow := _slow_rank(run)) is not None:
        yield slow
    for line in run.profile.splitlines():
        if line.startswith("slowest: "):
            yield f"profile, {line}"
    if run.run is not None and run.run.lost:
        yield f"records were lost: {run.run.lost}"
    if run.damaged:
        yield f"{run.damaged} line{'s' * (run.damaged > 1)} of its files cannot be read"
    yield from _pauses(run)
    restarts = sum(each.restarts for each in run.launches)
    resumes = len(run.run.resumed_s) if run.run else 0
    if restarts:
        yield f"restarted {_times(restarts)} after a failure"
    if resumes:
        yield f"resumed {_times(resumes)}"
    broken = [each for each in run.checkpoints if each.problem]
    for each in broken[-2:]:
        yield f"{each.name} is no checkpoint: {each.problem}"
    if len(broken) > 2:
        yield f"{len(broken) - 2} earlier folders are no checkpoints"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _slow_rank(run: RunData) -> str | None:
    """Return a sentence on the rank that the others wait for, by the newest readings of clocks."""
    last = {name: curve.last for name, curve in run.curves.time.items()}
    newest = {name: end[1] for name, end in last.items() if end is not None and end[0] == run.curves.last_step}
    try:
        rank, own, usual = (newest[name] for name in ("slowest_rank", "slowest_own_s", "own_s"))
        late = own - usual
        if not (math.isfinite(late) and own > _UNEVEN * usual and late > 0.05 * newest["step_s"]):
            return None
    except KeyError:
        return None
    curve = run.curves.time["slowest_rank"].values[-20:]
    share = f", the slowest in {curve.count(rank)} of the last {len(curve)} readings" if len(curve) > 1 else ""
    data = newest.get("slowest_data_wait_s", 0.0) - newest.get("data_wait_s", 0.0) > late / 2
    cause = "; it waits for data" if data else ""
    times = f"{show_seconds(own)} a step of its own, median {show_seconds(usual)}"
    return f"rank {rank:g} is slow: {times}{share}{cause}"


def _pauses(run: RunData) -> Iterator[str]:
    """Yield a sentence on pauses between lines that are much longer than usual."""
    steps, times = _clock(run)
    if len(steps) < 3:
        return
    between = [after - before for before, after in pairwise(times)]
    limit = max(_PAUSE_S, 20 * median(between))
    long = [at for at, seconds in enumerate(between) if seconds > limit]
    if long:
        longest = max(long, key=between.__getitem__)
        count = f"{len(long)} gaps in the log, the longest" if len(long) > 1 else "a gap in the log"
        yield f"{count} of {show_duration(between[longest])} before step {show_value(steps[longest + 1])}"


def newest_checkpoint(run: RunData) -> tuple[str, str] | None:
    """Return name and facts of a run's newest whole checkpoint."""
    whole = [each for each in run.checkpoints if not each.problem]
    if not whole:
        return None
    newest = whole[-1]
    metrics = "".join(f", {name} {show_value(value)}" for name, value in list(newest.metrics.items())[:2])
    return newest.name, f"{show_size(newest.size)}{metrics}"


def one_run(run: RunData, state: RunState, metrics: Sequence[ChartData]) -> Iterator[Html]:
    """Yield the first screen of a page of one run."""
    facts = [_badge(state), *_facts(run, state)]
    yield element("p", *_dotted(facts), class_="facts")
    tiles = [_metric_tile(chart, 0) for chart in metrics if 0 in chart.curves]
    for title, value, curve in rates_of(run)[:2]:
        tiles.append(_tile(title, show_value(value), "by the clock", sparkline(curve, 0)))
    if (found := newest_checkpoint(run)) is not None:
        name, note = found
        tiles.append(_tile("newest checkpoint", name, note, None, is_name=True))
    if tiles:
        yield element("div", *tiles, class_="tiles")
    yield from warning_list(list(warnings_of(run)))


def _facts(run: RunData, state: RunState) -> Iterator[str]:
    if (seconds := duration_of(run, state)) is not None:
        yield show_duration(seconds)
    if run.curves.last_step is not None:
        yield f"step {show_value(run.curves.last_step)}"
    if (ranks := ranks_of(run)) is not None:
        yield f"{ranks} rank{'s' * (ranks > 1)}"
    if run.source is not None:
        yield show_source(run.source)


def _dotted(facts: Sequence[str]) -> Iterator[Html]:
    for at, each in enumerate(facts):
        yield join([element("span", " · ", class_="soft") if at else None, each])


def _badge(state: RunState) -> Html:
    return element("span", state.text, class_=f"badge {state.kind}")


def _metric_tile(chart: ChartData, run: int) -> Html:
    curve = chart.curves[run]
    last = curve.last
    newest = NONE if last is None else show_value(last[1])
    best = best_of(curve, chart.better)
    note = "" if best is None else f"best {show_value(best[1])} at step {show_value(best[0])}"
    return _tile(chart.title, newest, note, sparkline(curve, run))


def _tile(title: str, value: str, note: str, drawn: Html | None, *, is_name: bool = False) -> Html:
    shown = (
        element("div", value, class_="value name", title=value) if is_name else element("div", value, class_="value")
    )
    return element("section", element("h3", title), shown, element("div", note, class_="soft"), drawn, class_="tile")


def warning_list(texts: Sequence[str]) -> Iterator[Html]:
    """Yield warnings as a list; nothing without any."""
    if texts:
        yield element("ul", *(element("li", text) for text in texts), class_="warnings")


def few_runs(runs: Sequence[RunData], states: Sequence[RunState], metrics: Sequence[ChartData]) -> Iterator[Html]:
    """Yield the first screen of a page of a few runs: a row for each."""
    head = ["run", "state", "duration", "step", *(chart.title for chart in metrics), "throughput", "newest checkpoint"]
    rows: list[list[str]] = []
    for at, (run, state) in enumerate(zip(runs, states, strict=True)):
        seconds = duration_of(run, state)
        rates = rates_of(run)
        checkpoint = newest_checkpoint(run)
        rows.append(
            [
                run_name(at, run.name),
                _badge(replace(state, text=state.kind) if state.kind in ("failed", "lost") else state),
                NONE if seconds is None else show_duration(seconds),
                NONE if run.curves.last_step is None else show_value(run.curves.last_step),
                *(_metric_cell(chart, at) for chart in metrics),
                f"{show_value(rates[0][1])} {rates[0][0]}" if rates else NONE,
                checkpoint[0] if checkpoint else NONE,
            ]
        )
    empty = [column for column in range(2, len(head)) if all(row[column] == NONE for row in rows)]
    kept = [column for column in range(len(head)) if column not in empty]
    shown = table([head[column] for column in kept], [[row[column] for column in kept] for row in rows])
    yield element("div", shown, class_="few")
    found = [f"{run.name}: {text}" for run in runs for text in warnings_of(run)]
    yield from warning_list(found)


def no_runs(runs: Sequence[RunData]) -> Iterator[Html]:
    """Yield the page of folders in which no run has begun, which a server shows until one has."""
    yield from warning_list([f"{run.name}: {each}" for run in runs for each in run.problems])
    folders = join([join([", " if at else None, element("code", str(run.folder))]) for at, run in enumerate(runs)])
    yield element("p", "Nothing of a run is in ", folders, " yet. Its curves appear here once it logs.", class_="facts")


def run_name(at: int, name: str) -> Html:
    """Return a run's name behind a dot of its colour, which the page's script fills."""
    return join([element("i", class_="dot", data_run=str(at)), name])


def _metric_cell(chart: ChartData, at: int) -> str:
    curve = chart.curves.get(at)
    if curve is None or curve.last is None:
        return NONE
    best = best_of(curve, chart.better)
    note = None if best is None else element("span", f" best {show_value(best[1])}", class_="soft")
    return element("div", element("span", show_value(curve.last[1])), note, sparkline(curve, at), class_="cell")


def many_runs(runs: Sequence[RunData], states: Sequence[RunState]) -> Iterator[Html]:
    """Yield the first lines of a page of many runs: a count for each state, and shared warnings."""
    counts: dict[str, int] = {}
    for state in states:
        counts[state.kind] = counts.get(state.kind, 0) + 1
    shown = [element("span", f"{count} {kind}", class_=f"badge {kind}") for kind, count in counts.items()]
    steps = [run.curves.last_step for run in runs if run.curves.last_step is not None]
    if steps:
        ends = dict.fromkeys(map(show_value, (min(steps), max(steps))))
        shown.append(Html(f"{' to '.join(ends)} steps"))
    yield element("p", *_dotted(shown), class_="facts")
    yield from warning_list(list(_shared_warnings(runs, states)))


def _shared_warnings(runs: Sequence[RunData], states: Sequence[RunState]) -> Iterator[str]:
    problems = [f"{run.name}: {each}" for run in runs for each in run.problems]
    yield from problems[:_MOST_NAMES]
    if len(problems) > _MOST_NAMES:
        yield f"{len(problems) - _MOST_NAMES} more files cannot be read"
    failed = [run.name for run, state in zip(runs, states, strict=True) if state.kind in ("failed", "lost")]
    bad = [run.name for run in runs if any(curve.marks for curve in run.curves.values.values())]
    lost = [run.name for run in runs if (run.run and run.run.lost) or run.damaged]
    alerted = [run.name for run in runs if run.alerts]
    restarted = [run.name for run in runs if any(each.restarts for each in run.launches)]
    for names, text in (
        (failed, "failed"),
        (bad, "have values that are not finite"),
        (lost, "have lost or unreadable records"),
        (alerted, "have alerts"),
        (restarted, "restarted after a failure"),
    ):
        if names:
            yield f"{len(names)} of {len(runs)} {text}: {show_names(names, _MOST_NAMES)}"
