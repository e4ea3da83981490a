# SPDX-License-Identifier: Apache-2.0
"""Signals as values to wait for, and processes that ranks leave behind, which the launcher adopts and ends.

    state                        stop request                        notice              who waits
    settings are checked         the default action                  the default action  nobody
    ranks are started            waits in the socket                 waits in the socket `Supervisor._supervise`
    a host is awaited            ends the launch                     is dropped          `_await`, `Rendezvous.join`
    an agent imports torch       stays blocked until it listens      the same            `_hosts._wait`
    ranks run                    forwarded, then their grace         forwarded           `Supervisor._supervise`
    ranks stop, or are ended     kills; no restart                   is dropped          `Supervisor._wait`
    output and alerts are left   ends the process, by `Guard`        is dropped          `Supervisor._drain`

No wait relies on a signal: each looks at its children every `LOOK_S` at the latest, and none has a limit in all.
"""

from __future__ import annotations

import ctypes
import os
import select
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from accel.errors import LaunchError
from accel.run_folder import hide_in_words
from accel.system import NOTICES, REPEATED, SAME_REQUEST_S, STOPPING, Helpers, not_ignored, open_streams
from accel.terminal import show_limit, show_names

LOOK_S = 5.0  # the longest wait between two looks at the children, as a signal may be lost
_DEAF_S = 3.5  # a launcher that has not read a request to stop for so long, or does not continue after it, is stuck
_LOOK_S = 1.0
_PAUSE_S = 0.1


class Signals:
    """The signals that have arrived, read from the socket that the interpreter writes them to.

    Attributes:
        looks: number of looks so far.
        is_waiting: whether the main thread waits for a signal.
        asked: the latest signal that has asked to stop, once it is read; 0 for none.
        abandon: kills what this process has started, before it ends by force.
    """

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        self.looks = 0
        self.is_waiting = False
        self.asked = 0
        self.abandon: Callable[[], object] = lambda: None
        self._asked_s = 0.0
        self._notices: list[int] = []

    def wait(self, timeout_s: float = LOOK_S) -> int:
        """Wait for any signal, a child's end included, `LOOK_S` at most.

        Returns the first that asks to stop, else a notice, else 0."""
        self.is_waiting = True
        ready, _, _ = select.select([self._source], [], [], 0 if self._notices else min(timeout_s, LOOK_S))
        self.looks += 1
        self.is_waiting = False
        arrived = self._source.recv(4096) if ready else b""
        self._notices += dict.fromkeys(number for number in arrived if number in NOTICES)
        if number := next(filter(self._asks, arrived), 0):
            self.asked = number
            self._asked_s = time.monotonic()
            return number
        return self._notices.pop(0) if self._notices else 0

    def _asks(self, number: int) -> bool:
        """Return whether a signal asks to stop, and does not only repeat an earlier request."""
        if number not in STOPPING or not self.asked:
            return number in STOPPING
        is_same = number != self.asked and time.monotonic() - self._asked_s < SAME_REQUEST_S
        return number not in REPEATED and not is_same

    def stop(self, timeout_s: float) -> int:
        """Wait for any signal; return one that asks to stop, else 0."""
        number = self.wait(timeout_s)
        return number if number in STOPPING else 0


class Guard(threading.Thread):
    """A thread that ends this process if it is asked to stop and cannot, as while nobody reads what it prints."""

    def __init__(
        self, source: socket.socket, signals: Signals, leave: Callable[[int], object], deaf_s: float = _DEAF_S
    ) -> None:
        super().__init__(name="accel-launch-guard", daemon=True)
        self._source = source
        self._signals = signals
        self._leave = leave
        self._deaf_s = deaf_s
        self._ended = threading.Event()

    def end(self) -> None:
        """End the watch, and no other use of the socket."""
        self._ended.set()
        if self.is_alive():
            self._source.shutdown(socket.SHUT_RD)  # wakes it
            self.join()

    def run(self) -> None:
        looks, since_s = -1, 0.0
        while not self._ended.wait(_PAUSE_S):
            signals = self._signals
            number = signals.asked or self._unread()
            if not number or signals.is_waiting or signals.looks != looks:
                looks, since_s = signals.looks, time.monotonic()
            elif time.monotonic() >= since_s + self._deaf_s:
                _ = signals.abandon()
                _ = self._leave(128 + number)
                return

    def _unread(self) -> int:
        """Return a request to stop that the main thread has not read; 0 for none."""
        arrived = b""
        with suppress(OSError, ValueError):  # read in between, or closed
            if select.select([self._source], [], [], _LOOK_S)[0]:
                arrived = self._source.recv(4096, socket.MSG_PEEK)
        return next((number for number in arrived if number in STOPPING), 0)


@contextmanager
def listening(*, is_guarded: bool = False) -> Generator[Signals]:
    """Collect stop requests, notices and SIGCHLD in the block; afterwards handlers and mask are as they were.

    Signals that this process ignores stay ignored, save SIGCHLD. None stays blocked, and closed standard streams are
    opened. With `is_guarded`, a request to stop ends the process even if the main thread is stuck."""
    open_streams()
    source, sink = socket.socketpair()
    with source, sink:
        source.setblocking(False)
        sink.setblocking(False)
        try:
            woken = signal.set_wakeup_fd(sink.fileno(), warn_on_full_buffer=False)
        except ValueError as error:
            raise LaunchError(
                "only the main thread can launch",
                got="a call from another thread",
                fix="Call it from the main thread, or start `accel launch` as a process.",
            ) from error
        collected = [*not_ignored((*STOPPING, *NOTICES)), signal.SIGCHLD]
        before = {number: signal.signal(number, _ignore) for number in collected}
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, collected)  # once handled, as one may be pending
        signals = Signals(source)
        guard = Guard(source, signals, os._exit)
        try:
            if is_guarded:
                guard.start()
            yield signals
        finally:
            guard.end()
            _ = signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for number, handler in before.items():
                _ = signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set from python
            _ = signal.set_wakeup_fd(woken)


def _ignore(_number: int, _frame: object) -> None:
    """Do nothing: a handler must exist for the interpreter to write the signal's number to the socket."""


GRACE_S = 20.0  # for services of trackers, which still upload
_KILLED_GRACE_S = 1.5
_SILENT_S = 1.0  # until a line reports the wait
_POLL_S = 0.05
_MOST_NAMED, _MOST_WORDS = 8, 80
_PR_SET_CHILD_SUBREAPER = 36


class Orphans:
    """Orphaned descendants of this process; from now on the kernel makes them its children."""

    def __init__(self, grace_s: float = GRACE_S, helpers: Helpers | None = None) -> None:
        self._grace_s = grace_s
        self._helpers = helpers or Helpers()
        self._adopts = sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Adopt no further processes: a program that runs the command within itself has other children."""
        if self._adopts:
            _ = ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def reap(self, own: Collection[int]) -> None:
        """Reap orphans that have ended, as a long run can have many; `own` children are left to their `Popen`."""
        while self._adopts:
            with suppress(ChildProcessError), self._helpers.held() as helpers:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is not None and _is_orphan(ended.si_pid, {*own, *helpers}):
                    _ = os.waitpid(ended.si_pid, os.WNOHANG)
                    continue
            return

    def end(self, own: Collection[int], wait: Callable[[float], bool], notify: Callable[[str], None]) -> str:
        """End all orphans: SIGTERM, and SIGKILL when their time is over; return a line that names them, or nothing.

        `wait` pauses for some seconds at most, and returns whether there is no time left."""
        named: dict[int, str] = {}
        asked_s = time.monotonic()
        is_logged = hurry = False
        while (found := self._find(own)) and not hurry and time.monotonic() < asked_s + self._grace_s:
            for pid in found.keys() - named.keys():
                _signal(pid, signal.SIGTERM)
            named |= found
            if not is_logged and time.monotonic() > asked_s + _SILENT_S:
                limit = show_limit(self._grace_s)
                notify(f"accel: waiting up to {limit} for what ranks have left behind: {_listed(found)}\n")
                is_logged = True
            hurry = wait(_POLL_S)
        killed = found
        deadline = time.monotonic() + _KILLED_GRACE_S
        while found and time.monotonic() < deadline:  # each may leave others
            for pid in found:
                _signal(pid, signal.SIGKILL)
            killed |= found
            _ = wait(_POLL_S)
            found = self._find(own)
        ended = {pid: words for pid, words in named.items() if pid not in killed}
        line = f"ended what ranks had left behind: {_listed(ended)}" if ended else ""
        line += "; " if ended and killed else ""
        line += f"killed what ranks had left behind: {_listed(killed)}" if killed else ""
        return line

    def _find(self, own: Collection[int]) -> dict[int, str]:
        """Return each orphan that runs, with its command line."""
        self.reap(own)
        found: dict[int, str] = {}
        with self._helpers.held() as helpers:
            for entry in os.scandir("/proc") if self._adopts else ():
                pid = int(entry.name) if entry.name.isdecimal() else 0
                if pid and _parent(entry.name) == os.getpid() and _is_orphan(pid, {*own, *helpers}):
                    found[pid] = _words(entry.name)
        return found


def _is_orphan(pid: int, own: Collection[int]) -> bool:
    """Whether a child was a rank's: this process starts all others in its own session."""
    with suppress(ProcessLookupError):
        return pid not in own and os.getsid(pid) != os.getsid(0)
    return False


def _parent(pid: str) -> int:
    """Return the parent of a process that runs; 0 of one that has ended."""
    with suppress(OSError):
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return 0 if state in "ZX" else int(parent)
    return 0


def _words(pid: str) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="backslashreplace").split("\0")[:-1]
        return " ".join(shlex.join(hide_in_words(words)).split())[:_MOST_WORDS]
    return ""


def _listed(found: dict[int, str]) -> str:
    return show_names([f"{pid} ({words})" if words else str(pid) for pid, words in found.items()], _MOST_NAMED)


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
