# SPDX-License-Identifier: Apache-2.0
"""A run's folder, read again and again: new lines of metrics alone, records and checkpoints when they change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from accel.report._curves import Curves
from accel.report._run_data import RunData, StoredCheckpoint
from accel.run_folder import METRICS, Position, decode_line, read_launches, read_new, read_run


class FollowedRun:
    """A run that is followed.

    Args:
        name: name of the run.
        folder: its folder, which need not exist yet.
        list_checkpoints: returns the checkpoints in a folder.
    """

    def __init__(self, name: str, folder: Path, list_checkpoints: Callable[[Path], Sequence[StoredCheckpoint]]) -> None:
        self._name = name
        self._folder = folder
        self._list_checkpoints = list_checkpoints
        self._position = Position()
        self._curves = Curves()
        self._checkpoints: Sequence[StoredCheckpoint] = ()
        self._listed = 0  # change of the folder at the last listing

    def look(self) -> RunData:
        """Return the run as it is now. Of a file that was cut back, only what is left counts.

        Raises:
            OSError: a file exists, but cannot be read.
        """
        while True:
            lines, self._position, restarted = read_new(self._folder / METRICS, self._position)
            if restarted:
                self._curves = Curves()
            self._curves.add(map(decode_line, lines))
            if not lines:
                break
        changed = self._folder.stat().st_mtime_ns if self._folder.is_dir() else 0
        if changed != self._listed:  # a checkpoint that commits or goes changes its folder's list of names
            self._listed = changed
            self._checkpoints = self._list_checkpoints(self._folder) if changed else ()
        return RunData(
            name=self._name,
            folder=self._folder,
            curves=self._curves,
            run=read_run(self._folder),
            launches=read_launches(self._folder),
            checkpoints=self._checkpoints,
        )
