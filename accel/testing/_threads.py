# SPDX-License-Identifier: Apache-2.0
"""Threads for ranks: kept between simulations, because starting one costs more than a small simulation, or fresh."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from accel.testing._errors import SimulationError

Job = Callable[[], None]

_NAME = "accel-simulated-rank"


class Worker(Protocol):
    """Something that does a job on a thread of its own."""

    def submit(self, job: Job) -> None:
        """Do this job; it must not raise."""
        ...


class Crew(Protocol):
    """Source of workers, which takes them back."""

    def take(self, count: int) -> list[Worker]:
        """Return `count` workers."""
        ...

    def give_back(self, workers: list[Worker], *, free: bool) -> None:
        """Part with workers; `free` says whether their jobs have ended, or are about to."""
        ...


class KeptWorker:
    """A daemon thread that does one job after another until it is retired."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=_NAME, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs; threads of a process that was forked do not run in the other."""
        return self._thread.is_alive()

    def submit(self, job: Job) -> None:
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


class KeptThreads:
    """Workers whose threads go on to the next run."""

    def __init__(self) -> None:
        self._idle: list[KeptWorker] = []

    def take(self, count: int) -> list[Worker]:
        """Return `count` workers, new ones where too few are idle.

        Raises:
            SimulationError: the system has no more threads.
        """
        taken: list[Worker] = []
        try:
            while len(taken) < count:
                taken.append(self._idle_worker() or KeptWorker())
        except RuntimeError as error:
            self.give_back(taken, free=True)
            raise no_thread(len(taken), count, error) from error
        return taken

    def give_back(self, workers: list[Worker], *, free: bool) -> None:
        """Keep workers for later if they are free; the threads of others end after their job."""
        mine = [worker for worker in workers if isinstance(worker, KeptWorker)]
        if free:
            self._idle.extend(mine)
        else:
            for worker in mine:
                worker.retire()

    def _idle_worker(self) -> KeptWorker | None:
        while True:
            try:
                worker = self._idle.pop()
            except IndexError:  # none left, or another thread took the last
                return None
            if worker.alive:
                return worker

    def close(self) -> None:
        """End all idle workers and wait for them."""
        workers, self._idle = self._idle, []
        for worker in workers:
            worker.retire()
        for worker in workers:
            worker.join(timeout_s=10.0)


class FreshWorker:
    """A thread that starts with its one job and ends with it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        """Start the thread."""
        thread = threading.Thread(target=job, name=_NAME, daemon=True)
        thread.start()
        self._thread = thread

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end, at most `timeout_s` seconds."""
        if self._thread is not None:
            self._thread.join(timeout_s)


class FreshThreads:
    """Workers for a single run."""

    def take(self, count: int) -> list[Worker]:
        """Return `count` workers whose threads have not started."""
        return [FreshWorker() for _ in range(count)]

    def give_back(self, workers: list[Worker], *, free: bool) -> None:
        """Wait for the threads of free workers to end."""
        for worker in workers:
            if free and isinstance(worker, FreshWorker):
                worker.join(timeout_s=10.0)


def no_thread(rank: int, size: int, error: RuntimeError) -> SimulationError:
    """The error of a thread that python could not start."""
    return SimulationError(
        f"no thread for rank {rank} of {size}", got=str(error), fix="Simulate fewer ranks, or raise the user's limit."
    )


def interrupt(thread: int, error: type[BaseException]) -> None:
    """Raise `error` in another thread at its next Python instruction, as Ctrl-C does in the main thread.

    Args:
        thread: the thread's identifier; one that has ended is ignored.
        error: an exception class that is made without arguments.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
