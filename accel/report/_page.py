# SPDX-License-Identifier: Apache-2.0
"""The page of a report: one file, which asks no server for anything and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence

from accel.report import _tables
from accel.report._curves import AT, Curve
from accel.report._figures import Figures, draw
from accel.report._html import Html, element, join, table
from accel.report._launches import launch_sections
from accel.report._run_data import RunData
from accel.report._state import RunState, state_of
from accel.report._style import STYLE
from accel.terminal import show_size

_TIMES = "by the clock: "  # begins the title of a reading of clocks
_POINTER = """
// A finger on a curve scrolls the page; a mouse zooms.
if (matchMedia("(pointer: coarse)").matches) {
  const release = (views) => { for (const view of views) {
    if (view.model.toolbar) view.model.toolbar.active_drag = null;
    release(view.child_views ?? []);
  } };
  const wait = setInterval(() => {
    const views = [...(window.Bokeh?.index ? window.Bokeh.index : [])];
    if (views.length) { clearInterval(wait); release(views); }
  }, 100);
}
"""


def report_page(runs: Sequence[RunData]) -> str:
    """Return the page of one or several runs.

    Args:
        runs: runs, the first leftmost.

    Raises:
        MissingExtraError: a run has metrics, and bokeh does not import.
    """
    states = [state_of(run.run, run.launches) for run in runs]
    figures = draw(_by_title(runs), [run.name for run in runs])
    first = runs[0]
    project = f"{first.run.project}: " if first.run else ""
    title = f"{project}{first.name}" if len(runs) == 1 else f"{len(runs)} runs"
    body = join(
        [
            element("h1", title),
            *_alerts(runs, states),
            element("h2", "Overview"),
            table(["", *_names(runs)], _with_badges(_tables.overview(runs, states), states)),
            *_charts(runs, figures),
            *_checkpoints(runs),
            *_profiles(runs),
            *_compared("Configuration", runs, _tables.configurations(runs)),
            *_compared("Settings and their sources", runs, _tables.settings(runs)),
            *_compared("Versions", runs, _tables.versions(runs)),
            *(section for run in runs for section in launch_sections(run, several=len(runs) > 1)),
        ]
    )
    return _document(title, body, figures.scripts)


def policy_of(scripts: Sequence[str]) -> str:
    """Return the Content-Security-Policy under which these scripts run, and no others, and nothing is fetched."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _document(title: str, body: Html, scripts: Sequence[str]) -> str:
    scripts = [*scripts, _POINTER] if scripts else []
    head = join(
        [
            element("meta", charset="utf-8"),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", http_equiv="Content-Security-Policy", content=policy_of(scripts)),
            element("title", title),
            element("style", Html(STYLE)),
        ]
    )
    run = [element("script", Html(text)) for text in scripts]
    page = element("html", element("head", head), element("body", element("main", body), *run), lang="en")
    return f"<!doctype html>\n{page}\n"


def _names(runs: Sequence[RunData]) -> list[str]:
    return [run.name for run in runs]


def _by_title(runs: Sequence[RunData]) -> dict[str, dict[str, Curve]]:
    """Return curves by metric and run: metrics first, then readings of clocks."""
    found: dict[str, dict[str, Curve]] = {}
    for run in runs:
        for name, curve in run.curves.values.items():
            found.setdefault(name, {})[run.name] = curve
    for run in runs:
        for name, curve in run.curves.time.items():
            if name != AT:
                found.setdefault(f"{_TIMES}{name}", {})[run.name] = curve
    return found


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


def _with_badges(rows: _tables.Rows, states: Sequence[RunState]) -> list[Sequence[str]]:
    shown: list[Sequence[str]] = list(rows)
    if rows and rows[0][0] == "state":
        badges = (element("span", state.text, class_=f"badge {state.kind}") for state in states)
        shown[0] = ("state", *badges)
    return shown


def _charts(runs: Sequence[RunData], figures: Figures) -> Iterator[Html]:
    yield element("h2", "Metrics")
    if not figures.places:
        yield element("p", "No metrics have been logged.")
        return
    yield table(["last value", *_names(runs)], _tables.last_values(runs))
    cards: list[Html] = []
    curves = _by_title(runs)
    for title, place in figures.places.items():
        notes = [
            element("p", f"{run}: {_describe_marks(curve)}", class_="marks")
            for run, curve in curves[title].items()
            if curve.marks
        ]
        cards.append(element("section", element("h3", title), place, *notes, class_="card"))
    yield element("div", *cards, class_="cards")


def _describe_marks(curve: Curve) -> str:
    shown = ", ".join(f"{text} at step {step}" for step, text in curve.marks[:3])
    more = f" and {len(curve.marks) - 3} more" if len(curve.marks) > 3 else ""
    return f"{len(curve.marks)} value{'s' * (len(curve.marks) > 1)} not finite, {shown}{more}"


def _checkpoints(runs: Sequence[RunData]) -> Iterator[Html]:
    found = [(run, each) for run in runs for each in run.checkpoints]
    if not found:
        return
    yield element("h2", "Checkpoints")
    rows: list[tuple[str, ...]] = []
    for run, each in found:
        metrics = ", ".join(f"{name} {_tables.show_number(value)}" for name, value in each.metrics.items())
        cells = (each.name, show_size(each.size), _tables.show_time(each.changed_s), each.problem or metrics)
        rows.append((*cells, run.name) if len(runs) > 1 else cells)
    yield table(["name", "size", "written", "metrics", *(["run"] if len(runs) > 1 else [])], rows)


def _profiles(runs: Sequence[RunData]) -> Iterator[Html]:
    for run in runs:
        if run.profile:
            title = f"Profile of {run.name}" if len(runs) > 1 else "Profile"
            yield element("details", element("summary", title), element("pre", run.profile, class_="table"))


def _compared(title: str, runs: Sequence[RunData], rows: _tables.Rows) -> Iterator[Html]:
    if rows:
        marked = _tables.differing(rows)
        note = f"{len(marked)} of {len(rows)} differ" if len(runs) > 1 else f"{len(rows)}"
        shown = table(["", *_names(runs)], rows, marked=marked)
        yield element("details", element("summary", title, element("span", f" ({note})")), shown)
