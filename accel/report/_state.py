# SPDX-License-Identifier: Apache-2.0
"""The state of a run, from the records of its launches and its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from accel.run_folder import LaunchRecord, RunRecord


class RunState(msgspec.Struct, frozen=True):
    """The state of a run.

    Attributes:
        kind: state in one word.
        text: the same for people, with the reason.
        started_s: time of the first start, in seconds since the epoch; None if no record has it.
        ended_s: time of the end; None while it runs, or if no record has it.
    """

    kind: Literal["running", "finished", "failed", "stopped", "lost", "unknown"]
    text: str
    started_s: float | None = None
    ended_s: float | None = None


def is_alive(launch: LaunchRecord) -> bool:
    """Return whether a launcher that has not ended may still run: on another host nobody can tell."""
    if launch.host != socket.gethostname():
        return True
    try:
        os.kill(launch.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def state_of(
    run: RunRecord | None, launches: Sequence[LaunchRecord], alive: Callable[[LaunchRecord], bool] = is_alive
) -> RunState:
    """Return the state of a run: that of its newest launch, or else of its own record.

    Args:
        run: record of the run; None if it has none.
        launches: its launches in order of their start.
        alive: returns whether a launch that has no end still runs.
    """
    starts = [each.started_s for each in launches] + ([run.started_s] if run else [])
    started_s = min(starts, default=None)
    if launches and (run is None or max((run.started_s, *run.resumed_s)) <= _end(launches[-1])):
        launch = launches[-1]
        if launch.ended_s is not None:
            kind, text = _ended(launch)
            return RunState(kind, text, started_s, launch.ended_s)
        if alive(launch):
            return RunState("running", "running", started_s)
        return RunState("lost", "the launcher ended without a word, as after SIGKILL or a loss of power", started_s)
    if run is not None:
        text = f"failed: {run.error}" if run.status == "failed" and run.error else run.status
        return RunState(run.status, text, started_s, run.ended_s)
    return RunState("unknown", "no record of a launch", started_s)


def _end(launch: LaunchRecord) -> float:
    return float("inf") if launch.ended_s is None else launch.ended_s


def _ended(launch: LaunchRecord) -> tuple[Literal["finished", "failed", "stopped"], str]:
    if launch.stopped:
        return "stopped", f"stopped by {launch.stopped}"
    if launch.status == 0:
        return "finished", "finished"
    error = launch.attempts[-1].error if launch.attempts else None
    if error is None:
        return "failed", f"failed with status {launch.status}"
    told = error.exception or (f"signal {-error.status}" if error.status < 0 else f"status {error.status}")
    return "failed", f"rank {error.rank} failed: {told}"
