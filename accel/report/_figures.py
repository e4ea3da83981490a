# SPDX-License-Identifier: Apache-2.0
"""Figures of curves by bokeh, https://docs.bokeh.org: several runs in one, all with one range of steps."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from accel.errors import MissingExtraError
from accel.report._curves import Curve, thin
from accel.report._html import Html

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
_SCRIPT = re.compile(r"<script[^>]*>(.*)</script>", re.DOTALL)


class Figures(NamedTuple):
    """Figures for a page.

    Attributes:
        scripts: texts of scripts, to run in this order at the end of the page.
        places: markup of each figure, by the title of its metric.
    """

    scripts: list[str]
    places: dict[str, Html]


def draw(curves: Mapping[str, Mapping[str, Curve]], runs: Sequence[str]) -> Figures:
    """Draw a figure for each metric.

    Args:
        curves: for each title, the curve of each run that has one.
        runs: names of all runs, which fix their colours.

    Raises:
        MissingExtraError: bokeh does not import.
    """
    if not curves:
        return Figures([], {})
    plotting = _bokeh("plotting")
    embed = _bokeh("embed")
    shared = _bokeh("models").DataRange1d(only_visible=True)
    figures = {title: _figure(plotting, shared, lines, runs) for title, lines in curves.items()}
    script, places = embed.components(figures)
    bundle = _bokeh("embed.bundle").bundle_for_objs_and_resources(list(figures.values()), _bokeh("resources").INLINE)
    body = _SCRIPT.search(script)
    assert body is not None
    scripts = [text.replace("</script", "<\\/script") for text in (*bundle.js_raw, body[1])]
    return Figures(scripts, {title: Html(place) for title, place in places.items()})


def color_of(at: int) -> str:
    """Return the colour of a run by its number."""
    return COLORS[at % len(COLORS)]


def _figure(plotting: Any, shared: Any, lines: Mapping[str, Curve], runs: Sequence[str]) -> Any:
    models = _bokeh("models")
    numpy = importlib.import_module("numpy")
    figure = plotting.figure(
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
    for run, curve in lines.items():
        at = runs.index(run)
        steps, values = thin(curve.steps, curve.values)
        label = _label(run)
        data = {"x": numpy.array(steps, dtype="f8"), "y": numpy.array(values, dtype="f8")}
        style: dict[str, Any] = {"color": color_of(at), "legend_label": label, "name": label}
        line = figure.line("x", "y", source=models.ColumnDataSource(data), line_width=1.6, **style)
        line.glyph.line_dash = _DASHES[at // len(COLORS) % len(_DASHES)]
        drawn.append(line)
        if len(steps) == 1:  # which is no line
            drawn.append(figure.scatter("x", "y", source=models.ColumnDataSource(data), size=7, **style))
        if curve.marks:
            _mark(figure, models, curve, label)
    figure.add_tools(
        models.HoverTool(
            renderers=drawn, tooltips=[("run", "$name"), ("step", "@x"), ("value", "@y{0.[000000]}")], mode="vline"
        )
    )
    _tint(figure)
    legend = figure.legend[0]
    figure.add_layout(legend, "above")  # where it covers no curve
    legend.visible = len(runs) > 1
    return figure


def _mark(figure: Any, models: Any, curve: Curve, label: str) -> None:
    """Mark values that are not finite by a red cross at the height of the value before."""
    marks = curve.marks[: _MOST_MARKS // 2] + curve.marks[max(_MOST_MARKS // 2, len(curve.marks) - _MOST_MARKS // 2) :]
    heights: list[float] = []
    at = 0
    for step, _ in marks:
        while at < len(curve.steps) and curve.steps[at] < step:
            at += 1
        heights.append(curve.values[max(0, at - 1)] if curve.values else 0.0)
    data = {"x": [step for step, _ in marks], "y": heights, "text": [text for _, text in marks]}
    source = models.ColumnDataSource(data)
    crosses = figure.scatter("x", "y", source=source, marker="x", size=10, line_width=2.5, color=_RED, name=label)
    figure.add_tools(
        models.HoverTool(renderers=[crosses], tooltips=[("run", "$name"), ("step", "@x"), ("value", "@text")])
    )


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
            fix="Run `pip install 'accel[report]'`.",
        ) from error
