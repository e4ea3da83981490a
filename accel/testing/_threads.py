# SPDX-License-Identifier: Apache-2.0
"""Threads that are kept between simulations, because starting one costs more than a small simulation."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from queue import SimpleQueue


class Worker:
    """A daemon thread that does one job after another until it is retired."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="accel-simulated-rank", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Do this job after those submitted before; it must not raise."""
        self._jobs.put(job)

    def retire(self) -> None:
        """End the thread after the jobs submitted so far."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end, at most `timeout_s` seconds."""
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # else what the job holds lives until the next one


class WorkerPool:
    """Idle workers of one owner."""

    def __init__(self) -> None:
        self._idle: list[Worker] = []

    def take(self, count: int) -> list[Worker]:
        """Return `count` workers, new ones where too few are idle."""
        kept = [self._idle.pop() for _ in range(min(count, len(self._idle)))]
        return kept + [Worker() for _ in range(count - len(kept))]

    def give_back(self, workers: list[Worker]) -> None:
        """Keep workers for later; their last job is about to end."""
        self._idle.extend(workers)

    def close(self) -> None:
        """End all idle workers and wait for them."""
        workers, self._idle = self._idle, []
        for worker in workers:
            worker.retire()
        for worker in workers:
            worker.join(timeout_s=10.0)


def interrupt(thread: int, error: type[BaseException]) -> None:
    """Raise `error` in another thread at its next Python instruction, as Ctrl-C does in the main thread.

    Args:
        thread: the thread's identifier; one that has ended is ignored.
        error: an exception class that is made without arguments.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
