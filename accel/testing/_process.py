# SPDX-License-Identifier: Apache-2.0
"""Changes that simulations make to the whole process while they run.

These are the functions of `signal`, torch's thread count, and the threshold of python's garbage collector.

The first simulation makes the changes and the last one undoes them; blocks nest, and overlap in several threads. What
they have to remember in between is held by the stand-ins that they put into `signal`, and by nothing else.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

from accel.testing._collector import SharedCollector
from accel.testing._signals import CURRENT

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
    """Give so many ranks signal handlers of their own and torch one thread, for the block."""
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
    """Give the calling thread what torch gives a new one; it may have served another rank before.

    One thread for operators: each rank would else have a team of its own.
    """
    _ = torch.get_num_threads()  # a thread that has never asked would take over what others set later
    torch.set_num_threads(1)
    torch.set_default_device(None)
    torch.set_autocast_enabled("cpu", False)
