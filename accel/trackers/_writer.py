# SPDX-License-Identifier: Apache-2.0
"""One background thread for each tracker, behind a queue that a number of bytes bounds."""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from accel.errors import CheckpointError, ConfigError
from accel.terminal import show_limit
from accel.trackers._tracker import Ending, Run, Tracker

Write = Callable[[Any], object]

_RETRY_S = 1.0
_TRIES = 2  # after which a checkpoint, or the end of the run, waits no longer


class LostRecords(msgspec.Struct, frozen=True):
    """Records that a tracker did not get."""

    tracker: str  # its name
    dropped: int = 0  # the oldest ones of a full queue
    failed: int = 0  # those at which the tracker raised
    unfinished: int = 0  # those that still waited at the end
    error: str = ""  # first error of the tracker; or the call that it did not come back from

    def __bool__(self) -> bool:
        return bool(self.dropped or self.failed or self.unfinished or self.error)

    def __str__(self) -> str:
        parts = ("dropped", self.dropped), ("failed", self.failed), ("unfinished", self.unfinished)
        counts = ", ".join(f"{count} {kind}" for kind, count in parts if count) or "no records lost"
        return f"tracker {self.tracker}: {counts}{': ' if self.error else ''}{self.error}"


class Writer:
    """A tracker's live run, in a separate thread: one that hangs does not delay the others.

    The thread is a daemon, so that it cannot hold the interpreter back. It starts with the first record. A process
    forked from this one writes nothing. A tracker with a `flush` writes to a disk, which may be full for a while: what
    it raises an `OSError` at waits, with the records behind it, and is tried again.

    Args:
        tracker: the tracker.
        run: the run to start or to resume.
        config: the run's configuration, without credentials.
        room_bytes: bytes of records that may wait; the oldest beyond it are dropped.
    """

    def __init__(self, tracker: Tracker, run: Run, config: Mapping[str, Any], room_bytes: int) -> None:
        self.tracker = tracker
        self._run = run
        self._config = config
        self._room_bytes = room_bytes
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._waiting: collections.deque[tuple[Write, int]] = collections.deque()
        self._bytes = 0
        self._busy = ""  # the call that the thread is in
        self._ending: Ending | None = None
        self._started = self._is_live = self._done = False
        self._live: Any = None
        self._dropped = self._failed = self._taken = self._ended_records = 0
        self._queued = 0
        self._error = ""
        self._held = ""  # why the call that the thread is in is to be tried again
        self._tries = 0  # calls so far that are to be tried again
        self._asked = 0  # how often somebody has waited for the disk
        self._last_tries = 0  # since the end

    def put(self, write: Write, size: int) -> None:
        """Queue a record of `size` bytes. Never waits for the tracker."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._start()
            self._queue(write, size)
            while self._bytes > self._room_bytes and len(self._waiting) > 1:
                _, dropped = self._waiting.popleft()
                self._bytes -= dropped
                self._dropped += 1
                if self._dropped == 1:
                    self._warn("is too slow: its queue is full, and the oldest records are dropped")
            self._changed.notify_all()

    def live(self, patience_s: float) -> Any:
        """Return the tracker's live run; start it if need be, or raise `ConfigError` if that fails or takes too
        long."""
        with self._changed:
            self._start()
            began = self._changed.wait_for(lambda: self._is_live or self._error or self._done, patience_s)
            if self._is_live:
                return self._live
            got = self._error if began else f"no answer in {show_limit(patience_s)}"
        raise ConfigError(f"the tracker {self.tracker.name} did not start", got=got, where="get_tracker")

    def flush(self, patience_s: float) -> None:
        """Wait until all records but lost ones are durable, if the tracker has a `flush`; a disk that refuses some is a
        `CheckpointError`."""
        flush = self.tracker.flush
        if flush is None or not self._started:
            return
        ready = threading.Event()

        def write(live: Any) -> None:
            _ = flush(live)
            ready.set()

        with self._changed:
            number = self._queue(write, 0)
            self._asked += 1
            self._changed.notify_all()
            enough = self._tries + _TRIES
            _ = self._changed.wait_for(lambda: self._is_through(number) or self._tries >= enough, max(0.0, patience_s))
            if ready.is_set() or (self._is_through(number) and not self._is_live):
                return  # of a tracker that never began, all records are lost
            lost = self._lost(f"not written within {show_limit(patience_s)}")
        raise CheckpointError(
            "log files are missing steps that the checkpoint already counted",
            got=self._held or str(lost),
            where=f"tracker {self.tracker.name}",
            fix="Free its disk, or leave the tracker out of `to`.",
        )

    def trouble(self) -> LostRecords | None:
        """Return records lost so far; None for none."""
        with self._changed:
            return self._lost("") or None

    def end(self, ending: Ending) -> None:
        """Let the thread write the waiting records, finish the tracker, and end."""
        with self._changed:
            self._ending = ending
            self._asked += 1
            self._changed.notify_all()

    def has_ended(self, until: float) -> bool:
        """Wait for the end of the thread, after `end`, until a time of `time.monotonic`; return whether it came."""
        with self._changed:
            if not self._started or os.getpid() != self._process:
                return True
            return self._changed.wait_for(lambda: self._done, max(0.0, until - time.monotonic()))

    def losses(self) -> LostRecords:
        """Return all records lost, after `end`; those that still wait count."""
        with self._changed:
            return self._lost(f"did not come back from {self._busy or 'its queue'}")

    def _start(self) -> None:
        if not self._started:
            self._started = True
            threading.Thread(target=self._work, name=f"accel-tracker-{self.tracker.name}", daemon=True).start()

    def _queue(self, write: Write, size: int) -> int:
        """Append a record; return its number, from 1."""
        self._waiting.append((write, size))
        self._bytes += size
        self._queued += 1
        return self._queued

    def _is_through(self, number: int) -> bool:
        """Return whether a record has been written or lost."""
        return self._done or self._ended_records + self._dropped >= number

    def _lost(self, why_unfinished: str) -> LostRecords:
        ended = self._done or not self._started
        unfinished = 0 if ended or self._ending is None else len(self._waiting) + self._taken - self._ended_records
        late = "" if ended or not why_unfinished else why_unfinished
        return LostRecords(self.tracker.name, self._dropped, self._failed, unfinished, self._error or late)

    def _work(self) -> None:
        try:
            self._call("start", lambda: self._open())
            while (write := self._next()) is not None:
                self._taken += 1
                if not self._is_live or not self._call("log", lambda write=write: write(self._live)):
                    self._failed += 1
                self._ended_records += 1
                with self._changed:
                    self._changed.notify_all()
            if self._is_live and (ending := self._ending) is not None:
                self._call("finish", lambda: self.tracker.finish(self._live, ending))
        finally:
            with self._changed:
                self._done = True
                self._changed.notify_all()

    def _open(self) -> None:
        live = self.tracker.start(self._run, self._config)
        with self._changed:
            self._live = live
            self._is_live = True
            self._changed.notify_all()

    def _next(self) -> Write | None:
        with self._changed:
            _ = self._changed.wait_for(lambda: self._waiting or self._ending is not None)
            if not self._waiting:
                return None
            write, size = self._waiting.popleft()
            self._bytes -= size
            return write

    def _call(self, name: str, work: Callable[[], object]) -> bool:
        """Call a function of the tracker, again where the disk may take it later; return whether it came back."""
        self._busy = name
        while True:
            try:
                _ = work()
            except BaseException as error:  # a library may exit its thread
                text = f"{name}: {type(error).__name__}: {error}"
                if name != "finish" and self._may_pass(error) and self._await_retry(text):
                    continue
                if not self._error:
                    self._error = text
                    self._warn(f"failed, and its records are lost: {self._error}")
                with self._changed:
                    self._changed.notify_all()
                return False
            self._busy = ""
            if self._held:
                self._held = ""
                logging.getLogger("accel.trackers").info("tracker %s writes again", self.tracker.name)
            return True

    def _may_pass(self, error: BaseException) -> bool:
        is_missing = isinstance(error, FileNotFoundError)  # such as an artifact
        return self.tracker.flush is not None and isinstance(error, OSError) and not is_missing

    def _await_retry(self, text: str) -> bool:
        """Wait until a call is to be tried again; return False at the end of the run, after the last trial."""
        with self._changed:
            if not self._held:
                self._warn(f"cannot write, keeps its records and tries again: {text}")
            self._held = text
            self._tries += 1
            self._last_tries += self._ending is not None
            self._changed.notify_all()
            if self._last_tries > _TRIES:
                return False
            asked = self._asked
            _ = self._changed.wait_for(lambda: self._asked != asked, _RETRY_S)
            return True

    def _warn(self, text: str) -> None:
        logging.getLogger("accel.trackers").warning("tracker %s %s", self.tracker.name, text)
