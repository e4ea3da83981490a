# SPDX-License-Identifier: Apache-2.0
"""All that the files of a run's folder say, read once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from accel.report._curves import Curves
from accel.run_folder import METRICS, LaunchRecord, Position, RunRecord, decode_line, read_launches, read_new, read_run


class StoredCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint of a run.

    Attributes:
        name: name of its folder.
        size: its bytes.
        changed_s: time of its last write, in seconds since the epoch.
        metrics: metrics that were saved with it.
        problem: reason why it is none; empty for a whole one.
    """

    name: str
    size: int
    changed_s: float
    metrics: dict[str, float] = {}
    problem: str = ""


class RunData(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The files of a run's folder.

    Attributes:
        name: name of the run among those that are shown together.
        folder: the folder.
        curves: curves of its metrics.
        run: its record; None if it has none.
        launches: its launches in order of their start.
        checkpoints: its checkpoints in order of their steps.
        profile: its profile as `accel profile` prints it; empty for none.
    """

    name: str
    folder: Path
    curves: Curves
    run: RunRecord | None = None
    launches: Sequence[LaunchRecord] = ()
    checkpoints: Sequence[StoredCheckpoint] = ()
    profile: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether the folder has no file of a run."""
        return self.curves.last_step is None and not (self.run or self.launches or self.checkpoints or self.profile)


def read_data(name: str, folder: Path, checkpoints: Sequence[StoredCheckpoint] = (), profile: str = "") -> RunData:
    """Read a run's folder.

    Args:
        name: name of the run among those that are shown together.
        folder: the folder.
        checkpoints: checkpoints in it.
        profile: its profile as text.

    Raises:
        OSError: a file exists, but cannot be read.
    """
    curves = Curves()
    position = Position()
    while (new := read_new(folder / METRICS, position)).lines:
        if new.restarted:  # it was cut back between two reads
            curves = Curves()
        curves.add(map(decode_line, new.lines))
        position = new.position
    return RunData(
        name=name,
        folder=folder,
        curves=curves,
        run=read_run(folder),
        launches=read_launches(folder),
        checkpoints=checkpoints,
        profile=profile,
    )


def name_runs(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the folders' paths that differ; equal paths get a number."""
    parts = [folder.resolve().parts for folder in folders]
    length = 1
    names = ["/".join(each[-length:]) for each in parts]
    while len(set(names)) < len(set(parts)):
        length += 1
        names = ["/".join(each[-length:]).removeprefix("//") for each in parts]
    seen: dict[str, int] = {}
    for at, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        names[at] = name if seen[name] == 1 else f"{name} ({seen[name]})"
    return names
