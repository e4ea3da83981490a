# SPDX-License-Identifier: Apache-2.0
"""The record of a run: identity, configuration and code. It outlives the launches that the run goes through."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from accel.run_folder._json_files import read_json
from accel.run_folder._launch_record import Setting
from accel.run_folder._names import RUN
from accel.run_folder._source_state import SourceState


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A run.

    Attributes:
        format: version of this record.
        id: identity of the run, the same after each resume.
        project: project of the run.
        name: its name for people; empty for none.
        started_s: time of the first start, in seconds since the epoch.
        resumed_s: times at which the run went on.
        world_size: number of ranks at the last start.
        config: its configuration, without credentials.
        hidden: dotted names of the configuration's values that were credentials.
        settings: settings of the context with their sources.
        versions: versions of Python and packages at the last start.
        source: state of the script's git repository at the last start; None if there is none.
        status: state of the run as the training loop left it.
        error: error of the loop; empty without one.
        ended_s: time of the end; None while it runs, or if the process was killed.
    """

    format: int = 1
    id: str
    project: str
    started_s: float
    name: str = ""
    resumed_s: tuple[float, ...] = ()
    world_size: int = 1
    config: dict[str, Any] = {}
    hidden: tuple[str, ...] = ()
    settings: dict[str, Setting] = {}
    versions: dict[str, str] = {}
    source: SourceState | None = None
    status: Literal["running", "finished", "failed"] = "running"
    error: str = ""
    ended_s: float | None = None


def read_run(folder: Path) -> RunRecord | None:
    """Return the record of a run; None if the folder has none."""
    return read_json(folder / RUN, RunRecord)
