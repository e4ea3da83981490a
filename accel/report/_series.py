# SPDX-License-Identifier: Apache-2.0
"""Curves as the page's script draws them: condensed to least, mean and most of each part, and written as numbers."""

from __future__ import annotations

import base64
import re
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from accel.report._run_data import AT, MetricCurve, RunData, SpreadCurve

Better = Literal["min", "max", ""]
Kind = Literal["curve", "folded"]

_MOST_PARTS = 4000  # of a curve: a page is zoomed, and a screen has fewer columns
_LEAST_PARTS = 20
_MOST_NUMBERS = 1_100_000  # of all curves: 6 MB as text
_MOST_MARKS = 200  # of a curve
_MOST_JUMPS = 20  # of an axis; both ends of each are kept
_OF_LOSSES = """loss losses error errors err perplexity ppl nll bpb bpc ce mse mae rmse wer cer fid kl divergence
distance"""
_OF_SCORES = """accuracy acc f1 auc auroc bleu rouge recall map iou miou dice psnr ssim reward rewards return score em
top1 top5 correct mfu r2"""
_LOWER = {*_OF_LOSSES.split()}
_HIGHER = {*_OF_SCORES.split()}
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+\d?")
_COUNTED = {"samples", "seen_samples", "samples_seen", "consumed_samples", "tokens", "seen_tokens", "tokens_seen"}
_COUNTERS = {*_COUNTED, "epoch", "epochs", "step", "steps", "iteration", "iterations", "updates"}
_RATES = re.compile(r"(_per_s|/s)$")


def better_of(name: str) -> Better:
    """Return whether low or high values of a metric are better, by the words of its name; empty for unknown ones."""
    words = [word.lower() for word in _WORDS.findall(name.rpartition("/")[2])]
    if not _LOWER.isdisjoint(words):
        return "min"
    return "max" if not _HIGHER.isdisjoint(words) or _RATES.search(name) else ""


class ChartData(NamedTuple):
    """A chart of the page."""

    title: str  # name of the metric; a reading of clocks begins with "time/", a sample of the machine with "system/"
    group: str  # title of its group
    kind: Kind  # "folded" for constants and counters
    better: Better  # direction in which values are better
    curves: dict[int, MetricCurve]  # curve of each run that has one, by the run's number


def charts_of(runs: Sequence[RunData]) -> list[ChartData]:
    """Return the charts of runs: metrics in the order in which they appeared, readings of clocks, the machine."""
    made: list[ChartData] = []
    for source in ("", "time", "system"):
        found: dict[str, dict[int, MetricCurve]] = {}
        for at, run in enumerate(runs):
            sources = {"": run.curves.values, "time": run.curves.time, "system": run.machine}
            for name, curve in sources[source].items():
                if source != "time" or name != AT:
                    found.setdefault(name, {})[at] = curve
        for name, curves in found.items():
            prefix, slash, _ = name.partition("/")
            kind: Kind = "folded" if _is_dull(name, list(curves.values())) else "curve"
            is_rate = source == "time" and _RATES.search(name)
            better: Better = better_of(name) if not source else "max" if is_rate else ""
            title = f"{source}/{name}" if source else name
            made.append(ChartData(title, source or (prefix if slash else ""), kind, better, curves))
    return made


def _is_dull(name: str, curves: Sequence[MetricCurve]) -> bool:
    """Return whether a metric is a constant, a counter, or the number of a rank in all runs."""
    last = name.rpartition("/")[2]
    if last.endswith("_rank"):
        return True
    if any(curve.marks or (isinstance(curve, SpreadCurve) and curve.lows != curve.highs) for curve in curves):
        return False
    if all(len(curve.values) < 2 for curve in curves):
        return not better_of(name)
    if all(min(curve.values) == max(curve.values) for curve in curves if curve.values):
        return True
    return last in _COUNTERS and all(_counts(curve.values) for curve in curves)


def _counts(values: Sequence[float]) -> bool:
    """Return whether values rise, save where a resumed run counts from the start again."""
    return sum(after < before for before, after in pairwise(values)) <= len(values) // 20


def _rises(values: Sequence[float]) -> bool:
    return all(map(float.__le__, map(float, values), map(float, values[1:])))


class Condensed(NamedTuple):
    """A curve in parts."""

    x: list[float]  # step of each part, the middle of its first and its last
    mean: list[float]  # mean of each part
    low: list[float]  # least value of each part; empty if each part is one value
    high: list[float]  # largest value of each part; empty likewise


def condense(steps: Sequence[float], values: Sequence[float], most: int) -> Condensed:
    """Return a curve in at most `most` parts of equally many values, in order."""
    count = len(values)
    if count <= most:
        return Condensed(list(steps), list(values), [], [])
    edges = [at * count // most for at in range(most + 1)]
    parts = [values[low:high] for low, high in pairwise(edges)]
    x = [(steps[low] + steps[high - 1]) / 2 for low, high in pairwise(edges)]
    x[0] = steps[0]
    x[-1] = steps[-1]
    return Condensed(x, [_mean(part) for part in parts], [min(part) for part in parts], [max(part) for part in parts])


def _spread(curve: SpreadCurve, found: Condensed, most: int) -> Condensed:
    """Return a curve of several sources in parts, with the least and the most of all sources."""
    lows = condense(curve.steps, curve.lows, most)
    highs = condense(curve.steps, curve.highs, most)
    return found._replace(low=lows.low or lows.mean, high=highs.high or highs.mean)


def _mean(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return mean if mean - mean == 0 else sum(value / len(values) for value in values)  # the sum overflowed


def encode_numbers(values: Sequence[float]) -> str:
    """Return numbers as text: "f" and base64 of 32-bit floats where these suffice, else "d" and 64-bit ones."""
    largest = max(map(abs, values), default=0.0)
    spread = max(values, default=0.0) - min(values, default=0.0)
    is_rough = 1e-30 < largest < 1e38 and spread > 1e-4 * largest
    numbers = array("f" if is_rough else "d", values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.typecode + base64.b64encode(numbers.tobytes()).decode()


class SeriesWriter:
    """Curves as values for the page's script; steps that curves share are written once.

    Args:
        charts: the charts of the page, by which the room for each curve is decided.
    """

    def __init__(self, charts: Sequence[ChartData]) -> None:
        count = sum(len(chart.curves) for chart in charts)
        self._most = max(_LEAST_PARTS, min(_MOST_PARTS, _MOST_NUMBERS // max(1, 3 * count)))
        self._known: dict[str, int] = {}
        self.steps: list[str] = []

    def chart(self, chart: ChartData) -> dict[str, Any]:
        """Return a chart."""
        curves = {str(run): self._curve(curve, chart.better) for run, curve in chart.curves.items()}
        return {"name": chart.title, "better": chart.better, "curves": curves}

    def axis(self, steps: Sequence[int], values: Sequence[float]) -> list[Any] | None:
        """Return the values of another axis by steps; None if there are too few, or they fall."""
        if len(steps) < 2 or not _rises(values):
            return None
        most = min(1000, self._most)
        jumps = [after - before for before, after in pairwise(values)]
        longest = nlargest(_MOST_JUMPS, range(len(jumps)), key=jumps.__getitem__)
        even = (each * (len(steps) - 1) // (most - 1) for each in range(most))
        at = sorted({*even, *longest, *(each + 1 for each in longest)})  # both ends of the pauses of a clock
        return [self._steps([steps[each] for each in at]), encode_numbers([values[each] for each in at])]

    def _curve(self, curve: MetricCurve, better: Better) -> dict[str, Any]:
        made: dict[str, Any] = {}
        if curve.values:
            found = condense(curve.steps, curve.values, self._most)
            if isinstance(curve, SpreadCurve) and curve.lows != curve.highs:
                found = _spread(curve, found, self._most)
            if not found.low and min(curve.values) == max(curve.values):  # both ends suffice
                found = Condensed([found.x[0], found.x[-1]], [curve.values[0]] * 2, [], [])
            made = {"x": self._steps(found.x), "y": encode_numbers(found.mean)}
            if found.low:
                made |= {"low": encode_numbers(found.low), "high": encode_numbers(found.high)}
            if (best := best_of(curve, better)) is not None:
                made["best"] = list(best)
        if (last := curve.last) is not None:
            made["last"] = [last[0], _plain(last[1])]
        if curve.marks:
            marks = curve.marks[: _MOST_MARKS // 2] + curve.marks[_MOST_MARKS // 2 :][-_MOST_MARKS // 2 :]
            made["marks"] = [list(mark) for mark in marks]
        return made

    def _steps(self, steps: Sequence[float]) -> int:
        text = encode_numbers(steps)
        at = self._known.setdefault(text, len(self.steps))
        if at == len(self.steps):
            self.steps.append(text)
        return at


def _plain(value: float) -> float | str:
    return value if value - value == 0 else str(float(value))


def best_of(curve: MetricCurve, better: Better) -> tuple[int, float] | None:
    """Return the step and the value of a curve's best value, the first of equal ones; None without one."""
    if not better or not curve.values:
        return None
    best = (min if better == "min" else max)(curve.values)
    return curve.steps[curve.values.index(best)], best


def clock_of(run: RunData) -> MetricCurve:
    """Return the seconds since a run's first line by steps, without turns of the clock back."""
    made = MetricCurve()
    reading = run.curves.time.get(AT)
    if reading is not None and reading.values:
        latest = first = reading.values[0]
        for step, value in zip(reading.steps, reading.values, strict=True):
            latest = max(latest, value)
            made.steps.append(step)
            made.values.append(latest - first)
    return made


def step_at(run: RunData, time_s: float) -> int | None:
    """Return the first step that a run logged at or after a time; None without readings, or if none follows."""
    reading = run.curves.time.get(AT)
    if reading is None or not reading.values or time_s < reading.values[0]:
        return None
    at = bisect_left(reading.values, time_s)  # readings rise but for turns of a clock
    return reading.steps[at] if at < len(reading.steps) else None


def counted_axes(charts: Sequence[ChartData]) -> dict[str, ChartData]:
    """Return metrics that count samples or tokens, by the word for an axis: one of each."""
    found: dict[str, ChartData] = {}
    for chart in charts:
        last = chart.title.rpartition("/")[2]
        if last in _COUNTED and chart.group not in ("time", "system"):
            _ = found.setdefault("tokens" if "token" in last else "samples", chart)
    return found


def marks_of(run: RunData) -> list[tuple[int, str, str]]:
    """Return steps at which a run resumed or wrote a checkpoint, each with its kind and its text."""
    resumes = [(time_s, "resume") for time_s in (run.run.resumed_s if run.run else ())]
    restarts = [(event.time_s, "restart") for each in run.launches for event in each.events if event.kind == "restart"]
    marks: dict[tuple[int, str], str] = {}
    for time_s, text in sorted(resumes + restarts):
        if (step := step_at(run, time_s)) is not None:
            _ = marks.setdefault((step, "resume"), text)
    for each in run.checkpoints:
        if not each.problem and (step := _checkpoint_step(run, each.name, each.changed_s)) is not None:
            marks[step, "checkpoint"] = each.name
    return sorted((step, kind, text) for (step, kind), text in marks.items())


def _checkpoint_step(run: RunData, name: str, changed_s: float) -> int | None:
    """Return the step of a checkpoint by its name; by the clock if that is beyond the run's steps, as with epochs."""
    found = re.fullmatch(r"step-(\d+)", name)
    last = run.curves.last_step
    if found is None or last is None:
        return None
    step = int(found[1])
    by_clock = step_at(run, changed_s)
    steps: Mapping[str, MetricCurve] = run.curves.time
    if by_clock is not None and AT in steps and abs(by_clock - step) > max(10, last // 4):
        return by_clock
    return step if step <= last else None


def ranked_metrics(charts: Sequence[ChartData], saved: Sequence[str] = ()) -> Iterator[ChartData]:
    """Yield charts of metrics, those that matter first: `saved` with checkpoints, of evaluations, with a direction.

    What counts samples or epochs is none, also where it begins anew with each epoch.
    """
    most = max((len(chart.curves) for chart in charts), default=0)

    def rank(chart: ChartData) -> tuple[bool, bool, bool, bool]:
        is_evaluated = re.match(r"(eval|val|valid|validation|test|dev)\b|.*(val|eval|test)_", chart.title) is not None
        return 2 * len(chart.curves) < most, chart.title not in saved, not chart.better, not is_evaluated

    found = [chart for chart in charts if chart.group not in ("time", "system") and chart.kind == "curve"]
    yield from sorted((chart for chart in found if chart.title.rpartition("/")[2] not in _COUNTERS), key=rank)
