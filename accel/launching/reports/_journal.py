# SPDX-License-Identifier: Apache-2.0
"""The journal of a launch: its record, changed by pure functions, and written to the folders that want it."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from accel.config import FIELDS, Field, LaunchConfig, Source, to_text
from accel.errors import AccelError
from accel.launching._target import LaunchTarget
from accel.launching.reports._failure import Failure, file_beside
from accel.launching.reports._report import describe_end, last_crash_lines, tell
from accel.run_folder import (
    RUN,
    Attempt,
    EventKind,
    LaunchEvent,
    LaunchRecord,
    Position,
    RankError,
    RankState,
    RunRecord,
    Setting,
    SourceState,
    ask_git,
    hide_in_text,
    hide_in_words,
    installed_versions,
    launch_file,
    read_new,
    read_run,
    write_json,
)

_MOST_ATTEMPTS = 100
_MOST_EVENTS = 500


def first_record(target: LaunchTarget, config: LaunchConfig, sources: Mapping[str, Source]) -> LaunchRecord:
    """Return the record of a launch that has not started a rank.

    Args:
        target: program of every process.
        config: settings of the launch.
        sources: source of each setting, by name; settings without one come from the caller.
    """
    kept = config.log_dir and os.path.abspath(config.log_dir)
    settings = {
        field.name: Setting(
            _storable(hide_in_text(to_text(getattr(config, field.name)))), _source(field, config, sources)
        )
        for field in FIELDS
    }
    words = ("-m", target.name) if target.kind == "module" else (target.name,)
    return LaunchRecord(
        host=socket.gethostname(),
        pid=os.getpid(),
        command=tuple(map(_storable, (*words, *hide_in_words(target.args)))),
        folder=_storable(os.getcwd()),
        started_s=time.time(),
        settings=settings,
        log_dir=_storable(kept),
    )


def began(
    record: LaunchRecord, ranks: Sequence[int], hosts: Sequence[str], now_s: float, kind: EventKind
) -> LaunchRecord:
    """Return the record after a start of all ranks."""
    attempt = Attempt(started_s=now_s, hosts=tuple(hosts), ranks=tuple(RankState(rank=rank) for rank in ranks))
    text = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
    record = replace(
        record,
        attempts=(*record.attempts, attempt)[-_MOST_ATTEMPTS:],
        restarts=record.restarts + (kind == "restart"),
    )
    return noted(record, kind, text, now_s)


def seen(record: LaunchRecord, statuses: Mapping[int, int | None], now_s: float) -> LaunchRecord:
    """Return the record after a look at the ranks; the same object if none has ended since the last."""
    attempt = record.attempts[-1]
    ranks = tuple(_state(each, statuses.get(each.rank), now_s) for each in attempt.ranks)
    if ranks == attempt.ranks:
        return record
    return replace(record, attempts=(*record.attempts[:-1], replace(attempt, ranks=ranks)))


def noted(record: LaunchRecord, kind: EventKind, text: str, now_s: float) -> LaunchRecord:
    """Return the record with one event more; of many, the first half and the newest stay."""
    shown = "\n".join(line.removeprefix("accel: ") for line in text.strip().splitlines())
    event = LaunchEvent(time_s=now_s, kind=kind, text=_storable(hide_in_text(shown)))
    events = (*record.events, event)
    if len(events) > _MOST_EVENTS:
        events = (*events[: _MOST_EVENTS // 2], *events[-_MOST_EVENTS // 2 :])
    return replace(record, events=events)


def ended(
    record: LaunchRecord,
    statuses: Mapping[int, int | None],
    failures: Iterable[Failure],
    first: Failure | None,
    now_s: float,
) -> LaunchRecord:
    """Return the record after the end of all ranks."""
    record = seen(record, statuses, now_s)
    texts = {failure.rank: hide_in_text(describe_end(failure)) for failure in failures}
    attempt = record.attempts[-1]
    ranks = tuple(replace(each, text=texts.get(each.rank, "")) for each in attempt.ranks)
    error = None if first is None else _error(first)
    attempt = replace(attempt, ranks=ranks, ended_s=now_s, error=error)
    return replace(record, attempts=(*record.attempts[:-1], attempt))


def corrected(run: RunRecord, started_s: float, first: Failure, now_s: float) -> RunRecord:
    """Return the record of a run with the error that ended its launch, where rank 0 knows less.

    Rank 0 writes the record. Its own error may only report a lost peer, and a killed rank 0 writes none.

    Args:
        run: record as rank 0 left it.
        started_s: start of the attempt, in seconds since the epoch; earlier runs stay as they are.
        first: the failure that caused the others.
        now_s: end of the attempt.
    """
    is_earlier = max((run.started_s, *run.resumed_s)) < started_s
    is_told = run.status == "failed" and first.rank == 0
    if is_earlier or is_told or run.status == "finished":
        return run
    error = hide_in_text(f"rank {first.rank} {describe_end(first)}")
    return replace(run, status="failed", error=_storable(error), ended_s=run.ended_s or now_s)


def _state(state: RankState, status: int | None, now_s: float) -> RankState:
    if status is None or state.status is not None:
        return state
    return replace(state, status=status, ended_s=now_s)


def _storable(text: str) -> str:
    """Return a text that JSON can hold: file names and arguments may hold any byte."""
    return text.encode(errors="backslashreplace").decode()


def _source(field: Field, config: LaunchConfig, sources: Mapping[str, Source]) -> str:
    source = sources.get(field.name, Source("default"))
    is_changed = source.kind == "default" and getattr(config, field.name) != field.default
    return "the caller, or this machine" if is_changed else str(source)


def _error(failure: Failure) -> RankError:
    found = failure.record
    if found is None:
        return RankError(
            rank=failure.rank, status=failure.status, traceback=hide_in_text(last_crash_lines(failure.crash))
        )
    return RankError(
        rank=failure.rank,
        status=failure.status,
        exception=found.exception,
        message=hide_in_text(found.message),
        location=found.location,
        traceback=hide_in_text(found.traceback, newest=True),
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


def open_journal(target: LaunchTarget, record: LaunchRecord) -> LaunchJournal:
    """Return the journal of a launch with its first record."""
    return LaunchJournal(record, os.path.dirname(os.path.abspath(target.name)) if target.kind == "script" else ".")
