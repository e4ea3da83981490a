# SPDX-License-Identifier: Apache-2.0
"""Signals as values to wait for, instead of handlers that interrupt other code."""

from __future__ import annotations

import select
import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager

from accel.errors import LaunchError

STOPPING = (signal.SIGINT, signal.SIGTERM)
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)  # their meaning is the script's own


class Signals:
    """The signals that have arrived, read from the socket that the interpreter writes them to."""

    def __init__(self, source: socket.socket) -> None:
        self._source = source

    def wait(self, timeout_s: float | None) -> int:
        """Wait for any signal, a child's end included; return the first that asks to stop, else a notice, else 0.

        Args:
            timeout_s: for how long, in seconds; None waits until something arrives.
        """
        ready, _, _ = select.select([self._source], [], [], timeout_s)
        arrived = self._source.recv(4096) if ready else b""
        return next((number for kind in (STOPPING, NOTICES) for number in arrived if number in kind), 0)

    def stop(self, timeout_s: float) -> int:
        """Wait for any signal; return one that asks to stop, else 0."""
        number = self.wait(timeout_s)
        return number if number in STOPPING else 0


@contextmanager
def listening() -> Generator[Signals]:
    """Collect SIGINT, SIGTERM, SIGUSR1, SIGUSR2 and SIGCHLD in the block; afterwards all is as it was.

    Raises:
        LaunchError: this is not the main thread, the only one that may change what signals do.
    """
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
        before = {number: signal.signal(number, _ignore) for number in (*STOPPING, *NOTICES, signal.SIGCHLD)}
        try:
            yield Signals(source)
        finally:
            for number, handler in before.items():
                _ = signal.signal(number, handler)
            _ = signal.set_wakeup_fd(woken)


def _ignore(_number: int, _frame: object) -> None:
    """Do nothing: a handler must exist for the interpreter to write the signal's number to the socket."""
