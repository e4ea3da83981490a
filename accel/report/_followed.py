# SPDX-License-Identifier: Apache-2.0
"""A run's folder, read once or again and again: its state as one line, and rows of ranks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from accel.alerts import Alert, read_alerts
from accel.report._run_data import (
    AT,
    Curves,
    MachineSamples,
    MediaFolder,
    MetricCurve,
    RunData,
    StoredCheckpoint,
    why_closed,
)
from accel.report._run_state import RunState
from accel.report._series import charts_of, ranked_metrics
from accel.report._tables import rank_text, show_number
from accel.run_folder import METRICS, PROFILE, LaunchRecord, Position, decode_line, noted, read_new, read_records
from accel.terminal import show_clock, show_text, show_value


class FollowedRun:
    """A run that is followed; one look reads it once.

    Args:
        name: name of the run.
        folder: its folder, which need not exist yet.
        list_checkpoints: returns the checkpoints in a folder.
        read_profile: returns the profile in a folder as text; with it, `look` reads all that a page shows.

    Attributes:
        alerts: alerts of the run at the last look.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        list_checkpoints: Callable[[Path], Sequence[StoredCheckpoint]],
        read_profile: Callable[[Path], str] | None = None,
    ) -> None:
        self._name = name
        self._folder = folder
        self._list_checkpoints = list_checkpoints
        self._position = Position()
        self._curves = Curves()
        self.alerts: Sequence[Alert] = ()
        self._checkpoints: Sequence[StoredCheckpoint] = ()
        self._listed: int | None = None  # change of the folder at the last listing
        self._read_profile = read_profile
        self._profile = ""
        self._profiled: Stamps | None = None
        self._machine = MachineSamples()
        self._media = MediaFolder()
        self._was_folder = False  # a folder that is one, and not a link, stays so
        self._seen = RunData(name=name, folder=folder, curves=self._curves)

    def look(self) -> RunData:
        """Return the run as it is now. Of a file that was cut back, only the rest counts; of one that cannot be read,
        what it had before. A link in the place of a folder that was followed is not."""
        if self._folder.is_symlink():
            if self._was_folder:
                return replace(self._seen, problems=["the folder was replaced by a link, which is not followed"])
        elif self._folder.is_dir():
            self._was_folder = True
        if reason := why_closed(self._folder):
            return replace(self._seen, problems=[reason])
        self._seen = self._read()
        return self._seen

    def _read(self) -> RunData:
        problems: list[str] = []
        with noted(problems, METRICS):
            self._read_metrics()
        with noted(problems, "checkpoints"):
            self._look_at_checkpoints()
        records = read_records(self._folder)
        problems += records.problems
        alerts = read_alerts(self._folder, problems)
        began_s = 0.0 if records.run is None else records.run.started_s
        self.alerts = [each for each in alerts if each.time_s >= began_s]
        is_page = self._read_profile is not None
        clock = self._curves.time.get(AT, MetricCurve())
        return RunData(
            name=self._name,
            folder=self._folder,
            curves=self._curves,
            run=records.run,
            launches=records.launches,
            checkpoints=self._checkpoints,
            profile=self._look_at_profile(),
            machine=self._machine.look(self._folder, clock, problems) if is_page else {},
            alerts=alerts if is_page else (),
            media=self._media.look(self._folder, problems) if is_page else (),
            problems=problems,
        )

    def _read_metrics(self) -> None:
        while True:
            lines, self._position, restarted = read_new(self._folder / METRICS, self._position, within=self._folder)
            if restarted:
                self._curves = Curves()
            self._curves.add(map(decode_line, lines))
            if not lines:
                return

    def _look_at_checkpoints(self) -> None:
        changed = self._folder.stat().st_mtime_ns if self._folder.is_dir() else None
        if changed != self._listed:  # a checkpoint that commits or goes changes its folder's list of names
            self._listed = -1  # until they are listed
            self._checkpoints = () if changed is None else self._list_checkpoints(self._folder)
            self._listed = changed

    def stamps(self) -> Stamps:
        """Return what changes with any file that a look reads, without reading one."""
        inner = (self._folder / name for name in (PROFILE, "launches", "alerts"))
        return _stamps([self._folder, *inner])

    def _look_at_profile(self) -> str:
        if self._read_profile is not None and (now := _stamps([self._folder / PROFILE])) != self._profiled:
            self._profiled = now
            self._profile = self._read_profile(self._folder)
        return self._profile


Stamps = tuple[tuple[str, int, int], ...]  # name, change and size of files


def _stamps(folders: Sequence[Path]) -> Stamps:
    paths: list[str] = []
    for folder in folders:
        with suppress(OSError):  # not there yet
            paths += [each.path for each in os.scandir(folder)]
    found: list[tuple[str, int, int]] = []
    for path in sorted(paths):
        with suppress(OSError):  # it went, or is a link to nowhere
            state = os.stat(path)
            found.append((path, state.st_mtime_ns, state.st_size))
    return tuple(found)


_MOST_VALUES = 6
_LONGEST = 120  # characters of an error
_RATES = ("samples_per_s", "tokens_per_s", "mfu")  # readings of clocks in the line; all have a curve


def status_line(run: RunData, state: RunState, alerts: Sequence[Alert] = ()) -> str:
    """Return a run's state in one line: step, the metrics that matter, speed, ranks, newest checkpoint, alerts."""
    curves = run.curves
    if is_absent(run, state):
        return show_text(f"no run in {run.folder}" + "".join(f", {each}" for each in run.problems))
    parts = [] if curves.last_step is None else [f"step {curves.last_step}"]
    names = [name for name in ordered_names(run) if name in curves.values][:_MOST_VALUES]
    ends = {name: curves.values[name].last for name in names}
    parts += [f"{name} {show_number(end[1])}" for name, end in ends.items() if end is not None]
    parts += _speeds(run)
    counts = Counter(text.partition(":")[0] for *_, text in rank_rows(run.launches))
    counted = ", ".join(f"{count} {text}" for text, count in counts.items())
    parts += [f"ranks: {counted}"] if counted else []
    whole = [each.name for each in run.checkpoints if not each.problem]
    parts += [whole[-1]] if whole else []
    parts += [f"unreadable lines: {run.damaged}"] if run.damaged else []
    parts += map(_short, run.problems)
    parts += [f"alerts: {len(alerts)}, {_short(alert_text(alerts[-1]))}"] if alerts else []
    return show_text("  ".join([*parts, state.text + _message(run, state)]))


def _message(run: RunData, state: RunState) -> str:
    """Return the first line of the error that ended the newest launch."""
    attempts = run.launches[-1].attempts if run.launches and state.kind == "failed" else ()
    error = attempts[-1].error if attempts else None
    if error is None or not error.message or not state.text.endswith(error.exception):
        return ""
    return f": {_short(error.message.splitlines()[0])}"


def _short(line: str) -> str:
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"


def alert_text(alert: Alert) -> str:
    """Return an alert in one line, with its level and the number of equal ones."""
    return f"{alert.level}: {alert.line}" + (f" ({alert.count} times)" if alert.count > 1 else "")


def is_absent(run: RunData, state: RunState) -> bool:
    """Return whether a folder has no run."""
    return state.kind == "unknown" and run.curves.last_step is None and not run.checkpoints


def exit_status(run: RunData, state: RunState) -> int:
    """Return the exit status of `accel watch`: 0 finished or running, 1 failed, 2 unreadable, 3 no run."""
    if is_absent(run, state):
        return 2 if run.problems else 3
    return int(state.kind in ("failed", "stopped", "lost"))


def ordered_names(run: RunData) -> list[str]:
    """Return the names of the curves, those that matter first; readings of clocks without their "time/"."""
    charts = charts_of([run])
    saved = {name for each in run.checkpoints for name in each.metrics}
    matter = list(ranked_metrics(charts, tuple(saved)))
    clocks = [chart for chart in charts if chart.group == "time"]
    rest = [chart for chart in charts if chart not in matter and chart.group != "time"]
    order = [*matter, *(chart for chart in clocks if chart.kind == "curve"), *rest]
    order += [chart for chart in clocks if chart.kind != "curve"]
    return [chart.title.removeprefix("time/") if chart.group == "time" else chart.title for chart in order]


def _speeds(run: RunData) -> list[str]:
    """Return steps per second by the clock, and the run's own rates."""
    speed = run.curves.speed()
    rates = [] if speed is None else [f"{show_value(speed)} steps/s"]
    curves = run.curves.time
    ends = {name: curves[name].last for name in _RATES if name in curves}
    return rates + [f"{name} {end[1]:.4g}" for name, end in ends.items() if end is not None]


def rank_rows(launches: Sequence[LaunchRecord]) -> list[tuple[str, str, str, str]]:
    """Return a row for each rank of the newest launch, on all of its hosts: rank, host, time until its end, state."""
    if not launches:
        return []
    newest = launches[-1]
    together = [each for each in launches if each.ended_s is None or each.ended_s > newest.started_s]
    rows: dict[int, tuple[str, str, str, str]] = {}
    for launch in [*together, newest]:
        attempt = launch.attempts[-1] if launch.attempts else None
        for rank in attempt.ranks if attempt else ():
            after = "" if rank.ended_s is None or attempt is None else show_clock(rank.ended_s - attempt.started_s)
            rows[rank.rank] = (str(rank.rank), launch.host, after, rank_text(rank))
    return [rows[rank] for rank in sorted(rows)]
