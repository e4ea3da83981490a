# SPDX-License-Identifier: Apache-2.0
"""One rank runs at a time: the next one, the events that others wait for, alarms, and the report of a deadlock."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from accel.testing._sites import Deadlock, SimulationError
from accel.testing._threads import RankStreams

_SLICE_S = 1.0  # Python handles a signal that comes just before a wait only after it
_SHORTEST_S = 0.02  # of a slice: where CPU seconds count, the rest of the time is used up only in part
_IDLE = 0.01  # part of a CPU that a process uses which only waits
_MEETING = 10  # times as long for a run with ranks that keep meeting


class Stopped(BaseException):
    """Unwinds a rank of a run that is over. No `Exception`, so that user code does not catch it by accident."""


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks in the order given, as in "rank 1" or "ranks 0, 4-7"."""
    runs = [[rank for _, rank in run] for _, run in itertools.groupby(enumerate(ranks), lambda each: each[1] - each[0])]
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


class Allowance:
    """The time that a run may take without a meeting of ranks.

    A busy machine lets a process run seldom: time counts as the process's CPU seconds, and by the clock only while it
    uses hardly any. What looks for something in a loop with pauses uses little for ever, so that a tenth of the clock
    counts at least. A run that keeps meeting has ten times as much, in all.

    Args:
        most_s: seconds since the last meeting.
    """

    def __init__(self, most_s: float) -> None:
        self.most_s = most_s
        self._since_s = self._total_s = 0.0
        self._meetings = 0

    def left(self) -> float:
        """Return the seconds that are left until the next meeting; none or fewer once the run has had its time."""
        return min(self.most_s - self._since_s, _MEETING * self.most_s - self._total_s)

    def spend(self, wall_s: float, cpu_s: float, meetings: int) -> None:
        """Count a stretch of the run, in seconds by the clock and of the CPU (more with several threads)."""
        spent = wall_s if cpu_s < _IDLE * wall_s else min(max(cpu_s, wall_s / 10), wall_s)
        self._total_s += spent
        self._since_s = self._since_s + spent if meetings == self._meetings else 0.0
        self._meetings = meetings


class Waitable(Protocol):
    """An event that ranks wait for."""

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
        self._asking: set[int] = set()  # who has asked in vain since something last happened
        self._ended: dict[int, str] = {}
        self._threads: dict[int, int] = {}
        self._process = os.getpid()
        self._meetings = 0  # and beginnings and ends of ranks
        self._batons = [threading.Lock() for _ in range(size)]
        self._stopping = threading.Event()  # set when the run is over, too
        self._over = threading.Event()
        for baton in self._batons:
            baton.acquire()

    def start(self, bodies: list[Callable[[], None]]) -> None:
        """Let the first rank run; each body starts the first time that its rank gets the baton."""
        self._bodies = dict(enumerate(bodies))
        first = self._choose()
        self._streams.load(first)
        self._resume(first)

    def join(self, timeout_s: float, unwind_s: float) -> bool:
        """Return whether all ranks end within `timeout_s` of an `Allowance`, or within `unwind_s` of a stop."""
        allowance = Allowance(timeout_s)
        while not self._stopping.is_set() and (left := allowance.left()) > 0:
            patience = min(max(left, _SHORTEST_S), _SLICE_S)
            began = time.monotonic()
            used = time.process_time()
            if self._stopping.wait(patience):
                break
            wall = min(time.monotonic() - began, patience)  # longer where the whole machine was suspended
            allowance.spend(wall, time.process_time() - used, self._meetings)
        return self._stopping.is_set() and self._over.wait(unwind_s)

    def enter(self, rank: int) -> None:
        """Note that the calling thread is `rank` from now on."""
        self._meetings += 1
        self._threads[rank] = threading.get_ident()

    def leave(self, rank: int, how: str) -> None:
        """Note that `rank` has ended, as in "returned", and pass the baton on for good."""
        self._meetings += 1
        self._ended[rank] = how
        del self._threads[rank]
        if self._any_left():
            following = self._choose()
            self._streams.load(following)
            self._resume(following)
        else:
            self._stopping.set()
            self._over.set()

    def check(self, rank: int, what: str) -> None:
        """Let only the thread of `rank` pass while the run continues; `SimulationError` for any other thread."""
        if self._process != os.getpid():
            raise SimulationError(
                f"{what} was called by a process that simulated rank {rank} has forked",
                fix="Call collectives in the rank itself: the other ranks are threads of its process.",
            )
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
        """Let another rank go first, by the seed."""
        if self._random is not None and self._runnable:
            self._runnable.append(rank)
            self._hand_over(rank)

    def poll(self, rank: int) -> None:
        """Let every other rank run first: `rank` asks whether something has happened, and may ask again."""
        self.check(rank, "is_completed")
        self._asking.add(rank)
        if self._delayed and self._asking.issuperset(self._runnable):  # nothing happens without a delayed one
            self._runnable.append(self._delayed.popleft())
        if self._runnable:
            self._runnable.append(rank)
            self._hand_over(rank)

    def delay(self, rank: int) -> None:
        """Let `rank` continue only when no other rank can."""
        self._delayed.append(rank)
        self._hand_over(rank)

    def wait(self, rank: int, event: Waitable) -> None:
        """Let other ranks run until the event has happened."""
        self.check(rank, "wait")
        self._meetings += 1
        if not event.done:
            event.waiters.append(rank)
            self._waiting[rank] = event
            self._hand_over(rank)

    def happened(self, event: Waitable) -> None:
        """Mark an event as done; ranks that wait for it can continue."""
        event.done = True
        self._meetings += 1
        self._asking.clear()
        for rank in event.waiters:
            if self._waiting.pop(rank, None) is not None:
                self._runnable.append(rank)

    def stop(self, cause: BaseException) -> None:
        """Stop the run; every rank unwinds at its next call. The first cause counts."""
        self.cause = self.cause or cause
        self._stopping.set()

    def thread_of(self, rank: int) -> int | None:
        """The identifier of the thread that runs `rank`; None before it started and after it ended."""
        return self._threads.get(rank)

    def report(self) -> str:
        """Describe each rank's wait or end, one line for each run of equal ones."""
        alike = itertools.groupby(range(self.size), self._status)
        return "".join(f"\n  {name_ranks(list(ranks))}: {status}" for status, ranks in alike)

    def _status(self, rank: int) -> str:
        if rank in self._waiting:
            return f"waiting in {self._waiting[rank].describe(rank)}"
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
            self._streams.swap(rank, following)
            self._resume(following)
            self._batons[rank].acquire()
        if self.cause is not None:
            raise Stopped

    def _resume(self, rank: int) -> None:
        """Let `rank` run; its streams are loaded. A rank that has not begun when the run is stopped never begins."""
        while self.cause is not None and self._bodies.pop(rank, None) is not None:
            if not self._any_left():
                return self._over.set()
            rank = self._choose()
            self._streams.load(rank)
        self.running = rank
        body = self._bodies.pop(rank, None)
        return self._batons[rank].release() if body is None else body()

    def _any_left(self) -> bool:
        return bool(self._runnable or self._waiting or self._delayed)
