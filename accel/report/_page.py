# SPDX-License-Identifier: Apache-2.0
"""The page of a report, one file that asks no server for anything, and its figures by bokeh."""

from __future__ import annotations

import base64
import hashlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

from accel.errors import MissingExtraError
from accel.report import _tables
from accel.report._html import STYLE, Html, element, join, table
from accel.report._run_data import AT, MetricCurve, RunData, RunState, state_of, thin
from accel.report._tables import launch_sections
from accel.terminal import show_size

# Okabe and Ito's colours that read on light and dark: https://jfly.uni-koeln.de/color
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c00", "#9467bd")
_DASHES = ("solid", "dashed", "dotted", "dashdot")
_GREY = "#808080"  # the canvas knows no style sheet; this reads on both
_RED = "#e02020"
_HEIGHT = 280
_LONGEST = 40  # characters of a run's name in a legend
_LINES = ("axis_line_color", "major_tick_line_color", "minor_tick_line_color")
_TEXTS = ("axis_label_text_color", "major_label_text_color")
_MOST_MARKS = 500


class Figures(NamedTuple):
    """Figures for a page.

    Attributes:
        scripts: texts of scripts, to run in this order at the end of the page.
        places: markup of each figure, by the title of its metric.
    """

    scripts: list[str]
    places: dict[str, Html]


def draw(curves: Mapping[str, Mapping[str, MetricCurve]], runs: Sequence[str]) -> Figures:
    """Draw a figure for each metric, with each run's curve; raise `MissingExtraError` if bokeh does not import."""
    if not curves:
        return Figures([], {})
    layers = {title: _layers(lines, runs) for title, lines in curves.items()}
    kinds = {_kind(each): each for each in layers.values()}
    shared = _bokeh("models").DataRange1d(only_visible=True)
    # bokeh takes some 40 ms for a figure, and goes through all earlier ones at each: it draws one of a kind, and the
    # others of that kind are its JSON with names and data of their own
    figures = [_figure(shared, each, several=len(runs) > 1) for each in kinds.values()]
    document = _bokeh("document").Document()
    with document.models.freeze():
        for figure in figures:
            document.add_root(figure)
    content = document.to_json(deferred=False)
    patterns = dict(zip(kinds, content["roots"], strict=True))
    encode = _bokeh("core.serialization").Serializer(deferred=False).encode
    ranges = {shared.id: _find(content["roots"][0], shared.id)}  # written out by the figure that comes first
    content["roots"] = [
        _copy(patterns[_kind(each)], f"m{at}", [encode(layer.data) for layer in each], ranges)
        for at, each in enumerate(layers.values())
    ]
    names = [root["id"] for root in content["roots"]]
    bundle = _bokeh("embed.bundle").bundle_for_objs_and_resources(figures, _bokeh("resources").INLINE)
    item = {"docid": "report", "roots": {name: name for name in names}, "root_ids": names}
    # "<" in a text of JSON could end the script
    texts = [_bokeh("core.json_encoder").serialize_json(each, pretty=False) for each in ({"report": content}, [item])]
    shown = [text.replace("<", "\\u003c") for text in texts]
    scripts = [text.replace("</script", "<\\/script") for text in bundle.js_raw]
    places = (element("div", id=name, data_root_id=name, style="display: contents;") for name in names)
    return Figures(
        [*scripts, f"Bokeh.embed.embed_items({shown[0]}, {shown[1]});"], dict(zip(layers, places, strict=True))
    )


def color_of(at: int) -> str:
    """Return the colour of a run by its number."""
    return COLORS[at % len(COLORS)]


class _Layer(NamedTuple):
    """A layer of a figure: one run in one look.

    Attributes:
        look: "line"; "point", for a line of one point, which shows nothing; "marks", for values that are not finite.
        run: number of the run.
        label: name of the run, as legends and tooltips show it.
        data: columns.
    """

    look: Literal["line", "point", "marks"]
    run: int
    label: str
    data: dict[str, Any]


def _layers(lines: Mapping[str, MetricCurve], runs: Sequence[str]) -> list[_Layer]:
    numpy = importlib.import_module("numpy")
    made: list[_Layer] = []
    for run, curve in lines.items():
        who = runs.index(run), _label(run)
        steps, values = thin(curve.steps, curve.values)
        data = {"x": numpy.array(steps, dtype="f8"), "y": numpy.array(values, dtype="f8")}
        made.append(_Layer("line", *who, data))
        if len(steps) == 1:
            made.append(_Layer("point", *who, data))
        if curve.marks:
            made.append(_Layer("marks", *who, _marks(curve)))
    return made


def _kind(layers: Sequence[_Layer]) -> tuple[tuple[str, int], ...]:
    """Return the part of layers that decides how a figure is made, its data apart."""
    return tuple((layer.look, layer.run) for layer in layers)


def _find(value: Any, ident: str) -> Any:
    """Return the object of a name in bokeh's JSON; None if it is not in there."""
    if isinstance(value, dict):
        found = cast("dict[str, Any]", value)
        if found.get("id") == ident:
            return found
        value = list(found.values())
    parts = cast("list[Any]", value) if isinstance(value, list) else []
    return next((found for part in parts if (found := _find(part, ident)) is not None), None)


def _copy(value: Any, prefix: str, data: Sequence[Any], shared: dict[str, Any]) -> Any:
    """Return bokeh's JSON with other names, by a prefix, and other data, by the number that is a source's name.

    `shared` objects keep their names: the first copy writes them out, later ones refer to them.
    """
    if isinstance(value, list):
        return [_copy(each, prefix, data, shared) for each in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    made = dict(cast("dict[str, Any]", value))
    ident = made.get("id")
    if ident in shared:
        whole, shared[ident] = shared[ident], None
        return whole or {"id": ident}
    if made.get("type") == "object" and made["name"] == "ColumnDataSource":
        made["attributes"] = made["attributes"] | {"data": data[int(made["attributes"]["name"])]}
    copied = {key: each if key == "data" else _copy(each, prefix, data, shared) for key, each in made.items()}
    return copied if ident is None else copied | {"id": f"{prefix}-{ident}"}


def _figure(shared: Any, layers: Sequence[_Layer], *, several: bool) -> Any:
    models = _bokeh("models")
    figure = _bokeh("plotting").figure(
        height=_HEIGHT,
        sizing_mode="stretch_width",
        tools="xbox_zoom,pan,xwheel_zoom,reset,save",
        active_drag="xbox_zoom",
        active_scroll=None,
        x_range=shared,
        y_range=models.DataRange1d(only_visible=True),
        toolbar_location="above",
        x_axis_label="step",
    )
    drawn: list[Any] = []
    for at, layer in enumerate(layers):
        source = models.ColumnDataSource(layer.data, name=str(at))
        style: dict[str, Any] = {"source": source, "name": layer.label}
        if layer.look == "marks":
            crosses = figure.scatter("x", "y", marker="x", size=10, line_width=2.5, color=_RED, **style)
            tips = [("run", "$name"), ("step", "@x"), ("value", "@text")]
            figure.add_tools(models.HoverTool(renderers=[crosses], tooltips=tips))
            continue
        style |= {"color": color_of(layer.run), "legend_label": layer.label}
        if layer.look == "point":
            drawn.append(figure.scatter("x", "y", size=7, **style))
            continue
        line = figure.line("x", "y", line_width=1.6, **style)
        line.glyph.line_dash = _DASHES[layer.run // len(COLORS) % len(_DASHES)]
        drawn.append(line)
    tips = [("run", "$name"), ("step", "@x"), ("value", "@y{0.[000000]}")]
    figure.add_tools(models.HoverTool(renderers=drawn, tooltips=tips, mode="vline"))
    _tint(figure)
    legend = figure.legend[0]
    figure.add_layout(legend, "above")  # where it covers no curve
    legend.visible = several
    return figure


def _marks(curve: MetricCurve) -> dict[str, Any]:
    """Return columns of the values that are not finite: a red cross each, at the height of the value before."""
    marks = curve.marks[: _MOST_MARKS // 2] + curve.marks[max(_MOST_MARKS // 2, len(curve.marks) - _MOST_MARKS // 2) :]
    heights: list[float] = []
    at = 0
    for step, _ in marks:
        while at < len(curve.steps) and curve.steps[at] < step:
            at += 1
        heights.append(curve.values[max(0, at - 1)] if curve.values else 0.0)
    return {"x": [step for step, _ in marks], "y": heights, "text": [text for _, text in marks]}


def _tint(figure: Any) -> None:
    """Give a figure colours that read on light and dark pages."""
    figure.background_fill_color = None
    figure.border_fill_color = None
    figure.outline_line_color = None
    figure.toolbar.logo = None
    for axis in figure.axis:
        for name in (*_LINES, *_TEXTS):
            setattr(axis, name, _GREY)
    figure.grid.grid_line_color = _GREY
    figure.grid.grid_line_alpha = 0.25
    for legend in figure.legend:
        legend.click_policy = "hide"
        legend.background_fill_alpha = 0.0
        legend.border_line_color = None
        legend.label_text_color = _GREY
        legend.label_text_font_size = "12px"
        legend.orientation = "horizontal"
        legend.margin = legend.padding = 0
        legend.nrows = "auto"
        legend.ncols = "auto"


def _label(text: str) -> str:
    """Return a run's name as bokeh shows it: mathematics begins with "$$", and a canvas shows no line breaks."""
    shown = "".join(char if char.isprintable() else " " for char in text)
    shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…"
    return shown.replace("$$", "$\N{WORD JOINER}$").replace("\\", "\N{REVERSE SOLIDUS}\N{WORD JOINER}")


def _bokeh(name: str) -> Any:
    try:
        return importlib.import_module(f"bokeh.{name}")
    except ImportError as error:
        raise MissingExtraError(
            "a report with curves needs a package that does not import",
            expected="bokeh",
            got=f"{type(error).__name__}: {error}",
            fix="Run `pip install 'accel-torch[report]'`.",
        ) from error


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
    """Return the page of one or several runs, the first leftmost; raise `MissingExtraError` if there are metrics and no
    bokeh."""
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


def _by_title(runs: Sequence[RunData]) -> dict[str, dict[str, MetricCurve]]:
    """Return curves by metric and run: metrics first, then readings of clocks."""
    found: dict[str, dict[str, MetricCurve]] = {}
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


def _describe_marks(curve: MetricCurve) -> str:
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
