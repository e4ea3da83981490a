# SPDX-License-Identifier: Apache-2.0
"""The page of a report: one file that asks no server for anything, with a script that draws the curves."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from accel.opening import read_regular
from accel.report import _summary, _tables
from accel.report._media import MEDIA_ROOM, MediaShelf, PageMedia, media_section
from accel.report._run_data import AT, MetricCurve, RunData
from accel.report._run_state import RunState, state_of
from accel.report._series import ChartData, SeriesWriter, charts_of, clock_of, counted_axes, marks_of, ranked_metrics
from accel.report._tables import Html, element, folded, join, launch_sections, table
from accel.run_folder import CODE
from accel.terminal import show_names, show_size

MOST_SIDE_BY_SIDE = 6  # runs; more are a table of one row a run
_MOST_TILES = 4
_MOST_GROUPS = 6  # groups of charts that are not folded
_MOST_OPEN = 12  # charts up to which readings of clocks are not folded
_LAST = ("time/", "system/", "constants and counters")  # titles of groups, behind the media
_FIRST = ("train", "eval", "val", "valid", "validation", "test")  # groups
_LONGEST_CODE = 200_000  # characters of changed code on the page
_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("data.js", "groups.js", "charts.js", "export.js", "media.js", "page.js", "sweep.js")
_LIVE = "live.js"


class Page(NamedTuple):
    """The content of a page."""

    title: str
    kind: str  # "few" runs side by side, "one", "many" with a row for each, or "empty", with nothing to draw
    main: Html  # its markup
    data: dict[str, Any]  # the curves and more for its script
    contents: Mapping[str, bytes] = {}  # JSON of its images and other media by their keys in `data`


def page_of(
    runs: Sequence[RunData],
    order: dict[str, int] | None = None,
    shelf: MediaShelf | None = None,
    unreadable: Sequence[str] = (),
) -> Page:
    """Return the page of runs, the first in front.

    Args:
        runs: the runs.
        order: places of charts on earlier pages of the runs, which keep them; new charts are added.
        shelf: media of earlier pages, and the room for them.
        unreadable: folders that may hold more runs and cannot be searched, a line each.
    """
    states = [state_of(run.run, run.launches, folder=run.folder) for run in runs]
    charts = charts_of(runs)
    if order is not None:
        charts.sort(key=lambda chart: order.setdefault(chart.title, len(order)))
    saved = {name for run in runs for each in run.checkpoints for name in each.metrics}
    matter = list(ranked_metrics(charts, tuple(saved)))[:_MOST_TILES]
    projects = {run.run.project if run.run else "" for run in runs}
    project = f"{shared}: " if len(projects) == 1 and (shared := min(projects)) else ""
    title = project + (runs[0].name if len(runs) == 1 else f"{len(runs)} runs")
    is_sweep = len(runs) > MOST_SIDE_BY_SIDE
    media = (MediaShelf() if shelf is None else shelf).fill([run.media for run in runs])
    details = _shared_details(runs) if is_sweep else _details(runs, states)
    first = [element("h1", title), *_summary.warning_list(unreadable)]
    if all(run.is_empty for run in runs):
        body = join([*first, *_summary.no_runs(runs)])
    else:
        body = join([*first, *_first_screen(runs, states, matter), *_charts(runs, charts, media), *details])
    data = _script_data(runs, states, charts, [charts.index(each) for each in matter]) | {"media": media.series}
    is_empty = not charts and not media.series
    kind = "many" if is_sweep else "empty" if is_empty else "one" if len(runs) == 1 else "few"
    return Page(title, kind, body, data, media.contents)


def report_page(runs: Sequence[RunData], room: int = MEDIA_ROOM, unreadable: Sequence[str] = ()) -> str:
    """Return the page of runs, the first in front. Beyond six runs it has a row a run, and no launches of each.

    Args:
        runs: the runs.
        room: bytes of media on the page.
        unreadable: folders that may hold more runs and cannot be searched, a line each.
    """
    page = page_of(runs, shelf=MediaShelf(room), unreadable=unreadable)
    if page.kind == "empty":
        return _document(page.title, page.main, {}, ())
    stored = {"contents": contents_json(page.contents, page.contents)} if page.contents else {}
    return _document(page.title, page.main, {"data": _in_script(page.data), **stored}, [_script(_SCRIPTS)])


def contents_json(contents: Mapping[str, bytes], keys: Iterable[str]) -> str:
    """Return the contents of the keys that a page has, as JSON."""
    parts = [f'"{key}":{contents[key].decode()}' for key in keys if key in contents]
    return f"{{{','.join(parts)}}}".replace("<", "\\u003c")


def served_page(page: Page, version: str) -> str:
    """Return a page that asks the server it came from for newer versions, and draws them."""
    script = _script((*_SCRIPTS, _LIVE))
    stored = {"data": _in_script(page.data)}
    return _document(page.title, page.main, stored, [script], data_version=version, data_kind=page.kind)


def _in_script(data: object) -> str:
    # "<" in a text of JSON could end the script
    return msgspec.json.encode(data).decode().replace("<", "\\u003c")


def _script(names: Sequence[str]) -> str:
    parts = "\n".join((_ASSETS / name).read_text() for name in names)
    shown = (
        "window.report = { state, charts, frames, shelf, setView, currentView };"  # for tests and a browser's console
    )
    return f'(() => {{\n"use strict";\n{parts}\n{shown}\n}})();\n'


def policy_of(scripts: Sequence[str], *, is_served: bool = False) -> str:
    """Return the Content-Security-Policy under which these scripts run, and no others, and nothing is fetched, but by a
    served page from its server."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'" + ("; connect-src 'self'" if is_served else "")
    )


def _document(title: str, body: Html, stored: Mapping[str, str], scripts: Sequence[str], **served: str) -> str:
    head = join(
        [
            element("meta", charset="utf-8"),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", http_equiv="Content-Security-Policy", content=policy_of(scripts, is_served=bool(served))),
            element("title", title),
            element("style", Html((_ASSETS / "style.css").read_text())),
        ]
    )
    run = [element("script", Html(text), id=name, type="application/json") for name, text in stored.items()]
    run += [element("script", Html(text)) for text in scripts]
    main = element("main", body, **served)
    page = element("html", element("head", head), element("body", main, *run), lang="en")
    return f"<!doctype html>\n{page}\n"


def _script_data(
    runs: Sequence[RunData], states: Sequence[RunState], charts: Sequence[ChartData], matter: Sequence[int]
) -> dict[str, Any]:
    writer = SeriesWriter(charts)
    axes = counted_axes(charts)
    params = _params(runs)
    shown: list[dict[str, Any]] = []
    for at, (run, state) in enumerate(zip(runs, states, strict=True)):
        clock = clock_of(run)
        found = {"time": writer.axis(clock.steps, clock.values)}
        for name, chart in axes.items():
            curve = chart.curves.get(at, MetricCurve())
            found[name] = writer.axis(curve.steps, curve.values)
        shown.append(
            {
                "name": run.name,
                "state": state.kind,
                "params": params[at],
                "axes": {name: each for name, each in found.items() if each is not None},
                "extent": _extent(run),
                "marks": [] if len(runs) > MOST_SIDE_BY_SIDE else marks_of(run),
            }
        )
    metrics = [writer.chart(chart) for chart in charts]
    differing = list(dict.fromkeys(name for each in params for name in each))
    return {"runs": shown, "metrics": metrics, "matter": matter, "differing": differing, "steps": writer.steps}


def _extent(run: RunData) -> tuple[int, int] | None:
    curves = [*run.curves.values.values(), *run.curves.time.values(), *run.machine.values()]
    ends = [step for curve in curves for step in (*curve.steps[:1], *curve.steps[-1:])]
    ends += [step for curve in curves for step, _ in (*curve.marks[:1], *curve.marks[-1:])]
    return (min(ends), max(ends)) if ends else None


def _params(runs: Sequence[RunData]) -> list[dict[str, str]]:
    """Return of each run the values of its configuration and settings that differ between runs."""
    found: list[dict[str, str]] = [{} for _ in runs]
    for rows in (_tables.configurations(runs), _tables.settings(runs)):
        for at in _tables.differing(rows):
            name, *values = rows[at]
            for each, value in zip(found, values, strict=True):
                if value != _tables.NONE:
                    _ = each.setdefault(name, value[:200])
    return found


def _first_screen(
    runs: Sequence[RunData], states: Sequence[RunState], matter: Sequence[ChartData]
) -> Iterator[Html | None]:
    if len(runs) > MOST_SIDE_BY_SIDE:
        yield from _summary.many_runs(runs, states)
        return
    yield from _alerts(runs, states)
    if len(runs) == 1:
        yield from _summary.one_run(runs[0], states[0], matter)
    else:
        yield from _summary.few_runs(runs, states, matter)


def _alerts(runs: Sequence[RunData], states: Sequence[RunState]) -> Iterator[Html]:
    for run, state in zip(runs, states, strict=True):
        if state.kind in ("failed", "lost"):
            attempt = run.launches[-1].attempts[-1] if run.launches and run.launches[-1].attempts else None
            error = attempt.error if attempt else None
            message = error.message if error else ""
            place = error.location if error else ""
            yield element(
                "div",
                element("strong", f"{run.name}: {state.text}" if len(runs) > 1 else state.text),
                element("pre", message) if message else None,
                element("div", "at ", element("code", place)) if place else None,
                class_="alert",
                role="alert",
            )


def _charts(runs: Sequence[RunData], charts: Sequence[ChartData], media: PageMedia) -> Iterator[Html]:
    if len(runs) > MOST_SIDE_BY_SIDE:
        yield _bar(runs, charts)
        yield _sweep()
    if not charts:
        yield element("p", "No metrics have been logged.")
        yield from _media(media)
        return
    if len(runs) <= MOST_SIDE_BY_SIDE:
        yield _bar(runs, charts)
    marked = (
        ""
        if len(runs) > MOST_SIDE_BY_SIDE
        else "╎ resumed or restarted · ▲ checkpoint · \N{MULTIPLICATION SIGN} not finite · "
    )
    keys = "Drag over a curve to zoom, with Shift to pan; double-click to see all. "
    yield element("p", f"{marked}band: least to most of the steps in a point. {keys}", class_="key")
    groups = list(_groups(charts))
    behind = next((at for at, group in enumerate(groups) if group[0] in _LAST), len(groups))
    yield from _chart_groups(runs, charts, groups[:behind])
    yield from _media(media)
    yield from _chart_groups(runs, charts, groups[behind:])


def _media(media: PageMedia) -> Iterator[Html]:
    if media.series:
        yield media_section(media)


def _chart_groups(
    runs: Sequence[RunData], charts: Sequence[ChartData], groups: Sequence[tuple[str, bool, list[int]]]
) -> Iterator[Html]:
    for title, is_open, members in groups:
        cards = [_card(runs, charts, at) for at in members]
        shown = element("div", *cards, class_="cards")
        yield folded(title, shown, note=str(len(members)), is_open=is_open, class_="group")


def _groups(charts: Sequence[ChartData]) -> Iterator[tuple[str, bool, list[int]]]:
    """Yield groups of charts: title, whether it is open, and the charts' numbers."""
    found: dict[str, list[int]] = {}
    for at, chart in enumerate(charts):
        found.setdefault(chart.group if chart.kind == "curve" else "\0", []).append(at)
    dull = found.pop("\0", [])
    clocks = [(f"{name}/", found.pop(name)) for name in ("time", "system") if name in found]
    alone = [name for name, members in found.items() if len(members) == 1 and name not in (*_FIRST, "")]
    for name in alone:
        found.setdefault("", []).extend(found.pop(name))
    first = [name for name in _FIRST if name in found]
    rest = [name for name in found if name not in (*first, "")]
    ordered: list[str] = [*first, *([""] if "" in found else []), *rest]
    for at, name in enumerate(ordered):
        title = f"{name}/" if name else "others" if len(found) > 1 else "metrics"
        yield title, at < _MOST_GROUPS, found[name]
    for title, members in clocks:
        yield title, len(charts) <= _MOST_OPEN, members
    if dull:
        yield "constants and counters", False, dull


def _card(runs: Sequence[RunData], charts: Sequence[ChartData], at: int) -> Html:
    chart = charts[at]
    button = element("button", "⤢", type="button", title="Widen", aria_label=f"Widen {chart.title}")
    canvas = element("canvas", tabindex="0", role="img", aria_label=f"Curves of {chart.title}")
    marked = [(runs[run].name, curve) for run, curve in chart.curves.items() if curve.marks]
    notes = [
        element("p", f"{name}: {_describe_marks(curve)}" if len(runs) > 1 else _describe_marks(curve), class_="marks")
        for name, curve in marked[:MOST_SIDE_BY_SIDE]
    ]
    if len(marked) > MOST_SIDE_BY_SIDE:
        notes = [element("p", f"{len(marked)} runs with values that are not finite", class_="marks")]
    head = element("header", element("h3", chart.title), button)
    return element("section", head, canvas, *notes, class_="card", data_metric=str(at))


def _describe_marks(curve: MetricCurve) -> str:
    shown = show_names([f"{text} at step {_summary.show_value(step)}" for step, text in curve.marks])
    return f"{len(curve.marks)} value{'s' * (len(curve.marks) > 1)} not finite, {shown}"


def _bar(runs: Sequence[RunData], charts: Sequence[ChartData]) -> Html:
    """Return the page's legend and controls, which stay in sight; the script fills the legend."""
    has_clock = any(AT in run.curves.time for run in runs)
    axes = [("step", "steps"), *(("time", "wall-clock"),) * has_clock, *((name, name) for name in counted_axes(charts))]
    controls = [
        element(
            "label", "x", element("select", *(element("option", text, value=name) for name, text in axes), id="axis")
        ),
        element("label", element("input", type="checkbox", id="log"), "log y"),
        element(
            "label",
            "smooth",
            element("input", type="range", id="smooth", min="0", max="100", value="0"),
            element("output", "off", id="smooth-value"),
        ),
        element("button", "reset zoom", id="reset", type="button", disabled=""),
    ]
    if len(charts) > MOST_SIDE_BY_SIDE:
        controls.append(element("input", type="search", id="search", placeholder="charts by name", aria_label="Charts"))
    if len(runs) == 1:
        return element("div", element("div", *controls, class_="controls"), id="bar")
    hint = "runs: words, lr<0.01"
    title = "Words of names and settings; comparisons of settings and last values, such as lr<0.01"
    controls += [
        element("label", "group by ", element("select", element("option", "none", value=""), id="group")),
        element("input", type="search", id="filter", placeholder=hint, title=title, aria_label="Filter of runs"),
        element("button", "all/none", id="all", type="button"),
        element("span", id="count", class_="soft"),
    ]
    return element(
        "div",
        element("div", *controls, class_="controls"),
        element("div", id="legend", role="group", aria_label="Runs: click to hide, Shift and click to see only one"),
        id="bar",
    )


def _sweep() -> Html:
    """Return the places of the sweep's table and of its parallel coordinates, which the script fills."""
    chooser = folded("Columns", id="columns")
    against = element("label", "Settings against ", element("select", id="against"), class_="controls")
    parallel = element("div", id="parallel", class_="wide")
    rows = element("div", element("table", id="rows"), class_="wide", tabindex="0")
    return element(
        "section", element("h2", "Runs"), chooser, rows, element("h2", "Settings"), against, parallel, id="sweep"
    )


_COMPARED = (
    ("Configuration", _tables.configurations),
    ("Settings and their sources", _tables.settings),
    ("Versions", _tables.versions),
)


def _details(runs: Sequence[RunData], states: Sequence[RunState]) -> Iterator[Html]:
    yield element("h2", "Details")
    facts = table(["", *_names(runs)], _tables.overview(runs, states))
    yield folded("Overview", facts, is_open=len(runs) == 1)
    if any(run.curves.values for run in runs):
        values = table(["last value", *_names(runs)], _tables.last_values(runs))
        yield folded("Last values", values)
    yield from _checkpoints(runs)
    yield from _profiles(runs)
    for title, read in _COMPARED:
        yield from _compared(title, runs, read(runs))
    yield from _code(runs)
    for run in runs:
        yield from launch_sections(run, several=len(runs) > 1)


def _shared_details(runs: Sequence[RunData]) -> Iterator[Html]:
    """Yield what many runs have in common; each also has a separate page."""
    shown: list[Html] = []
    for title, read in _COMPARED:
        rows = read(runs)
        differing = set(_tables.differing(rows))
        alike = [row[:2] for at, row in enumerate(rows) if at not in differing]
        if alike:
            note = f"{len(alike)}; {len(differing)} differ" if differing else str(len(alike))
            shown.append(folded(title, table(["", ""], alike), note=note))
    if shown:
        yield element("h2", "Alike in all runs")
    yield from shown
    parts = "launches, checkpoints and profile"
    yield element("p", f"For {parts} of one run: ", element("code", f"accel report {runs[0].folder}"), class_="soft")


def _names(runs: Sequence[RunData]) -> list[str]:
    return [run.name for run in runs]


def _checkpoints(runs: Sequence[RunData]) -> Iterator[Html]:
    found = [(run, each) for run in runs for each in run.checkpoints]
    if not found:
        return
    rows: list[tuple[str, ...]] = []
    for run, each in found:
        metrics = ", ".join(f"{name} {_summary.show_value(value)}" for name, value in each.metrics.items())
        cells = (each.name, show_size(each.size), _tables.show_time(each.changed_s), each.problem or metrics)
        rows.append((*cells, run.name) if len(runs) > 1 else cells)
    shown = table(["name", "size", "written", "metrics", *(["run"] if len(runs) > 1 else [])], rows)
    yield folded("Checkpoints", shown, note=str(len(rows)))


def _profiles(runs: Sequence[RunData]) -> Iterator[Html]:
    for run in runs:
        if run.profile:
            title = f"Profile of {run.name}" if len(runs) > 1 else "Profile"
            yield folded(title, element("pre", run.profile, class_="table"))


def _compared(title: str, runs: Sequence[RunData], rows: _tables.Rows) -> Iterator[Html]:
    if rows:
        marked = _tables.differing(rows)
        note = f"{len(marked)} of {len(rows)} differ" if len(runs) > 1 else f"{len(rows)}"
        yield folded(title, table(["", *_names(runs)], rows, marked=marked), note=note)


def _code(runs: Sequence[RunData]) -> Iterator[Html]:
    for run in runs:
        try:
            text = read_regular(run.folder / CODE, within=run.folder).decode(errors="replace")
        except FileNotFoundError:
            continue
        except OSError as error:
            text = f"{CODE} cannot be read: {error.strerror or error}"
        if text:
            cut = f"\n[{len(text) - _LONGEST_CODE} characters more]" if len(text) > _LONGEST_CODE else ""
            title = f"Changes of the code of {run.name}" if len(runs) > 1 else "Changes of the code"
            body = element("pre", text[:_LONGEST_CODE] + cut, class_="table")
            yield folded(title, element("div", body, class_="wide"))
