# SPDX-License-Identifier: Apache-2.0
"""Differences between two runs: settings, versions, code, and metrics from the first step at which they part."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping

import msgspec

from accel.errors import ConfigError
from accel.opening import read_regular
from accel.report._run_data import MetricCurve, RunData
from accel.report._tables import flatten, settings_of, show_source, versions_of
from accel.run_folder import CODE, SourceState
from accel.terminal import show_table, show_text

_WIDEST_CELL = 48  # characters of a value; all of it stands in --json

Value = float | str  # texts are "nan", "inf" and "-inf", for which JSON has no numbers


class FactDifference(msgspec.Struct, frozen=True):
    """A fact that two runs do not share."""

    kind: str  # "config", "setting", "version" or "code"
    name: str  # dotted name of the fact
    a: str | None  # value of the first run; None if it has none
    b: str | None  # value of the second run; None if it has none


class ValueDifference(msgspec.Struct, frozen=True):
    """The values of one metric at one step."""

    step: int
    a: Value | None  # value of the first run; None if it logged none at this step
    b: Value | None  # value of the second run; None if it logged none
    difference: Value | None  # distance of the values; "inf" where one is not finite, None where one is missing


class MetricDifference(msgspec.Struct, frozen=True):
    """A metric that two runs do not share."""

    name: str
    steps: int  # number of steps at which both runs have a value
    differing: int  # number of steps at which the values differ
    missing_a: int  # number of steps at which the second run alone has a value
    missing_b: int  # number of steps at which the first run alone has a value
    first: ValueDifference  # the first step at which the runs differ
    largest: ValueDifference | None  # the step of the largest difference; None if no values differ


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison of two runs."""

    a: str  # folder of the first run
    b: str  # folder of the second run
    alike: bool  # whether nothing differs
    facts: list[FactDifference]  # facts that differ
    first_step: int | None  # the first step at which a metric differs; None if none does
    metrics: list[MetricDifference]  # metrics that differ, those that part first in front
    alike_metrics: list[str]  # names of the metrics that are alike
    damaged_a: int  # number of lines of the first run that could not be read
    damaged_b: int  # number of lines of the second run that could not be read


def compare_runs(a: RunData, b: RunData, *, rtol: float = 0.0) -> Comparison:
    """Compare two runs; values within `rtol` times the larger one are alike. Readings of clocks are left out."""
    facts = [*_facts(a, b)]
    names = [*dict.fromkeys([*a.curves.values, *b.curves.values])]
    empty = MetricCurve()
    ours, theirs = a.curves.values, b.curves.values
    found = {name: _metric(name, ours.get(name, empty), theirs.get(name, empty), rtol) for name in names}
    metrics = sorted((each for each in found.values() if each is not None), key=lambda each: each.first.step)
    return Comparison(
        a=str(a.folder),
        b=str(b.folder),
        alike=not facts and not metrics,
        facts=facts,
        first_step=metrics[0].first.step if metrics else None,
        metrics=metrics,
        alike_metrics=[name for name, each in found.items() if each is None],
        damaged_a=a.damaged,
        damaged_b=b.damaged,
    )


def describe_comparison(found: Comparison) -> str:
    """Return a comparison as text for people."""
    blocks = [[f"A  {found.a}", f"B  {found.b}"]]
    if found.facts:
        cells = [(each.kind, each.name, _cell(each.a, each.b), _cell(each.b, each.a)) for each in found.facts]
        blocks.append(show_table([("", "", "A", "B"), *cells]).split("\n"))
    else:
        blocks.append(["settings, versions and code are alike"])
    if found.metrics:
        first = [each for each in found.metrics if each.first.step == found.first_step]
        blocks += [[*map(_first_line, first)], show_table(_metric_rows(found.metrics)).split("\n")]
    if found.alike_metrics:
        blocks.append([f"alike: {', '.join(found.alike_metrics)}"])
    if not found.metrics and not found.alike_metrics:
        blocks.append(["neither run has metrics"])
    damaged = [
        f"{count} lines of {name} cannot be read"
        for name, count in (("A", found.damaged_a), ("B", found.damaged_b))
        if count
    ]
    return "\n\n".join("\n".join(map(show_text, block)) for block in [*blocks, damaged] if block) + "\n"


def _first_line(metric: MetricDifference) -> str:
    first = metric.first
    where = f"step {first.step} is the first at which {metric.name} differs"
    if first.difference is None:
        has, value = ("B", first.b) if first.a is None else ("A", first.a)
        return f"{where}: only {has} has a value, {_number(value)}"
    return f"{where}: {_number(first.a)} and {_number(first.b)}, by {_number(first.difference)}"


def _metric_rows(metrics: Iterable[MetricDifference]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("METRIC", "DIFFERS FROM", "LARGEST DIFFERENCE", "AT STEP", "A", "B", "STEPS")]
    for each in metrics:
        steps = f"{each.differing} of {each.steps} differ"
        steps += "".join(
            f", {count} only in {name}" for name, count in (("A", each.missing_b), ("B", each.missing_a)) if count
        )
        at = each.largest
        cells = ("-",) * 4
        if at is not None:
            cells = (_number(at.difference), str(at.step), _number(at.a), _number(at.b))
        rows.append((each.name, f"step {each.first.step}", *cells, steps))
    return rows


def _number(value: Value | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.9g}"


def _cell(value: str | None, other: str | None) -> str:
    """Return a value for the table; of a long one the part where it differs from the other."""
    if value is None or len(value) <= _WIDEST_CELL:
        return "-" if value is None else value or "empty"
    same = next((at for at, (a, b) in enumerate(zip(value, other or "", strict=False)) if a != b), len(other or ""))
    first = max(0, min(same - _WIDEST_CELL // 4, len(value) - _WIDEST_CELL))
    shown = value[first : first + _WIDEST_CELL]
    return f"{'…' * (first > 0)}{shown}{'…' * (first + len(shown) < len(value))}"


def _facts(a: RunData, b: RunData) -> Iterable[FactDifference]:
    for kind, read in (("config", _config), ("setting", _settings), ("version", versions_of), ("code", _code)):
        ours = read(a)
        theirs = read(b)
        alone, launcher = _launchers(a, b) if kind == "setting" else (set[str](), None)
        if launcher is not None:
            yield launcher
        for name in dict.fromkeys([*ours, *theirs]):
            if name not in alone and ours.get(name) != theirs.get(name):
                yield FactDifference(kind, name, ours.get(name), theirs.get(name))


def _config(run: RunData) -> dict[str, str]:
    return {} if run.run is None else {"project": run.run.project, **dict(flatten(run.run.config))}


def _settings(run: RunData) -> dict[str, str]:
    launched, settled = settings_of(run)
    ranks = {} if run.run is None else {"ranks": str(run.run.world_size)}
    return {**{name: each.value for name, each in {**launched, **settled}.items()}, **ranks}


_STARTED = "started by"


def _launchers(a: RunData, b: RunData) -> tuple[set[str], FactDifference | None]:
    """Return the settings of the launcher that only one of two runs had, and their one difference."""
    if not (a.run and b.run) or bool(a.launches) == bool(b.launches):
        return set(), None
    mine: set[str] = set()
    for run in (a, b):
        launched, settled = settings_of(run)
        mine |= launched.keys() - settled.keys()
    own = f"accel launch, with {len(mine)} setting{'s' * (len(mine) != 1)}"
    by = [own if run.launches else "another command" for run in (a, b)]
    return mine, FactDifference("setting", _STARTED, *by)


def _code(run: RunData) -> dict[str, str]:
    launched = run.launches[-1].source if run.launches else None
    source: SourceState | None = (run.run.source if run.run else None) or launched
    if source is None:
        return {}
    # the branch and files that git does not track say nothing of what ran
    shown = show_source(msgspec.structs.replace(source, branch="", untracked=0))
    return {"commit": shown} | _changes(run)


def _changes(run: RunData) -> dict[str, str]:
    """Return a digest of the differences of tracked files, if the run has stored them."""
    try:
        stored = read_regular(run.folder / CODE, within=run.folder)
    except FileNotFoundError:
        return {}
    except OSError as error:
        problem = f"{CODE} cannot be read: {error.strerror or error}"
        raise ConfigError(problem, where=str(run.folder)) from error
    return {CODE: f"sha256 {hashlib.sha256(stored).hexdigest()[:12]}"}


def _metric(name: str, a: MetricCurve, b: MetricCurve, rtol: float) -> MetricDifference | None:
    ours = _by_step(a)
    theirs = _by_step(b)
    both = sorted(ours.keys() & theirs.keys())
    differing = [step for step in both if not _alike(ours[step], theirs[step], rtol)]
    differences = sorted([*differing, *(ours.keys() ^ theirs.keys())])
    if not differences:
        return None
    at = max(differing, key=lambda step: _distance(ours[step], theirs[step]), default=None)
    return MetricDifference(
        name,
        steps=len(both),
        differing=len(differing),
        missing_a=len(theirs) - len(both),
        missing_b=len(ours) - len(both),
        first=_values(differences[0], ours, theirs),
        largest=None if at is None else _values(at, ours, theirs),
    )


def _by_step(curve: MetricCurve) -> dict[int, float]:
    values = dict(zip(curve.steps, curve.values, strict=True))
    return values | {step: float(text) for step, text in curve.marks}


def _alike(one: float, other: float, rtol: float) -> bool:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return True
    return _distance(one, other) <= rtol * max(abs(one), abs(other)) and math.isfinite(one) and math.isfinite(other)


def _distance(one: float, other: float) -> float:
    return abs(one - other) if math.isfinite(one) and math.isfinite(other) else math.inf


def _values(step: int, ours: Mapping[int, float], theirs: Mapping[int, float]) -> ValueDifference:
    one = ours.get(step)
    other = theirs.get(step)
    distance = None if one is None or other is None else _distance(one, other)
    return ValueDifference(step, _plain(one), _plain(other), _plain(distance))


def _plain(value: float | None) -> Value | None:
    return value if value is None or math.isfinite(value) else str(float(value))
