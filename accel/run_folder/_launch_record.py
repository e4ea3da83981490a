# SPDX-License-Identifier: Apache-2.0
"""The record of a launch on one host: settings and code, attempts, events, and the error that ended it."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from accel.run_folder._json_files import read_json
from accel.run_folder._names import LAUNCHES
from accel.run_folder._source_state import SourceState

EventKind = Literal["start", "restart", "hosts", "stop", "notice", "hang", "end"]


class Setting(msgspec.Struct, frozen=True):
    """A setting.

    Attributes:
        value: its value, as its flag takes it.
        source: the flag, variable, file or default that set it.
    """

    value: str
    source: str


class LaunchEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a launch.

    Attributes:
        time_s: its time, in seconds since the epoch.
        kind: start or restart of all ranks; hosts that came or went; a request to stop, or another signal; a report of
            silent ranks; the end.
        text: its report.
    """

    time_s: float
    kind: EventKind
    text: str = ""


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of an attempt.

    Attributes:
        rank: its rank.
        status: exit status, or minus the number of the signal that killed it; None while it runs.
        ended_s: time at which its end was noticed, in seconds since the epoch; None while it runs.
        text: its error in one line; empty for none.
    """

    rank: int
    status: int | None = None
    ended_s: float | None = None
    text: str = ""


class RankError(msgspec.Struct, frozen=True, kw_only=True):
    """The error of the rank that failed first.

    Attributes:
        rank: its rank.
        status: exit status, or minus the number of the signal that killed it.
        exception: the exception's class; empty if the process left no record.
        message: the exception's text.
        location: `file:line` of the innermost frame of the user's code.
        traceback: its traceback, or the dump of a crash.
    """

    rank: int
    status: int
    exception: str = ""
    message: str = ""
    location: str = ""
    traceback: str = ""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One start of all ranks of a host.

    Attributes:
        started_s: time of the start, in seconds since the epoch.
        hosts: hosts of the launch, in order of their ranks; empty if there is one.
        ranks: ranks of this host.
        ended_s: time of the end; None while it runs.
        error: the error that ended it; None without one.
    """

    started_s: float
    ranks: tuple[RankState, ...]
    hosts: tuple[str, ...] = ()
    ended_s: float | None = None
    error: RankError | None = None


class LaunchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A launch on one host.

    Attributes:
        format: version of this record.
        host: name of the host.
        pid: process of the launcher.
        command: the script and its arguments, without credentials.
        folder: working directory.
        started_s: time of the start, in seconds since the epoch.
        settings: each setting with its source.
        versions: versions of Python and packages.
        source: state of the script's git repository; None if there is none.
        attempts: starts of all ranks, the current one last; of many, the newest 100.
        events: events in order of time; of many, the first 250 and the newest 250.
        log_dir: folder of the ranks' output; empty for none.
        restarts: number of times that all ranks have started again after a failure.
        checkpoint: newest checkpoint that a rank wrote or resumed from; empty for none.
        ended_s: time of the end; None while it runs, or if the launcher was killed.
        status: exit status of the launch; None while it runs.
        stopped: name of the signal that stopped it; empty for none.
    """

    format: int = 1
    host: str
    pid: int
    command: tuple[str, ...]
    folder: str
    started_s: float
    settings: dict[str, Setting] = {}
    versions: dict[str, str] = {}
    source: SourceState | None = None
    attempts: tuple[Attempt, ...] = ()
    events: tuple[LaunchEvent, ...] = ()
    log_dir: str = ""
    restarts: int = 0
    checkpoint: str = ""
    ended_s: float | None = None
    status: int | None = None
    stopped: str = ""


def launch_file(host: str, pid: int, started_s: float) -> str:
    """Return the name of a launch's file inside a run's folder; no two launches share one."""
    began = datetime.fromtimestamp(started_s, UTC).strftime("%Y%m%dT%H%M%S")
    return f"{LAUNCHES}/{began}-{re.sub(r'[^0-9A-Za-z.-]', '_', host)}-{pid}.json"


def read_launches(folder: Path) -> list[LaunchRecord]:
    """Return the records of the launches of a run in order of their start; files of other kinds are left out."""
    found = [read_json(path, LaunchRecord) for path in (folder / LAUNCHES).glob("*.json")]
    return sorted((each for each in found if each is not None), key=lambda each: (each.started_s, each.host))
