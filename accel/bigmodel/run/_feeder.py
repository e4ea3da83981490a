# SPDX-License-Identifier: Apache-2.0
"""The thread that fetches blocks ahead of their use. It holds nothing of the model while it waits."""

from __future__ import annotations

import threading
import weakref
from queue import SimpleQueue
from typing import Protocol


class Fills(Protocol):
    """The owner of slots."""

    def fill_expected(self) -> None:
        """Fill slots until nothing more is worth fetching."""
        ...


class Feeder:
    """A thread that fills slots when it is woken, until it is closed or its owner is gone.

    The interpreter's exit closes it too, after the read that it is in.
    """

    def __init__(self, owner: Fills, name: str) -> None:
        self._wakes = SimpleQueue[bool]()
        self._thread = threading.Thread(
            target=_feed, args=(weakref.ref(owner), self._wakes), name=f"accel-feeder-{name}", daemon=True
        )
        self._thread.start()
        self._stop = weakref.finalize(owner, _stop, self._wakes, self._thread)
        self.wake = self._wakes.put

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs. A process that another one forks has none of its threads."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread, after the read that it is in."""
        self._stop()


def _feed(owner: weakref.ref[Fills], wakes: SimpleQueue[bool]) -> None:
    while wakes.get():
        found = owner()
        if found is None:
            return
        found.fill_expected()
        del found  # or the thread would keep the model alive


def _stop(wakes: SimpleQueue[bool], thread: threading.Thread) -> None:
    wakes.put(False)
    if thread is not threading.current_thread():
        thread.join()
