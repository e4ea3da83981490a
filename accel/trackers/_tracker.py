# SPDX-License-Identifier: Apache-2.0
"""A tracker as a record of functions, the run that it gets, and the end of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from accel.errors import ConfigError
from accel.errors._checks import check_choice
from accel.trackers._media import Media

Config = Mapping[str, Any]
Values = Mapping[str, float]
Ranks = Literal["main", "host", "every"]

_NEEDED = ("start", "log", "finish")
_PARAMETERS = {
    "start": "run, config",
    "log": "live, values, step",
    "finish": "live, ending",
    "flush": "live",
    "log_media": "live, record, step",
    "first_step": "run",
    "check": "run",
}


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A run, as the start of each tracker gets it.

    Attributes:
        project: name of the project.
        id: 32 lower-case hexadecimal digits, the same after each resume.
        name: its name for people.
        folder: folder of its files; None if it has none.
        step: last step of the checkpoint that the run resumes from; None for a new run.
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
        error: class and text of its exception.
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
        log_media: writes images, a table or another medium at a step; None if the tracker takes none.
        media: classes of the records that `log_media` takes.
        first_step: lowest step of an earlier run in the place that `start` would write to; None for none.
        check: raises if the tracker cannot work here, before anything starts.
        ranks: processes that write: rank 0, the first rank of each host, or every rank.

    Raises:
        ConfigError: when it is made: a name that is no printable text, no function where one belongs, or unknown ranks.
    """

    name: str
    start: Callable[[Run, Config], Any]
    log: Callable[[Any, Values, int], object]
    finish: Callable[[Any, Ending], object]
    flush: Callable[[Any], object] | None = None
    log_media: Callable[[Any, Any, int], object] | None = None
    media: tuple[type[Media], ...] = ()
    first_step: Callable[[Run], int | None] | None = None
    check: Callable[[Run], object] | None = None
    ranks: Ranks = "main"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or not self.name.isprintable():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                "the name is not valid", expected="printable text", got=repr(self.name), where="Tracker, name="
            )
        where = f"tracker {self.name}"
        for field, parameters in _PARAMETERS.items():
            value = getattr(self, field)
            if not callable(value) and (value is not None or field in _NEEDED):
                raise ConfigError(
                    "the value is not a function",
                    expected=f"{field}({parameters}){'' if field in _NEEDED else ', or None'}",
                    got=f"{type(value).__name__} {value!r:.40}",
                    where=f"{where}, {field}=",
                )
        if unknown := [each for each in self.media if each not in get_args(Media)]:
            raise ConfigError(
                "the kind of media is unknown",
                expected=", ".join(each.__name__ for each in get_args(Media)),
                got=repr(unknown[0]),
                where=f"{where}, media=",
            )
        check_choice(self.ranks, get_args(Ranks), "unknown ranks", where=f"{where}, ranks=")
