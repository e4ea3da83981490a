# SPDX-License-Identifier: Apache-2.0
"""State of a run: from its records, and from the processes that they name."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from accel.run_folder import LaunchRecord, RunRecord
from accel.terminal import show_age


class RunState(msgspec.Struct, frozen=True):
    """The state of a run."""

    kind: Literal["running", "finished", "failed", "stopped", "lost", "unknown"]  # state in one word
    text: str  # the same for people, with the reason
    started_s: float | None = None  # time of the first start, in seconds since the epoch; None if no record has it
    ended_s: float | None = None  # time of the end; None while it runs, or if no record has it


def is_alive(record: LaunchRecord | RunRecord) -> bool:
    """Return whether a launcher, or rank 0, that has not ended may still run: on another host that is unknown.

    A process that has ended and waits for its parent, and a later one with the same number, are not alive.
    """
    if not _is_here(record):
        return True
    try:
        os.kill(record.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's process
    resumed = record.resumed_s if isinstance(record, RunRecord) else ()
    return not _is_other(record.pid, max((record.started_s, *resumed)))


def _is_here(record: LaunchRecord | RunRecord) -> bool:
    return record.host == socket.gethostname() and record.pid > 0


def _is_other(pid: int, written_s: float) -> bool:
    """Whether a process has ended, or began after a record of its number was written; False where Linux is not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError):
        return False
    age_s = uptime_s - int(fields[_TICKS]) / os.sysconf("SC_CLK_TCK")
    return fields[0] in ("Z", "X") or time.time() - age_s > written_s + _SLACK_S


_TICKS = 19  # place of the start in ticks since the boot, behind the name
_SLACK_S = 5.0  # between two clocks
_SILENT_S = 1800.0  # without a written file; the process of another host cannot be asked


def state_of(
    run: RunRecord | None,
    launches: Sequence[LaunchRecord],
    alive: Callable[[LaunchRecord | RunRecord], bool] = is_alive,
    folder: Path | None = None,
) -> RunState:
    """Return the state of a run: the state of its newest launch, or else of its record.

    Args:
        run: record of the run.
        launches: records of its launches, in order of time.
        alive: returns whether the process of a record still runs.
        folder: folder of the run. A run on another host that writes nothing there for half an hour is not running.
    """
    found = _of_records(run, launches, alive)
    record = launches[-1] if launches else run
    if found.kind != "running" or folder is None or record is None or _is_here(record):
        return found
    if time.time() - _written_s(folder) < _SILENT_S:
        return found
    text = f"unknown: nothing written for {show_age(_SILENT_S)}, and {record.host or 'its host'} cannot be asked"
    return RunState("unknown", text, found.started_s)


def _written_s(folder: Path) -> float:
    """Return the newest change of a file in a run's folder and in those right below it; now for an unreadable one."""
    try:
        inside = [folder, *(each for each in folder.iterdir() if not each.is_symlink())]
        below = [each for place in inside[1:] if place.is_dir() for each in place.iterdir()]
        return max(each.lstat().st_mtime for each in (*inside, *below))
    except OSError:
        return time.time()


def _of_records(
    run: RunRecord | None, launches: Sequence[LaunchRecord], alive: Callable[[LaunchRecord | RunRecord], bool]
) -> RunState:
    starts = [each.started_s for each in launches] + ([run.started_s] if run else [])
    started_s = min(starts, default=None)
    launch = launches[-1] if launches else None
    began_s = max((run.started_s, *run.resumed_s)) if run is not None else 0.0
    if launch is not None and (launch.ended_s is None or began_s <= launch.ended_s):
        if launch.ended_s is not None:
            kind, text = _ended(launch)
            return RunState(kind, text, started_s, launch.ended_s)
        if alive(launch):
            return RunState("running", "running", started_s)
        return RunState("lost", "the launcher ended without a record, as after SIGKILL or a loss of power", started_s)
    if run is not None and run.status == "running" and not alive(run):
        return RunState("lost", "rank 0 ended without a record, as after SIGKILL or a loss of power", started_s)
    if run is not None:
        text = f"failed: {run.error}" if run.status == "failed" and run.error else run.status
        return RunState(run.status, text, started_s, run.ended_s)
    return RunState("unknown", "state unknown", started_s)


def _ended(launch: LaunchRecord) -> tuple[Literal["finished", "failed", "stopped"], str]:
    if launch.stopped:
        return "stopped", f"stopped by {launch.stopped}"
    if launch.status == 0:
        return "finished", "finished"
    error = launch.attempts[-1].error if launch.attempts else None
    if error is None:
        return "failed", f"failed with status {launch.status}"
    cause = error.exception or (f"signal {-error.status}" if error.status < 0 else f"status {error.status}")
    return "failed", f"rank {error.rank} failed: {cause}"
