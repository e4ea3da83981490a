# SPDX-License-Identifier: Apache-2.0
"""Sections of a report on a run's launches: attempts, ranks, events, errors."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from accel.report._html import Html, element, table
from accel.report._run_data import RunData
from accel.report._tables import NONE, show_command, show_source, show_time
from accel.run_folder import Attempt, LaunchRecord, RankError, RankState
from accel.terminal import show_clock


def launch_sections(run: RunData, *, several: bool) -> Iterator[Html]:
    """Yield the sections of a run's launches, the newest first.

    Args:
        run: the run.
        several: whether the page has several runs, so that titles name them.
    """
    if not run.launches:
        return
    yield element("h2", f"Launches of {run.name}" if several else "Launches")
    for at, launch in reversed(list(enumerate(run.launches, 1))):
        title = f"Launch {at} of {len(run.launches)}, {show_time(launch.started_s)} on {launch.host}"
        is_newest = at == len(run.launches)
        body = [*_facts(launch), *_attempts(launch), *_events(launch)]
        opened = {"open": ""} if is_newest else {}
        yield element("details", element("summary", title), *body, **opened)


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


def _facts(launch: LaunchRecord) -> Iterator[Html]:
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
    yield table(["", ""], rows)


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
    told = error.exception or status_text(error.status)
    first = f"Rank {error.rank} failed first: {told}"
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
