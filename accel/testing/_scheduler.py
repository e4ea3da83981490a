# SPDX-License-Identifier: Apache-2.0
"""One rank runs at a time: who goes on, who waits for what, and what to say when nobody can go on.

A rank gives up the baton only where it must wait for others (and, with a seed, before each of its calls). Because
nobody else runs meanwhile, "no rank can go on" is a fact and not a guess by time-out, and a run can be repeated.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Protocol

from accel.testing._errors import Deadlock, SimulationError
from accel.testing._streams import RankStreams


class Stopped(BaseException):
    """Unwinds a rank of a run that is over. No `Exception`, so that user code does not catch it by accident."""


class Waitable(Protocol):
    """What a rank can wait for."""

    done: bool
    waiters: list[int]

    def describe(self, rank: int) -> str:
        """Say what `rank` waits for, and where."""
        ...


class Scheduler:
    """Hands the baton from rank to rank.

    Args:
        size: number of ranks.
        seed: fixes a random schedule; None goes round in rank order.
        streams: each rank's random streams, swapped with the baton.

    Attributes:
        cause: why the run is being stopped; None while all is well.
        running: the rank that has the baton.
    """

    def __init__(self, size: int, seed: int | None, streams: RankStreams) -> None:
        self.size = size
        self.cause: BaseException | None = None
        self.running = -1
        self._streams = streams
        self._random = None if seed is None else Random(seed)
        self._bodies: dict[int, Callable[[], None]] = {}
        self._runnable = deque(range(size))
        self._waiting: dict[int, Waitable] = {}
        self._delayed: deque[int] = deque()
        self._ended: dict[int, str] = {}
        self._threads: dict[int, int] = {}
        self._batons = [threading.Lock() for _ in range(size)]
        self._over = threading.Event()
        for baton in self._batons:
            baton.acquire()

    def start(self, bodies: list[Callable[[], None]]) -> None:
        """Let the first rank run; each body starts the first time that its rank gets the baton."""
        self._bodies = dict(enumerate(bodies))
        self._resume(self._choose())

    def join(self, timeout_s: float) -> bool:
        """Wait until all ranks have ended, at most `timeout_s` seconds; tell whether they have."""
        return self._over.wait(timeout_s)

    def enter(self, rank: int) -> None:
        """Note that the calling thread is `rank` from now on."""
        self._threads[rank] = threading.get_ident()

    def leave(self, rank: int, how: str) -> None:
        """Note that `rank` has ended, and hand the baton on for good.

        Args:
            rank: the rank.
            how: what a report says of it, such as "returned".
        """
        self._ended[rank] = how
        del self._threads[rank]
        if self._runnable or self._waiting or self._delayed:
            self._resume(self._choose())
        else:
            self._over.set()

    def check(self, rank: int, what: str) -> None:
        """Let only the thread of `rank` pass, and only while the run goes on.

        Args:
            rank: whose call it is.
            what: the call, for the message.

        Raises:
            SimulationError: another thread calls.
        """
        if self._threads.get(rank) != threading.get_ident():
            raise SimulationError(
                f"{what} was called by a thread that is not the simulated rank {rank}",
                expected=f"the thread that runs rank {rank}, before its function has returned",
                got=f"thread {threading.current_thread().name!r}",
                fix="Call collectives on the rank's own thread: a simulation cannot follow other threads.",
            )
        if self.cause is not None:
            raise Stopped

    def pause(self, rank: int) -> None:
        """Let another rank go first if the seed says so."""
        if self._random is not None and self._runnable:
            self._runnable.append(rank)
            self._hand_over(rank)

    def delay(self, rank: int) -> None:
        """Let `rank` go on only when no other rank can."""
        self._delayed.append(rank)
        self._hand_over(rank)

    def wait(self, rank: int, event: Waitable) -> None:
        """Let other ranks run until the event has happened."""
        self.check(rank, "wait")
        if not event.done:
            event.waiters.append(rank)
            self._waiting[rank] = event
            self._hand_over(rank)

    def happened(self, event: Waitable) -> None:
        """Mark an event as done; those who wait for it can go on."""
        event.done = True
        for rank in event.waiters:
            if self._waiting.pop(rank, None) is not None:
                self._runnable.append(rank)

    def stop(self, cause: BaseException) -> None:
        """Stop the run; every rank unwinds at its next call. The first cause counts."""
        self.cause = self.cause or cause

    def thread_of(self, rank: int) -> int | None:
        """The identifier of the thread that runs `rank`; None before it started and after it ended."""
        return self._threads.get(rank)

    def report(self) -> str:
        """One line for each rank: where it waits, or how it ended."""
        return "".join(f"\n  rank {rank}: {self._status(rank)}" for rank in range(self.size))

    def _status(self, rank: int) -> str:
        if rank in self._waiting:
            return f"waits in {self._waiting[rank].describe(rank)}"
        if rank in self._delayed:
            return "delayed, as asked for"
        return self._ended.get(rank, "running" if rank in self._threads else "not started")

    def _choose(self) -> int:
        if not self._runnable and self._delayed:
            self._runnable.append(self._delayed.popleft())
        if not self._runnable:
            self.stop(
                Deadlock(
                    f"deadlock, no rank of {self.size} can go on",
                    got=self.report(),
                    fix="Let every rank of the group make the same calls in the same order.",
                )
            )
            self._runnable.extend(self._waiting)  # each wakes up to see that the run is over
            self._waiting.clear()
        if self._random is not None:
            self._runnable.rotate(-self._random.randrange(len(self._runnable)))
        return self._runnable.popleft()

    def _hand_over(self, rank: int) -> None:
        following = self._choose()
        if following != rank:
            self._streams.save(rank)
            self._resume(following)
            self._batons[rank].acquire()
        if self.cause is not None:
            raise Stopped

    def _resume(self, rank: int) -> None:
        self._streams.load(rank)
        self.running = rank
        body = self._bodies.pop(rank, None)
        if body is None:
            self._batons[rank].release()
        else:
            body()
