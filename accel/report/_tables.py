# SPDX-License-Identifier: Apache-2.0
"""Escaped markup, tables of runs side by side, and sections on a run's launches."""

from __future__ import annotations

import html
import os
import re
import shlex
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import msgspec

from accel.report._run_data import AT, RunData
from accel.report._run_state import RunState
from accel.run_folder import Attempt, LaunchRecord, RankError, RankState, Setting, SourceState
from accel.terminal import show_clock, show_size, show_value

_ALONE = ("br", "input", "meta")
# controls, turns of the direction of writing, halves of characters
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Html(str):
    """Markup, which needs no escape."""

    __slots__ = ()


def element(tag: str, *content: str | None, **attributes: str) -> Html:
    """Return an element of markup, or of texts to escape; a trailing "_" of an attribute is dropped, other "_" become
    "-"."""
    shown = "".join(
        f' {name.removesuffix("_").replace("_", "-")}="{html.escape(value)}"' for name, value in attributes.items()
    )
    return Html(f"<{tag}{shown}>" if tag in _ALONE else f"<{tag}{shown}>{join(content)}</{tag}>")


def join(content: Iterable[str | None]) -> Html:
    """Return pieces of markup and texts as one piece of markup."""
    given = (each for each in content if each is not None)
    return Html("".join(each if isinstance(each, Html) else html.escape(seen_text(each)) for each in given))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, marked: Iterable[int] = ()) -> Html:
    """Return a table that scrolls sideways where it is too wide; the first cell of each row is its title, `marked` rows
    are shown so."""
    emphasized = set(marked)
    lines = [
        element(
            "tr",
            element("th", cells[0], scope="row"),
            *(element("td", cell) for cell in cells[1:]),
            **({"class_": "differs"} if at in emphasized else {}),
        )
        for at, cells in enumerate(rows)
    ]
    titles = element("tr", *(element("th", title, scope="col") for title in head))
    body = element("table", element("thead", titles), element("tbody", *lines))
    return element("div", body, class_="wide", tabindex="0")


def folded(title: str, *content: str | None, note: str = "", is_open: bool = False, **attributes: str) -> Html:
    """Return a section that unfolds, with a note in parentheses behind its title."""
    opened = {"open": ""} if is_open else {}
    summary = element("summary", title, element("span", f" ({note})") if note else None)
    return element("details", summary, *content, **attributes, **opened)


def seen_text(text: str) -> str:
    """Return a text without characters that a page would hide or obey."""
    return _UNSEEN.sub("\N{REPLACEMENT CHARACTER}", text)


NONE = "–"  # noqa: RUF001 - a dash for a cell without a value
Rows = list[tuple[str, ...]]


def show_time(time_s: float | None) -> str:
    """Return a time of the day in UTC."""
    return NONE if time_s is None else datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def show_number(value: float) -> str:
    """Return a number in few digits; integers in full."""
    return str(int(value)) if value == value and abs(value) < 1e15 and value == int(value) else f"{value:.6g}"


def overview(runs: Sequence[RunData], states: Sequence[RunState]) -> Rows:
    """Return facts of runs: a row for each fact, a column for each run. Rows without any value are left out."""
    columns = [_facts(run, state) for run, state in zip(runs, states, strict=True)]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [(name, *(column.get(name, NONE) for column in columns)) for name in names]
    return [row for row in rows if any(cell != NONE for cell in row[1:])]


def last_values(runs: Sequence[RunData]) -> Rows:
    """Return the last value of each metric of each run, with its step."""
    names = dict.fromkeys(name for run in runs for name in run.curves.values)
    return [(name, *(_last(run, name) for run in runs)) for name in names]


def configurations(runs: Sequence[RunData]) -> Rows:
    """Return values of the runs' configurations, a row for each dotted name."""
    flat = [dict(flatten(run.run.config)) if run.run else {} for run in runs]
    return _side_by_side(flat)


def settings(runs: Sequence[RunData]) -> Rows:
    """Return the settings of the runs: from their contexts, and from the newest launches with their sources."""
    found: list[dict[str, str]] = []
    for run in runs:
        launched, settled = settings_of(run)
        values = {name: each.value for name, each in launched.items()}
        changed = {name: each for name, each in settled.items() if each.value != values.get(name)}
        known = {**launched, **changed}  # a launch's "auto" is settled by the script or the machine
        found.append({name: _setting(setting) for name, setting in known.items()})
    return _side_by_side(found)


def settings_of(run: RunData) -> tuple[dict[str, Setting], dict[str, Setting]]:
    """Return the settings of a run's newest launch, and the settings of its contexts."""
    launched = run.launches[-1].settings if run.launches else {}
    settled = run.run.settings if run.run else {}
    return _plain(launched), _plain(settled)


def _plain(found: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return settings as their flags take them; records of older versions have Python's `True` and `False`."""
    return {
        name: Setting(each.value.lower(), each.source) if each.value in ("True", "False") else each
        for name, each in found.items()
    }


def versions(runs: Sequence[RunData]) -> Rows:
    """Return versions of Python and packages."""
    return _side_by_side([versions_of(run) for run in runs])


def differing(rows: Rows) -> list[int]:
    """Return the numbers of rows with cells that differ."""
    return [at for at, row in enumerate(rows) if len(set(row[1:])) > 1]


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted names of nested values and their texts."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from flatten(cast("dict[str, Any]", value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else msgspec.json.encode(value).decode()


def show_source(source: SourceState | None) -> str:
    """Return commit and cleanness in one line."""
    if source is None:
        return NONE
    commit = source.commit[:12] or "no commit"
    branch = f" on {source.branch}" if source.branch else ""
    changes = "clean" if source.clean else f"{source.changed} changed file{'s' * (source.changed > 1)}"
    return f"{commit}{branch}, {changes}" + (f", {source.untracked} untracked" if source.untracked else "")


def show_command(launch: LaunchRecord) -> str:
    """Return the script and its arguments as a shell takes them."""
    return shlex.join(
        [
            os.path.relpath(word, launch.folder) if os.path.isabs(word) and not at else word
            for at, word in enumerate(launch.command)
        ]
    )


def ranks_of(run: RunData) -> int | None:
    """Return the number of ranks of a run; None if no record has it."""
    if run.run is not None:
        return run.run.world_size
    if not run.launches or not run.launches[-1].attempts:
        return None
    attempt = run.launches[-1].attempts[-1]
    return len(attempt.ranks) * max(1, len(attempt.hosts))


def _facts(run: RunData, state: RunState) -> dict[str, str]:
    launch = run.launches[-1] if run.launches else None
    ranks = ranks_of(run)
    seconds = duration_of(run, state)
    speed = run.curves.speed()
    whole = [each for each in run.checkpoints if not each.problem]
    return {
        "state": state.text,
        "project": run.run.project if run.run else NONE,
        "run": (run.run.name or run.run.id) if run.run else NONE,
        "started": show_time(state.started_s),
        "duration": NONE if seconds is None else show_clock(seconds),
        "last step": NONE if run.curves.last_step is None else str(run.curves.last_step),
        "steps/s at the end": NONE if speed is None else show_value(speed),
        "ranks": NONE if ranks is None else str(ranks),
        "launches": str(len(run.launches)) if run.launches else NONE,
        "restarts": str(sum(each.restarts for each in run.launches)) if run.launches else NONE,
        "checkpoints": f"{len(whole)}, {show_size(sum(each.size for each in whole))}" if whole else NONE,
        "code": show_source(run.source) if run.source or not run.run or not run.run.code else run.run.code,
        "command": show_command(launch) if launch else NONE,
        "host": ", ".join(dict.fromkeys(each.host for each in run.launches)) or NONE,
        "folder": str(run.folder),
        "lost records": (run.run.lost if run.run else "") or NONE,
        "unreadable lines": str(run.damaged) if run.damaged else NONE,
    }


def duration_of(run: RunData, state: RunState) -> float | None:
    """Return the seconds from the first start of a run to its end, or to its last line."""
    clock = run.curves.time.get(AT)
    readings = clock.values if clock else []
    end_s = state.ended_s or (readings[-1] if readings else None)
    start_s = state.started_s or (readings[0] if readings else None)
    return max(0.0, end_s - start_s) if end_s and start_s else None


def versions_of(run: RunData) -> dict[str, str]:
    """Return versions of Python and packages of a run's latest launch."""
    found = run.run.versions if run.run else {}
    return {**found, **(run.launches[-1].versions if run.launches else {})}


def _last(run: RunData, name: str) -> str:
    curve = run.curves.values.get(name)
    end = curve.last if curve else None
    return NONE if end is None else f"{show_number(end[1]) if end[1] - end[1] == 0 else end[1]} at step {end[0]}"


def _setting(setting: Setting) -> str:
    return f"{setting.value or 'empty'} ({setting.source})" if setting.source else setting.value


def _side_by_side(columns: Sequence[Mapping[str, str]]) -> Rows:
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, *(column.get(name, NONE) for column in columns)) for name in names]


def launch_sections(run: RunData, *, several: bool) -> Iterator[Html]:
    """Yield the sections of a run's launches, the newest first, titled by the run on a page of several."""
    if not run.launches:
        return
    yield element("h2", f"Launches of {run.name}" if several else "Launches")
    for at, launch in reversed(list(enumerate(run.launches, 1))):
        title = f"Launch {at} of {len(run.launches)}, {show_time(launch.started_s)} on {launch.host}"
        body = [*_launch_facts(launch), *_attempts(launch), *_events(launch)]
        yield folded(title, *body, is_open=at == len(run.launches) and not several)


def rank_text(state: RankState) -> str:
    """Return the state of a rank in words."""
    if state.status is None:
        return "running"
    if state.text:
        return state.text
    return "finished" if state.status == 0 else f"ended with {status_text(state.status)}"


def status_text(status: int) -> str:
    """Return an exit status, or the name of the signal that killed."""
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:  # real-time signals have numbers only
        return f"signal {-status}"


def _launch_facts(launch: LaunchRecord) -> Iterator[Html]:
    ended = NONE if launch.ended_s is None else f"{show_time(launch.ended_s)}, status {launch.status}"
    rows = [
        ("command", show_command(launch)),
        ("folder", launch.folder),
        ("code", show_source(launch.source)),
        ("ended", ended + (f", stopped by {launch.stopped}" if launch.stopped else "")),
        ("restarts", str(launch.restarts)),
        ("newest checkpoint", launch.checkpoint or NONE),
        ("output of each rank", launch.log_dir or NONE),
    ]
    yield table(["", ""], [row for row in rows if row[1] != NONE])


def _attempts(launch: LaunchRecord) -> Iterator[Html]:
    for at, attempt in enumerate(launch.attempts, launch.restarts + 2 - len(launch.attempts)):
        if len(launch.attempts) > 1:
            yield element("h4", f"Attempt {at}, {show_time(attempt.started_s)}")
        yield table(["rank", "end", "after"], [_rank(attempt, rank) for rank in attempt.ranks])
        if attempt.error is not None:
            yield _error(attempt.error)


def _rank(attempt: Attempt, rank: RankState) -> tuple[str, str, str]:
    after = NONE if rank.ended_s is None else show_clock(rank.ended_s - attempt.started_s)
    return str(rank.rank), rank_text(rank), after


def _error(error: RankError) -> Html:
    cause = error.exception or status_text(error.status)
    first = f"Rank {error.rank} failed first: {cause}"
    shown = error.traceback or error.message
    return element(
        "div",
        element("strong", first),
        element("div", "at ", element("code", error.location)) if error.location else None,
        element("pre", shown) if shown else None,
        class_="alert",
    )


def _events(launch: LaunchRecord) -> Iterator[Html]:
    rows = [
        (show_time(event.time_s), event.kind, element("pre", event.text) if "\n" in event.text else event.text)
        for event in launch.events
    ]
    if rows:
        yield element("h4", "Events")
        yield table(["time", "kind", "report"], rows)
