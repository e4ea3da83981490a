# SPDX-License-Identifier: Apache-2.0
"""The run that trackers write: its steps, its writers, its `run.json`, and the part that a checkpoint holds."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from accel.alerts import AlertLog, AlertRule, Alerts, RuleWatch, check_metrics
from accel.context import DistContext
from accel.errors import CheckpointError, ConfigError
from accel.errors._checks import check_count, did_you_mean
from accel.run_folder import (
    CODE,
    RUN,
    RUN_EVENT,
    RunRecord,
    Setting,
    SourceState,
    ask_git,
    hide_in_text,
    installed_versions,
    read_diff,
    read_json,
    write_json,
)
from accel.terminal import show_limit
from accel.trackers._media import Media
from accel.trackers._tracker import Config, Ending, Run, Tracker
from accel.trackers._writer import LostRecords, Write, Writer


class _OpenRunFile(msgspec.Struct, frozen=True):
    path: str
    record: RunRecord


def run_file(ctx: DistContext, hidden: Sequence[str], *, code: bool) -> Tracker:
    """Return the tracker that writes `run.json`, and with `code` the differences of tracked files; `hidden` has the
    dotted names of credentials in the configuration."""
    fields: dict[str, Any] = {
        "hidden": tuple(hidden),
        "settings": _settings(ctx),
        "world_size": ctx.world_size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    now_s = time.time()  # before the first record: an alert may be earlier than this tracker's thread
    return Tracker(
        RUN,
        start=lambda run, config: _start(run, config, fields, now_s, code=code),
        log=lambda live, values, step: None,
        finish=_finish,
    )


def _start(run: Run, config: Config, fields: dict[str, Any], now_s: float, *, code: bool) -> _OpenRunFile:
    state = ask_git(_script_folder())
    folder = run.folder_for(RUN)
    folder.mkdir(parents=True, exist_ok=True)
    before = read_json(folder / RUN, RunRecord, within=folder)
    times: dict[str, Any] = {"started_s": now_s}
    if before is not None and before.id == run.id:
        times = {"started_s": before.started_s, "resumed_s": (*before.resumed_s, now_s), "lost": before.lost}
    facts: dict[str, Any] = {"config": dict(config), "versions": installed_versions(), "source": state}
    if code:
        facts["code"] = _store_code(folder / CODE, state)
    record = RunRecord(id=run.id, project=run.project, name=run.name, **times, **facts, **fields)
    opened = _OpenRunFile(str(folder / RUN), record)
    write_json(opened.path, record)
    sys.audit(RUN_EVENT, str(folder))
    return opened


def _store_code(path: Path, source: SourceState | None) -> str:
    """Store how tracked files differ from the commit; return the file's name, or the reason why there is none."""
    try:
        if source is None:
            raise OSError("the script is in no git repository, or git gave no answer")
        diff = read_diff(_script_folder(), source)
    except OSError as error:
        path.unlink(missing_ok=True)  # one of an earlier start says nothing of this one
        logging.getLogger("accel.trackers").warning("the changes of the code are not stored: %s", error)
        return f"not stored: {error}"
    _ = path.write_text(diff)
    return CODE


def _finish(opened: _OpenRunFile, ending: Ending) -> None:
    error = hide_in_text(ending.error)
    ended = msgspec.structs.replace(_current(opened), status=ending.status, error=error, ended_s=time.time())
    write_json(opened.path, ended)


def note_lost(opened: Any, text: str) -> None:
    """Note in an open `run.json` which records the run's files lack."""
    assert isinstance(opened, _OpenRunFile)
    write_json(opened.path, msgspec.structs.replace(_current(opened), lost=hide_in_text(text)))


RULES = "alert rules"


def rules_tracker(log: AlertLog, settings: Alerts) -> Tracker:
    """Return the tracker that evaluates the rules of alerts at each `log`."""

    def see(live: RuleWatch, values: Mapping[str, float], step: int) -> None:
        for rule, text in ((breach.rule, breach.text) for breach in live.see(values, step)):
            key = (RULES, str(settings.rules.index(rule)))
            log.add(rule.title, text, level=rule.level, every_s=settings.every_s, key=key)

    def finish(live: RuleWatch, ending: Ending) -> None:
        if ending.status == "finished":
            _warn_unseen(live.unseen())

    return Tracker(RULES, lambda run, config: RuleWatch(settings.rules), see, finish)


def _warn_unseen(rules: Sequence[AlertRule]) -> None:
    for rule in rules:
        text = "the alert's rule %r was never evaluated: the run has not logged %s"
        logging.getLogger("accel.trackers").warning(text, rule.title, " and ".join(rule.needed))


def _log_alert(level: str, text: str) -> None:
    logging.getLogger("accel.trackers").log(logging.getLevelNamesMapping()[level.upper()], "%s", text)


def _current(opened: _OpenRunFile) -> RunRecord:
    return read_json(opened.path, RunRecord) or opened.record


def _settings(ctx: DistContext) -> dict[str, Setting]:
    values: dict[str, object] = msgspec.to_builtins(ctx.settings, enc_hook=str)
    if (precision := ctx.precision.name) != "custom":
        values["precision"] = precision
    return {name: Setting(_text(value), ctx.launched.get(name, "")) for name, value in values.items()}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()  # as the flag takes it
    return hide_in_text(msgspec.json.encode(value).decode() if isinstance(value, dict) else str(value))


def _script_folder() -> str:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.dirname(os.path.abspath(file)) if file else os.getcwd()


_FLUSH_S = 30.0
_RESTART_S = 10.0
_SILENT_S = 2.0  # of the wait for trackers at the end


class SavedRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of a run that a checkpoint holds."""

    project: str  # project of the run
    id: str  # its identity in the project
    name: str
    step: int | None  # last step that was logged; None before the first
    lines: int  # calls of `log` at that step


class TrackedRun:
    """A run and the writers of this rank.

    Args:
        run: the run.
        config: its configuration, without credentials.
        trackers: all trackers, on every rank.
        mine: trackers for which this rank writes.
        first_steps: lowest step of an earlier run in the places of the trackers, by name.
        alerts: rules, and the ways of alerts.
        room_bytes: bytes of records that may wait for each tracker.
    """

    def __init__(
        self,
        run: Run,
        config: Mapping[str, Any],
        trackers: Sequence[Tracker],
        mine: Sequence[Tracker],
        first_steps: Mapping[str, int],
        *,
        alerts: Alerts = Alerts(),  # noqa: B008 - a frozen value
        room_bytes: int,
    ) -> None:
        self.run: Run = run
        self.all = tuple(trackers)
        self._config = config
        self._rules = alerts.rules
        self._alerts = AlertLog(
            alerts,
            source=f"rank {run.rank}",
            report=_log_alert,
            run=lambda: self.run.name,
            folders=[] if run.folder is None else [str(run.folder)],
        )
        rules = [rules_tracker(self._alerts, alerts)] if alerts.rules and run.rank == 0 else []
        self._mine = (*mine, *rules)
        self._first_steps = dict(first_steps)
        self._room_bytes = room_bytes
        self._step = run.step
        self._lines = run.lines
        self._began = self._ended = False
        self._warned = set[str]()
        self._gaps = dict[str, str]()
        self._writers = self._make_writers()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the trackers for which this rank writes, without the run's own file."""
        mine = {tracker.name for tracker in self._mine}
        return tuple(tracker.name for tracker in self.all if tracker.name in mine)

    def advance(self, step: int, where: str) -> None:
        """Take the step of a record; raise `ConfigError` if the run has ended, the step goes back, or an earlier run
        was not loaded."""
        if self._ended:
            fix = "Log inside the block of accel.tracking."
            raise ConfigError("the trackers have ended", where=where, fix=fix)
        check_count(step, "the step is not valid", least=0, where=f"{where}, step=")
        if self._step is not None and step < self._step:
            raise ConfigError(
                "the step goes back",
                expected=f"{self._step} or above",
                got=str(step),
                where=f"{where}, step=",
                fix="Load a checkpoint that holds the trackers to log earlier steps again.",
            )
        if not self._began:
            self._check_place(step, where)
            self._began = True

    def check_rules(self, names: Collection[str]) -> None:
        """Raise `ConfigError` if the first `log` lacks a number that a rule of alerts reads."""
        check_metrics(self._rules, names)
        self._rules = ()  # once: a later call may log others

    def alert(self, title: str, text: str, *, level: str, every_s: float) -> None:
        """Raise an alert of this rank; `ConfigError` if the run has ended."""
        if self._ended:
            raise ConfigError("the trackers have ended", where="alert", fix="Alert inside the block of accel.tracking.")
        self._alerts.add(title, text, level=level, every_s=every_s)

    def count_line(self, step: int) -> None:
        """Count a call of `log`."""
        self._lines = self._lines + 1 if step == self._step else 1
        self._step = step

    def put(self, make: Callable[[Tracker], Write | None], size: int) -> None:
        """Queue a record of `size` bytes for each tracker; `make` returns its writer, None for a tracker that does not
        take it."""
        for writer in self._writers:
            write = make(writer.tracker)
            if write is not None:
                writer.put(write, 0 if writer.tracker.name == RUN else size)  # which only begins with a record

    def writes(self, medium: type[Media]) -> bool:
        """Return whether this rank writes to a tracker that takes such records."""
        return any(medium in tracker.media for tracker in self._mine)

    def warn_left_out(self, what: str, names: Sequence[str]) -> None:
        """Warn once that trackers do not take a kind of record."""
        new = [name for name in names if f"{name} {what}" not in self._warned]
        self._warned.update(f"{name} {what}" for name in new)
        if new and self._mine:
            logging.getLogger("accel.trackers").warning("%s takes no %s", ", ".join(new), what)

    def live(self, name: str, patience_s: float) -> Any:
        """Return a tracker's live run, None on ranks that do not write it; `ConfigError` if it is unknown or did not
        start in time."""
        known = [tracker.name for tracker in self.all]
        if name not in known:
            facts = {"expected": ", ".join(known), "got": repr(name), "fix": did_you_mean(name, known)}
            raise ConfigError("no such tracker", where="get_tracker", **facts)
        found = [writer for writer in self._writers if writer.tracker.name == name]
        return found[0].live(patience_s) if found else None

    def trouble(self) -> str:
        """Return the records lost on this rank as text; empty for none."""
        return "; ".join(str(lost) for writer in self._writers if (lost := writer.trouble()))

    def end(self, ending: Ending, patience_s: float) -> str:
        """Finish all trackers within `patience_s` in all; report and return the records lost on this rank. Later calls
        do nothing."""
        if self._ended:
            return ""
        self._ended = True
        began = time.monotonic()
        own = [writer for writer in self._writers if writer.tracker.name == RUN]
        for writer in own:  # also of a run that failed before its first record
            writer.put(lambda live: None, 0)
        lost = _end_writers([writer for writer in self._writers if writer not in own], ending, patience_s)
        logged = {*self._gaps.values()}
        self._note_gaps(lost)
        lost += _end_writers(own, ending, max(_SILENT_S, began + patience_s - time.monotonic()))
        self._alerts.end(max(_SILENT_S, began + patience_s - time.monotonic()))
        for each in lost:
            if str(each) not in logged:
                logging.getLogger("accel.trackers").warning("%s", each)
        return "; ".join(map(str, lost))

    def save(self) -> SavedRun:
        """Return the run for a checkpoint, once local files hold all its steps but those lost for good; a failed file
        is a `CheckpointError`."""
        until = time.monotonic() + _FLUSH_S
        for writer in self._writers:
            writer.flush(until - time.monotonic())
        lost = [lost for writer in self._writers if writer.tracker.flush is not None and (lost := writer.trouble())]
        for each in lost:
            if each.tracker not in self._gaps:
                text = "log files are missing steps, and checkpoints continue without them: %s"
                logging.getLogger("accel.trackers").warning(text, each)
        self._note_gaps(lost)
        return SavedRun(self.run.project, self.run.id, self.run.name, self._step, self._lines)

    def load(self, saved: SavedRun) -> None:
        """Go on with the run of a checkpoint after its last step; finish trackers that have started. Another project's
        is a `CheckpointError`."""
        if saved.project != self.run.project:
            raise CheckpointError(
                "the checkpoint is of another project",
                expected=repr(saved.project),
                got=repr(self.run.project),
                where="tracking, project",
                fix="Pass the project of the run, or leave the trackers out with None to begin a new run.",
            )
        lost = _end_writers(self._writers, Ending(), _RESTART_S)
        late = [each.tracker for each in lost if each.unfinished and _is_durable(self._writers, each.tracker)]
        if late:
            raise CheckpointError("a local file is still being written", where=f"tracker {', '.join(late)}")
        facts = {"id": saved.id, "name": saved.name, "step": saved.step, "lines": saved.lines}
        self.run = msgspec.structs.replace(self.run, **facts)
        self._step = saved.step
        self._lines = saved.lines
        self._first_steps.clear()
        self._writers = self._make_writers()

    def _note_gaps(self, lost: Sequence[LostRecords]) -> None:
        """Note in the run's record what its files lack."""
        gaps = {each.tracker: str(each) for each in lost if _is_durable(self._writers, each.tracker)}
        if gaps.items() <= self._gaps.items():
            return
        self._gaps |= gaps
        text = "; ".join(self._gaps.values())
        for writer in self._writers:
            if writer.tracker.name == RUN:
                writer.put(lambda live: note_lost(live, text), 0)

    def _make_writers(self) -> list[Writer]:
        return [Writer(tracker, self.run, self._config, self._room_bytes) for tracker in self._mine]

    def _check_place(self, step: int, where: str) -> None:
        """Raise if a new run would add to an earlier one's steps, as when a resumed loop forgets its trackers."""
        for name, first in self._first_steps.items():
            if first < step:
                raise ConfigError(
                    "the folder holds an earlier run's steps, and this run begins behind them without its checkpoint",
                    expected=f"the run loaded, or a first step of at most {first}",
                    got=f"a new run at step {step}",
                    where=f"{where}, tracker {name}",
                    fix='Put the trackers among the items of save_state and resume: {"trackers": trackers}. Or pass'
                    " another dir= for a new run.",
                )


def _is_durable(writers: Sequence[Writer], name: str) -> bool:
    return any(writer.tracker.name == name and writer.tracker.flush is not None for writer in writers)


def _end_writers(writers: Sequence[Writer], ending: Ending, patience_s: float) -> list[LostRecords]:
    """End all writers at once; return the losses. A long wait is logged, with the error that ended the run."""
    began = time.monotonic()
    for writer in writers:
        writer.end(ending)
    late = [writer.tracker.name for writer in writers if not writer.has_ended(began + min(_SILENT_S, patience_s))]
    if late and patience_s > _SILENT_S:
        reason = f"{ending.error}; " if ending.error else ""
        # Among the launcher's lines, if logging is not configured.
        text = "accel: %swaiting up to %s for %s to finish"
        logging.getLogger("accel.trackers").warning(text, reason, show_limit(patience_s - _SILENT_S), ", ".join(late))
    for writer in writers:
        _ = writer.has_ended(began + patience_s)
    return [lost for writer in writers if (lost := writer.losses())]
