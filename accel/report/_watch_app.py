# SPDX-License-Identifier: Apache-2.0
"""The terminal program that follows a run, by textual and plotext: curves, ranks, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Grid, Horizontal
from textual.widgets import DataTable, Footer, Header, Static
from textual_plotext import PlotextPlot

from accel.report._followed import FollowedRun, alert_text, ordered_names, rank_rows, status_line
from accel.report._run_data import AT, MetricCurve, RunData, thin
from accel.report._run_state import RunState, state_of
from accel.terminal import show_age, show_size, show_text, show_value

_MOST_PLOTS = 12  # on the screen
_WIDTH, _HEIGHT = 48, 9  # of a curve at least
_MOST_ALERTS = 3
_MOST_ERROR = 1_000  # characters
_POINTS = 400  # of a curve: a terminal has no more columns
_MOST_CHECKPOINTS = 50


class WatchApp(App[None]):
    """Follows a run until it is left.

    Args:
        followed: the run.
        every_s: seconds between two looks at its files.
        now_s: returns the time, in seconds since the epoch.
    """

    CSS = """
    #status { height: auto; padding: 0 1; background: $panel; }
    #notes { height: auto; max-height: 30%; padding: 0 1; color: $error; }
    #curves { grid-size: 2; height: 1fr; min-height: 9; }
    #tables { height: auto; max-height: 40%; }
    PlotextPlot { height: 100%; }
    DataTable { width: 1fr; height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "Quit"),
        ("space", "hold", "Hold"),
        ("n", "turn(1)", "Next curves"),
        ("p", "turn(-1)", "Previous curves"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, followed: FollowedRun, *, every_s: float, now_s: Any) -> None:
        super().__init__()
        self._followed = followed
        self._every_s = every_s
        self._now_s = now_s
        self._page = 0
        self._shown: RunData | None = None
        self.holds = False
        self.curve_names: list[str] = []

    def compose(self) -> ComposeResult:
        """Yield the parts of the screen."""
        yield Header(show_clock=True)
        yield Static(id="status")
        yield Static(id="notes")
        with Grid(id="curves"):
            for at in range(_MOST_PLOTS):
                yield PlotextPlot(id=f"curve-{at}")
        with Horizontal(id="tables"):
            yield DataTable[Text](id="ranks", cursor_type="none")
            yield DataTable[Text](id="checkpoints", cursor_type="none")
        yield Footer()

    def on_mount(self) -> None:
        """Begin to follow."""
        _ = self._table("ranks").add_columns("rank", "host", "after", "state")
        _ = self._table("checkpoints").add_columns("checkpoint", "size", "age", "metrics")
        self.refresh_run()
        _ = self.set_interval(self._every_s, self.refresh_run)

    def on_resize(self) -> None:
        """Fill the screen with as many curves as it has room for."""
        _ = self.call_after_refresh(self._fill_room)

    def action_hold(self) -> None:
        """Stop following, or continue."""
        self.holds = not self.holds
        self.refresh_run()

    def action_turn(self, pages: int) -> None:
        """Show other curves."""
        self._page += pages
        self.refresh_run()

    def refresh_run(self) -> None:
        """Read new lines, and show them."""
        if self.holds:
            self.sub_title = "held"
            return
        run = self._followed.look()
        state = state_of(run.run, run.launches, folder=run.folder)
        self.title = show_text(run.name)
        self.sub_title = show_text(state.text)
        self.query_one("#status", Static).update(Text(status_line(run, state)))
        self._show_notes(run, state)
        self._shown = run
        self._show_curves(run)
        self._fill("ranks", rank_rows(run.launches))
        self._fill("checkpoints", self._checkpoint_rows(run))
        _ = self.call_after_refresh(self._fill_room)  # tables and notes have taken theirs

    def _show_notes(self, run: RunData, state: RunState) -> None:
        """Show the whole error, wrapped, files that cannot be read, and the newest alerts."""
        attempts = run.launches[-1].attempts if run.launches and state.kind == "failed" else ()
        error = attempts[-1].error if attempts else None
        texts = [f"{error.exception}: {error.message[:_MOST_ERROR]}"] if error is not None and error.message else []
        texts += run.problems
        texts += [alert_text(each) for each in self._followed.alerts[-_MOST_ALERTS:]]
        notes = self.query_one("#notes", Static)
        notes.display = bool(texts)
        notes.update(Text("\n".join(show_text(line) for text in texts for line in text.splitlines())))

    def _fill_room(self) -> None:
        if self._shown is not None:
            self._show_curves(self._shown)

    def _show_curves(self, run: RunData) -> None:
        curves = {**{name: each for name, each in run.curves.time.items() if name != AT}, **run.curves.values}
        self.curve_names = [name for name in dict.fromkeys(ordered_names(run)) if name in curves]
        grid = self.query_one("#curves", Grid)
        columns = max(1, min(4, grid.size.width // _WIDTH))
        shown = min(_MOST_PLOTS, columns * max(1, grid.size.height // _HEIGHT))
        pages = max(1, -(-len(curves) // shown))
        self._page %= pages
        names = self.curve_names[self._page * shown : (self._page + 1) * shown]
        grid.styles.grid_size_columns = max(1, min(columns, len(names)))
        for at in range(_MOST_PLOTS):
            plot = self.query_one(f"#curve-{at}", PlotextPlot)
            plot.display = at < len(names)
            if at < len(names):
                _draw(plot, names[at], curves[names[at]])

    def _checkpoint_rows(self, run: RunData) -> list[tuple[str, ...]]:
        newest = list(run.checkpoints)[-_MOST_CHECKPOINTS:][::-1]
        return [
            (
                each.name,
                show_size(each.size),
                show_age(self._now_s() - each.changed_s),
                each.problem or "  ".join(f"{name} {value:g}" for name, value in each.metrics.items()),
            )
            for each in newest
        ]

    def _fill(self, name: str, rows: Sequence[Sequence[str]]) -> None:
        table = self._table(name)
        at = table.scroll_y
        _ = table.clear()
        for row in rows:
            _ = table.add_row(*(Text(show_text(cell)) for cell in row))
        table.scroll_to(y=at, animate=False)

    def _table(self, name: str) -> DataTable[Text]:
        found: DataTable[Text] = self.query_one(f"#{name}", DataTable)  # pyright: ignore[reportUnknownVariableType]
        return found


def open_app(followed: FollowedRun, *, every_s: float, now_s: Any) -> None:
    """Follow a run in this terminal until it is left."""
    WatchApp(followed, every_s=every_s, now_s=now_s).run()


def _draw(plot: PlotextPlot, name: str, curve: MetricCurve) -> None:
    plt: Any = plot.plt
    plt.clear_data()
    steps, values = thin(curve.steps, curve.values, _POINTS)
    bad = f", {len(curve.marks)} not finite" if curve.marks else ""
    plt.title(show_text(name) + bad)
    if steps:
        plt.plot(steps, values, marker="braille")
        first, last = steps[0], steps[-1]
        marked = sorted({round(first + (last - first) * part / 4) for part in range(5)})
        plt.xticks(marked, [show_value(step) for step in marked])  # steps are whole, 200k is short
    plot.refresh()
