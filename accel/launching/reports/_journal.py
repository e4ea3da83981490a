# SPDX-License-Identifier: Apache-2.0
"""The log of a launch on this host, which its supervisor writes, and the alerts of ranks and disks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from msgspec.structs import replace

from accel.alerts import AlertLog, Alerts
from accel.config import LaunchConfig
from accel.config._resolve import Source
from accel.config._schema import Field, to_text
from accel.config._settings import FIELDS
from accel.errors import AccelError
from accel.launching._target import LaunchTarget
from accel.launching.reports._failure import Failure, file_beside
from accel.launching.reports._report import describe_end, last_crash_lines, notify
from accel.run_folder import (
    Attempt,
    AttemptLine,
    EventKind,
    EventLine,
    LaunchEvent,
    LaunchLine,
    LaunchRecord,
    LogLine,
    Position,
    RankError,
    RankState,
    Setting,
    SourceState,
    append_rest,
    ask_git,
    hide_in_text,
    hide_in_words,
    installed_versions,
    launch_file,
    read_new,
)
from accel.system import Helpers, absolute, current_folder
from accel.terminal import show_limit, show_size

_REFUSED = 2
_PATIENCE_S = 1.0  # at the end, for the answer of git in a large tree


def first_record(target: LaunchTarget, config: LaunchConfig, sources: Mapping[str, Source]) -> LaunchRecord:
    """Return the record of a launch that has not started a rank; settings without a source come from the caller."""
    kept = config.log_dir and absolute(config.log_dir)
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
        folder=_storable(current_folder()),
        started_s=time.time(),
        settings=settings,
        log_dir=_storable(kept),
    )


def _storable(text: str) -> str:
    """Return a text that JSON can hold: file names and arguments may hold any byte."""
    return text.encode(errors="backslashreplace").decode()


def _source(field: Field, config: LaunchConfig, sources: Mapping[str, Source]) -> str:
    source = sources.get(field.name, Source("default"))
    is_changed = source.kind == "default" and getattr(config, field.name) != field.default
    return "the caller, or this machine" if is_changed else str(source)


_LOOK_S = 30.0  # between two looks at the disks
_AGAIN = 0.01  # below the limit, a disk that was full is one that may be full again
_END_S = 10.0
_SILENT_S = 1.0


class LaunchAlerts:
    """The alerts of a launch on this host.

    Args:
        settings: settings of alerts.
        look_s: seconds between two looks at the disks.
        helpers: takes note of running commands.
    """

    def __init__(self, settings: Alerts, look_s: float = _LOOK_S, helpers: Helpers | None = None) -> None:
        self._settings = settings
        self._look_s = look_s
        self._log = AlertLog(
            settings,
            source="launch",
            report=lambda level, text: notify(f"accel: {text}\n"),
            helpers=helpers,
        )
        self._folders: list[str] = []
        self._full: set[int] = set()
        self._ended = threading.Event()
        self._looks = False

    def begin(self, folders: Sequence[str], *, looks: bool) -> None:
        """Note a start of all ranks; `looks` on the host of rank 0, which watches the disks of folders."""
        looks = looks and self._settings.disk_full < 1
        for folder in folders:
            self.add_folder(folder)
        if looks and not self._looks:
            self._looks = True
            # A thread, as a disk of a server that is gone answers nothing.
            threading.Thread(target=self._watch, name="accel-launch-disks", daemon=True).start()

    def add_folder(self, folder: str) -> None:
        """Write alerts to a folder, and watch its disk."""
        if folder not in self._folders:
            self._folders.append(folder)
            self._log.add_folder(folder)

    def lost(self, rank: int, text: str) -> None:
        """Alert of a rank that failed; the launcher reports it itself."""
        self._add(f"rank {rank} is lost", text, "error")

    def silent(self, text: str) -> None:
        """Alert of ranks without output; the launcher reports them itself."""
        lines = [line.removeprefix("accel: ") for line in text.splitlines() if line.startswith("accel: ")]
        self._add("ranks are silent", "\n".join(lines), "warning")

    def end(self) -> None:
        """Deliver what waits, for some seconds at most."""
        self._ended.set()
        until = time.monotonic() + _SILENT_S
        while self._log.has_work() and time.monotonic() < until:
            time.sleep(0.01)
        if self._log.has_work():
            notify(f"accel: waiting up to {show_limit(_END_S)} for alerts to be delivered\n")
        self._log.end(_END_S)

    def look(self) -> None:
        """Alert of each disk that has become almost full since the last look."""
        for folder in list(self._folders):
            with contextlib.suppress(OSError):
                device = os.stat(folder).st_dev
                found = os.statvfs(folder)
                used = 1 - found.f_bavail / found.f_blocks if found.f_blocks else 0.0
                if used < self._settings.disk_full - _AGAIN:
                    self._full.discard(device)
                elif used >= self._settings.disk_full and device not in self._full:
                    self._full.add(device)
                    free = show_size(found.f_bavail * found.f_frsize)
                    self._log.add(
                        f"the disk of {folder} is almost full",
                        f"{used:.1%} in use, {free} left",
                        level="warning",
                        every_s=self._settings.every_s,
                    )

    def _add(self, title: str, text: str, level: str) -> None:
        self._log.add(title, text, level=level, every_s=self._settings.every_s, is_known=True)

    def _watch(self) -> None:
        folders = 0
        waited_s = self._look_s
        pause_s = min(1.0, self._look_s)
        while not self._ended.wait(pause_s):
            waited_s += pause_s
            if len(self._folders) != folders or waited_s >= self._look_s:
                folders, waited_s = len(self._folders), 0.0
                self.look()


class Journal:
    """The log of a launch, as its supervisor writes it: the same lines to each folder; without a record none.

    An `AccelError` that leaves its block is the end of the launch."""

    def __init__(
        self,
        record: LaunchRecord | None = None,
        code: str = ".",
        clock: Callable[[], float] = time.time,
        alerts: LaunchAlerts | None = None,
        helpers: Helpers | None = None,
    ) -> None:
        self._alerts = alerts
        self._launch = record
        self._clock = clock
        self._attempt: Attempt | None = None
        self._file = launch_file(record.host, record.pid, record.started_s) if record else ""
        self._log = bytearray()  # all lines, as ranks announce a run's folder minutes after the start
        self._folders = [record.log_dir] if record and record.log_dir else []
        self._known = set(self._folders)
        self._reported: set[str] = set()
        self._announced: dict[str, Position] = {}
        self._description = Description(code, helpers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if isinstance(error, AccelError):
            self.finish(_REFUSED, str(error))
        if self._alerts is not None:
            self._alerts.end()

    def begin(self, records: Mapping[int, str], hosts: Sequence[str], kind: EventKind) -> None:
        """Note a start of all ranks, given the path of each rank's failure record; no hosts if there is one."""
        if self._launch is None:
            return
        self._announced = {file_beside(path, "run"): Position() for path in records.values()}
        ranks = [*records]
        self._attempt = Attempt(
            started_s=self._clock(),
            hosts=tuple(map(_storable, hosts)),
            ranks=tuple(RankState(rank=rank) for rank in ranks),
        )
        if self._alerts is not None:
            self._alerts.begin(self._folders, looks=0 in records)
        if not self._log:  # not before: a launch that is refused leaves no log
            self._add(LaunchLine(launch=self._launch))
        self._add(AttemptLine(attempt=self._attempt))
        self.note(kind, f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}")

    def see(self, statuses: Mapping[int, int | None]) -> None:
        """Note the exit status of each rank, None for one that runs."""
        is_new = self._find_folders()
        if self._look(statuses) or is_new or self._description.answer is not None:
            self._write()

    def note(self, kind: EventKind, text: str) -> None:
        """Note an event."""
        if kind == "hang" and self._alerts is not None:
            self._alerts.silent(text)
        self._add(EventLine(event=LaunchEvent(time_s=self._clock(), kind=kind, text=_shown(text))))
        self._write()

    def end(self, statuses: Mapping[int, int | None], failures: Iterable[Failure], first: Failure | None) -> None:
        """Note the end of all ranks, the failures of this host, and the one, on any host, that caused the others."""
        _ = self._find_folders()
        _ = self._look(statuses)
        if self._alerts is not None and first is not None and first.rank in statuses:  # of several hosts, its own
            self._alerts.lost(first.rank, describe_end(first))
        if self._attempt is not None:
            texts = {failure.rank: _end_text(failure) for failure in failures}
            ranks = tuple(replace(each, text=texts.get(each.rank, "")) for each in self._attempt.ranks)
            error = None if first is None else _error(first)
            self._attempt = replace(self._attempt, ranks=ranks, ended_s=self._clock(), error=error)
            self._add(AttemptLine(attempt=self._attempt))
        self._write()

    def finish(self, status: int, text: str, *, stopped: str = "", checkpoint: str = "") -> None:
        """Note the end of the launch: its exit status, last report, the signal that stopped it, newest checkpoint."""
        if self._launch is None or not self._log:  # it was refused before anything ran
            return
        if self._description.ident is not None:
            self._description.join(_PATIENCE_S)
        self._launch = replace(
            self._launch, status=status, stopped=stopped, checkpoint=_storable(checkpoint), ended_s=self._clock()
        )
        self.note("end", text)
        self._add(LaunchLine(launch=self._launch))  # behind the event: who reads of the end has all of it
        self._write()
        if self._alerts is not None:
            self._alerts.end()

    def _look(self, statuses: Mapping[int, int | None]) -> bool:
        """Add a line if a rank has ended since the last look; return whether one has."""
        if self._attempt is None:
            return False
        now_s = self._clock()
        ranks = tuple(_state(each, statuses.get(each.rank), now_s) for each in self._attempt.ranks)
        if is_changed := ranks != self._attempt.ranks:
            self._attempt = replace(self._attempt, ranks=ranks)
            self._add(AttemptLine(attempt=self._attempt))
        return is_changed

    def _find_folders(self) -> bool:
        """Read which folders the ranks have announced; return whether one of them is new."""
        is_new = False
        for path, position in self._announced.items():
            lines, self._announced[path], _ = read_new(path, position)
            for folder in (line.decode(errors="surrogateescape") for line in lines):
                if folder not in self._known and os.path.isdir(folder):
                    self._folders.append(folder)
                    if self._alerts is not None:
                        self._alerts.add_folder(folder)
                    is_new = True
                self._known.add(folder)
        return is_new

    def _add(self, line: LogLine) -> None:
        self._log += msgspec.json.encode(line) + b"\n" if self._launch is not None else b""

    def _write(self) -> None:
        """Bring the file of each folder up to date, and ask for versions once one needs them."""
        if self._folders and self._launch is not None:
            if self._description.ident is None:
                self._description.start()
            if (answer := self._description.answer) is not None:
                self._launch, self._description.answer = (
                    replace(self._launch, versions=answer[0], source=answer[1]),
                    None,
                )
                self._add(LaunchLine(launch=self._launch))
        for folder in list(self._folders):
            path = Path(folder, self._file)
            try:
                path.parent.mkdir(exist_ok=True)
                append_rest(path, self._log)
            except OSError as error:  # a launch continues without its log
                if not os.path.isdir(folder):  # a temporary one may be gone
                    self._folders.remove(folder)
                elif folder not in self._reported:  # the next line tries again: the disk may have room by then
                    self._reported.add(folder)
                    notify(f"accel: {folder} gets no record of this launch: {error.strerror}\n")


def _state(state: RankState, status: int | None, now_s: float) -> RankState:
    # The first look that sees the end has its time.
    return state if status is None or state.status is not None else replace(state, status=status, ended_s=now_s)


def _shown(text: str) -> str:
    lines = (line.removeprefix("accel: ") for line in text.strip().splitlines())
    return _storable(hide_in_text("\n".join(lines)))


def _end_text(failure: Failure) -> str:
    return _storable(hide_in_text(describe_end(failure)))


def _error(failure: Failure) -> RankError:
    found, text = failure.record, _end_text(failure)
    if found is None:
        crash = hide_in_text(last_crash_lines(failure.crash))
        return RankError(rank=failure.rank, status=failure.status, traceback=crash, text=text)
    return RankError(
        rank=failure.rank,
        status=failure.status,
        exception=found.exception,
        message=hide_in_text(found.message),
        location=found.location,
        traceback=hide_in_text(found.traceback, newest=True),
        text=text,
    )


class Description(threading.Thread):
    """A thread that asks for versions and git's state, and then wakes the launcher.

    Attributes:
        answer: both, once they are known; the journal takes them away.
    """

    def __init__(self, code: str, helpers: Helpers | None = None) -> None:
        super().__init__(name="accel-launch-versions", daemon=True)
        self._code = code
        self._helpers = helpers
        self.answer: tuple[dict[str, str], SourceState | None] | None = None

    def run(self) -> None:
        source = ask_git(self._code, self._helpers)
        self.answer = (installed_versions(), source)
        os.kill(os.getpid(), signal.SIGCHLD)


def open_journal(
    target: LaunchTarget, record: LaunchRecord, config: LaunchConfig, helpers: Helpers | None = None
) -> Journal:
    """Return the journal of a launch with its first record; `helpers` takes note of the programs that it runs."""
    code = os.path.dirname(absolute(target.name)) if target.kind == "script" else "."
    return Journal(
        record,
        code,
        alerts=None if config.alerts == "none" else LaunchAlerts(config.alerts, helpers=helpers),
        helpers=helpers,
    )
