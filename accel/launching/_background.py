# SPDX-License-Identifier: Apache-2.0
"""Work on a store that may not answer, done in threads that nobody needs to wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from torch.distributed import DistError  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import RendezvousError

T = TypeVar("T")
_POLL_S = 0.1


def in_background(act: Callable[[], T]) -> Future[T]:
    """Start something in a thread of its own, which does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="accel-launch-store", daemon=True).start()
    return future


def within(seconds: float, act: Callable[[], object]) -> bool:
    """Do something with the store; return False if the store fails or has not answered after `seconds`."""
    try:
        _ = in_background(act).result(seconds)
    except (TimeoutError, DistError, RendezvousError):
        return False
    return True


def until(done: Callable[[], bool], seconds: float) -> None:
    """Poll until `done` returns true or the time is over."""
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
