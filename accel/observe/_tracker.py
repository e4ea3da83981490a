# SPDX-License-Identifier: Apache-2.0
"""A tracker as a record of functions, and the records that it is handed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from accel.errors import ConfigError
from accel.observe._media import Artifact, Figure, Images, Table

Config = Mapping[str, Any]
Values = Mapping[str, float]
Ranks = Literal["main", "host", "every"]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A run, as the start of each tracker gets it.

    Attributes:
        project: name of the project.
        id: 32 lower-case hexadecimal digits, the same after each resume.
        name: its name for people.
        folder: folder of its files; None if it has none.
        step: last step of the checkpoint that the run goes on from; None for a new run.
        lines: calls of `log` at that step before the checkpoint.
        rank, world_size: position of this process among all ranks.
    """

    project: str
    id: str
    name: str
    folder: Path | None = None
    step: int | None = None
    lines: int = 0
    rank: int = 0
    world_size: int = 1

    def folder_for(self, tracker: str) -> Path:
        """Return the folder of the run's files.

        Raises:
            ConfigError: the run has none.
        """
        if self.folder is None:
            raise ConfigError(
                f"the tracker {tracker} writes files, and the run has no folder",
                where="tracking, dir=",
                fix="Pass dir=, such as the folder given to save_state.",
            )
        return self.folder


class Ending(msgspec.Struct, frozen=True):
    """The end of a run's process.

    Attributes:
        status: "failed" if the loop raised.
        error: class and text of what it raised.
    """

    status: Literal["finished", "failed"] = "finished"
    error: str = ""


class Tracker(msgspec.Struct, frozen=True):
    """A tracker: functions that a background thread calls one after the other, on each rank that writes.

    Attributes:
        name: its name, as `get_tracker` takes it.
        start: makes the live run from the run and its configuration; called at the first record.
        log: writes the numbers of a step, by name.
        finish: ends the live run.
        flush: makes everything written so far durable. A checkpoint waits for it; None if none does.
        log_images, log_table, log_figure, log_artifact: write these at a step; None for what the tracker does not take.
        first_step: lowest step of an earlier run in the place that `start` would write to; None for none.
        check: raises if the tracker cannot work here, before anything starts.
        ranks: processes that write: rank 0, the first rank of each host, or every rank.
    """

    name: str
    start: Callable[[Run, Config], Any]
    log: Callable[[Any, Values, int], object]
    finish: Callable[[Any, Ending], object]
    flush: Callable[[Any], object] | None = None
    log_images: Callable[[Any, Images, int], object] | None = None
    log_table: Callable[[Any, Table, int], object] | None = None
    log_figure: Callable[[Any, Figure, int], object] | None = None
    log_artifact: Callable[[Any, Artifact, int], object] | None = None
    first_step: Callable[[Run], int | None] | None = None
    check: Callable[[Run], object] | None = None
    ranks: Ranks = "main"
