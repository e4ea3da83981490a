# SPDX-License-Identifier: Apache-2.0
"""Changes that simulations make to the whole process while they run: the collector, signals, modes of threads."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, cast

import torch

_MOST = 2**31 - 1  # a threshold is a C int


class SharedCollector:
    """Lets python look for cyclic garbage as often for each rank as it would in a process of the rank's own.

    The collector starts after so many new objects, and goes through all objects of the process now and then. Ranks in
    one process make new objects W times as fast. So the first threshold is W times the one that was found; thresholds
    that somebody sets in between stay.
    """

    def __init__(self) -> None:
        self._found = self._set = gc.get_threshold()
        self._ranks = 0

    def add(self, ranks: int) -> None:
        """Count ranks that begin, or with a negative number those that have ended."""
        self._ranks += ranks
        if gc.get_threshold() == self._set:
            first, *others = self._found
            self._set = (min(first * max(self._ranks, 1), _MOST), *others)
            gc.set_threshold(*self._set)


Handler = Callable[[int, FrameType | None], Any] | int | None


class Killed(BaseException):
    """Unwinds a rank that ends silently; the text is the cause, for reports."""


class RankSignals:
    """The signal handlers of one rank, at first a fresh process's."""

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
        """Do as Python when the signal arrives; a rank without a handler ends by `Killed`."""
        handler = self.getsignal(signalnum)
        if callable(handler):
            handler(int(signalnum), sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
        elif handler == signal.SIG_DFL:
            raise Killed(f"was killed by {signal.Signals(signalnum).name}")


CURRENT: ContextVar[RankSignals] = ContextVar("accel.testing.signals")


_NAMES = ("signal", "getsignal", "raise_signal")
_LOCK = threading.Lock()


class _Changes:
    """The changes, and how many simulations need them."""

    def __init__(self) -> None:
        self.users = 0
        self._threads = torch.get_num_threads()
        self._collector = SharedCollector()
        self._routed = [_Routed(name, self) for name in _NAMES]

    def make(self, ranks: int) -> None:
        """Count a simulation of so many ranks; the first changes the process."""
        self.users += 1
        self._collector.add(ranks)
        if self.users == 1:
            for each in self._routed:
                setattr(signal, each.name, each)
        torch.set_num_threads(1)

    def undo(self, ranks: int) -> None:
        """Count a simulation off; after the last the process is as it was."""
        self.users -= 1
        self._collector.add(-ranks)
        if not self.users:
            for each in self._routed:
                if getattr(signal, each.name) is each:
                    setattr(signal, each.name, each.original)
            self._routed.clear()  # they refer to this object
        is_rank = CURRENT.get(None) is not None
        torch.set_num_threads(1 if is_rank else self._threads)  # of this thread, and of threads that start later


class _Routed:
    """Stands in for a function of `signal`, and asks first whether a simulated rank is calling."""

    def __init__(self, name: str, changes: _Changes) -> None:
        self.name = name
        self.changes = changes
        self.original: Callable[..., Any] = getattr(signal, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mine = CURRENT.get(None)
        # A process forked by a rank, such as a loader's worker, has real signals.
        function = self.original if mine is None or mine.process != os.getpid() else getattr(mine, self.name)
        return function(*args, **kwargs)


@contextmanager
def changed_process(ranks: int) -> Generator[None]:
    """Give so many ranks separate signal handlers and torch one thread, for the block."""
    with _LOCK:
        found: object = signal.signal
        changes = found.changes if isinstance(found, _Routed) else _Changes()
        changes.make(ranks)
    try:
        yield
    finally:
        with _LOCK:
            changes.undo(ranks)


def enter_rank() -> None:
    """Give the calling thread, perhaps of an earlier rank, torch's state of a new thread; operators get one thread."""
    _ = torch.get_num_threads()  # a thread that has never asked would take over what others set later
    torch.set_num_threads(1)
    torch.set_default_device(None)
    torch.set_autocast_enabled("cpu", False)


@contextmanager
def outside_of_modes() -> Generator[None]:
    """Run a block without autograd, autocast and the dispatch modes of this thread, as a backend's own threads do."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False), cast(Any, torch)._C._DisableTorchDispatch():
        yield
