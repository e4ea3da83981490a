# SPDX-License-Identifier: Apache-2.0
"""Signal handlers of simulated ranks, kept apart: each rank looks like a process of its own.

Python sets handlers on the main thread only, and for the whole process. So while simulations run, `signal.signal`,
`signal.getsignal` and `signal.raise_signal` lead a simulated rank here; see `_process.py`.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | int | None


class Killed(BaseException):
    """Unwinds a rank that ends without a word; the text says how, for reports."""


class RankSignals:
    """The signal handlers of one rank, at first those of a fresh process."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._handlers: dict[int, Handler] = {signal.SIGINT: signal.default_int_handler}

    def signal(self, signalnum: int, handler: Handler, /) -> Handler:
        """Set a handler and return the former, with the errors of `signal.signal`."""
        if not callable(handler) and handler not in (signal.SIG_DFL, signal.SIG_IGN):
            raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")
        former = self.getsignal(signalnum)
        if signalnum in (signal.SIGKILL, signal.SIGSTOP):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._handlers[int(signalnum)] = handler
        return former

    def getsignal(self, signalnum: int, /) -> Handler:
        """Return a handler, with the errors of `signal.getsignal`."""
        return self._handlers.get(signal.Signals(signalnum), signal.SIG_DFL)

    def raise_signal(self, signalnum: int, /) -> None:
        """Do what python does when the signal arrives; a rank without a handler ends.

        Raises:
            Killed: there is no handler.
        """
        handler = self.getsignal(signalnum)
        if callable(handler):
            handler(int(signalnum), sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
        elif handler == signal.SIG_DFL:
            raise Killed(f"was killed by {signal.Signals(signalnum).name}")


CURRENT: ContextVar[RankSignals] = ContextVar("accel.testing.signals")
