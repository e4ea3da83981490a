# SPDX-License-Identifier: Apache-2.0
"""The journal of a launch: its record, written anew at each change to the folders that want it.

These are the folder of log files, and each run's folder that a rank announces by the audit event `accel.run`, or by
its checkpoints. A folder at a URL gets none.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from accel.errors import AccelError
from accel.launching._failure_record import Failure, file_beside
from accel.launching._record_changes import began, corrected, ended, noted, seen
from accel.launching._report import tell
from accel.launching._target import Target
from accel.run_folder import (
    RUN,
    EventKind,
    LaunchRecord,
    Position,
    SourceState,
    ask_git,
    installed_versions,
    launch_file,
    read_new,
    read_run,
    write_json,
)

_REFUSED = 2
_PATIENCE_S = 1.0  # at the end, for the answer of git in a large tree


class Journal:
    """The journal of a launch as its supervisor sees it; this one keeps none.

    An `AccelError` that leaves its block is the end of the launch.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if isinstance(error, AccelError):
            self.finish(_REFUSED, str(error))

    def begin(self, records: Mapping[int, str], hosts: Sequence[str], kind: EventKind) -> None:
        """Note a start of all ranks.

        Args:
            records: path of the failure record of each rank of this host.
            hosts: hosts of the launch; empty if there is one.
            kind: kind of the start.
        """

    def see(self, statuses: Mapping[int, int | None]) -> None:
        """Note the exit status of each rank, None for one that runs."""

    def note(self, kind: EventKind, text: str) -> None:
        """Note an event."""

    def end(self, statuses: Mapping[int, int | None], failures: Iterable[Failure], first: Failure | None) -> None:
        """Note the end of all ranks.

        Args:
            statuses: exit status of each rank.
            failures: failures of this host.
            first: the failure that caused the others, on any host.
        """

    def finish(self, status: int, text: str, *, stopped: str = "", checkpoint: str = "") -> None:
        """Note the end of the launch.

        Args:
            status: its exit status.
            text: its last report.
            stopped: name of the signal that stopped it.
            checkpoint: newest checkpoint.
        """


class LaunchJournal(Journal):
    """The journal of a launch on one host.

    Args:
        record: result of `first_record`.
        code: folder whose git repository holds the script.
    """

    def __init__(self, record: LaunchRecord, code: str) -> None:
        self._record = record
        self._code = code
        self._folders = [record.log_dir] if record.log_dir else []
        self._known = set(self._folders)
        self._announced: dict[str, Position] = {}
        self._description: Description | None = None

    def begin(self, records: Mapping[int, str], hosts: Sequence[str], kind: EventKind) -> None:
        self._announced = {file_beside(path, "run"): Position() for path in records.values()}
        self._record = began(self._record, list(records), hosts, time.time(), kind)
        self._write()

    def see(self, statuses: Mapping[int, int | None]) -> None:
        record = seen(self._record, statuses, time.time())
        is_new = self._find_folders()
        if record is not self._record or is_new or self._is_described():
            self._record = record
            self._write()

    def note(self, kind: EventKind, text: str) -> None:
        self._record = noted(self._record, kind, text, time.time())
        self._write()

    def end(self, statuses: Mapping[int, int | None], failures: Iterable[Failure], first: Failure | None) -> None:
        _ = self._find_folders()
        self._record = ended(self._record, statuses, failures, first, time.time())
        self._write()
        if first is not None and 0 in statuses:  # rank 0 wrote the runs' records, and nobody does now
            self._correct_runs(first)

    def finish(self, status: int, text: str, *, stopped: str = "", checkpoint: str = "") -> None:
        if not self._record.attempts:  # it was refused before anything ran
            return
        if self._description is not None:
            self._description.join(_PATIENCE_S)
        record = noted(self._record, "end", text, time.time())
        self._record = replace(
            record, status=status, stopped=stopped, checkpoint=checkpoint, ended_s=record.events[-1].time_s
        )
        self._write()

    def _correct_runs(self, first: Failure) -> None:
        started_s = self._record.attempts[-1].started_s
        for folder in map(Path, self._folders):
            run = read_run(folder)
            if run is not None and (after := corrected(run, started_s, first, time.time())) is not run:
                with suppress(OSError):  # the launch's own record has the error
                    write_json(folder / RUN, after)

    def _find_folders(self) -> bool:
        """Read which folders the ranks have announced; return whether one of them is new."""
        is_new = False
        for path, position in self._announced.items():
            lines, self._announced[path], _ = read_new(path, position)
            for folder in (line.decode(errors="surrogateescape") for line in lines):
                if folder not in self._known and os.path.isdir(folder):
                    self._folders.append(folder)
                    is_new = True
                self._known.add(folder)
        return is_new

    def _is_described(self) -> bool:
        """Return whether facts have arrived that the record lacks."""
        return self._description is not None and bool(self._description.versions) and not self._record.versions

    def _write(self) -> None:
        if self._folders and self._description is None:
            self._description = Description(self._code)
            self._description.start()
        if self._description is not None and self._is_described():
            self._record = replace(self._record, versions=self._description.versions, source=self._description.source)
        name = launch_file(self._record.host, self._record.pid, self._record.started_s)
        for folder in list(self._folders):
            path = Path(folder, name)
            try:
                path.parent.mkdir(exist_ok=True)
                write_json(path, self._record)
            except OSError as error:  # a launch goes on without its record
                self._folders.remove(folder)
                if os.path.isdir(folder):  # a temporary one may be gone
                    tell(f"accel: {folder} gets no record of this launch: {error.strerror}\n")


class Description(threading.Thread):
    """A thread that asks for versions and git's state, and then wakes the launcher.

    Attributes:
        versions: result of `installed_versions`; empty until all is known.
        source: state of the repository; None if there is none.
    """

    def __init__(self, code: str) -> None:
        super().__init__(name="accel-launch-versions", daemon=True)
        self._code = code
        self.versions: dict[str, str] = {}
        self.source: SourceState | None = None

    def run(self) -> None:
        answer = ask_git(self._code)
        versions = installed_versions()
        self.source = answer()
        self.versions = versions
        os.kill(os.getpid(), signal.SIGCHLD)


def open_journal(target: Target, record: LaunchRecord) -> LaunchJournal:
    """Return the journal of a launch with its first record."""
    return LaunchJournal(record, os.path.dirname(os.path.abspath(target.name)) if target.kind == "script" else ".")
