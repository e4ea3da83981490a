# SPDX-License-Identifier: Apache-2.0
"""The least that ranks as threads can be: kept threads of which one runs at a time, and one collective, all-gather.

There are no contexts, reports, faults, seeds or time-outs. What is left is what such a simulation cannot do without:
every thread starts its rank and waits for its turn, torch's random stream changes with the turn, each rank has a
process group, and they meet in a collective that goes through `torch.distributed` and compares the ranks' calls.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist

_Group: Any = dist.ProcessGroup
Rank = Callable[[dist.ProcessGroup], object]


class BareRanks:
    """So many threads for one run after another; they end with the process."""

    def __init__(self, size: int) -> None:
        self._jobs: list[SimpleQueue[Callable[[], None]]] = [SimpleQueue() for _ in range(size)]
        for jobs in self._jobs:
            threading.Thread(target=_serve, args=(jobs,), daemon=True).start()

    def run(self, fn: Rank) -> list[object]:
        """Run `fn(group)` on every rank."""
        world = _World(len(self._jobs), fn)
        for rank, jobs in enumerate(self._jobs):
            jobs.put(lambda rank=rank: world.run(rank))
        return world.results()


def _serve(jobs: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        jobs.get()()


class _World:
    """One run."""

    def __init__(self, size: int, fn: Rank) -> None:
        self.size = size
        self.fn = fn
        self.caller = torch.default_generator.get_state()
        self.streams = [self.caller] * size
        self.ready = deque(range(size))
        self.batons = [threading.Lock() for _ in range(size)]
        self.over = threading.Lock()
        for lock in (*self.batons, self.over):
            _ = lock.acquire()
        self.meeting = _Meeting()
        self.found: list[object] = [None] * size
        self.errors: dict[int, BaseException] = {}

    def results(self) -> list[object]:
        self.hand_on()
        _ = self.over.acquire()
        torch.default_generator.set_state(self.caller)
        for error in self.errors.values():
            raise error
        return self.found

    def run(self, rank: int) -> None:
        self.await_turn(rank)
        try:
            self.found[rank] = self.fn(_BareGroup(self, rank))
        except BaseException as error:
            self.errors[rank] = error
        self.hand_on()

    def hand_on(self) -> None:
        (self.batons[self.ready.popleft()] if self.ready else self.over).release()

    def await_turn(self, rank: int) -> None:
        _ = self.batons[rank].acquire()
        torch.default_generator.set_state(self.streams[rank])

    def join(self, rank: int, call: tuple[object, ...], output: torch.Tensor, mine: torch.Tensor) -> _Meeting:
        """Come to the meeting; the last one copies for all."""
        meeting = self.meeting
        meeting.sites[rank] = _call_site()
        meeting.call = meeting.call or call
        assert meeting.call == call
        meeting.buffers[rank] = output, mine
        if len(meeting.buffers) == self.size:
            with torch.no_grad():
                everyone = torch.cat([meeting.buffers[each][1].reshape(-1) for each in range(self.size)])
                for target, _ in meeting.buffers.values():
                    target.view(-1).copy_(everyone)
            meeting.done = True
            self.ready.extend(meeting.waiters)
            self.meeting = _Meeting()
        return meeting

    def wait(self, rank: int, meeting: _Meeting) -> None:
        if not meeting.done:
            meeting.waiters.append(rank)
            self.streams[rank] = torch.default_generator.get_state()
            self.hand_on()
            self.await_turn(rank)


class _Meeting:
    def __init__(self) -> None:
        self.call: tuple[object, ...] = ()
        self.buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.sites: dict[int, tuple[CodeType, int]] = {}
        self.waiters: list[int] = []
        self.done = False


class _BareGroup(_Group):
    def __init__(self, world: _World, rank: int) -> None:
        super().__init__(rank, world.size)
        self._world = world
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world.size

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        call = ("all_gather_single", input.dtype, tuple(input.shape))
        return _BareWork(self._world, self._rank, self._world.join(self._rank, call, output, input))

    _allgather_base = all_gather_single


class _BareWork(dist.Work):
    def __init__(self, world: _World, rank: int, meeting: _Meeting) -> None:
        super().__init__()
        self._world = world
        self._rank = rank
        self._meeting = meeting

    def wait(self, timeout: Any = None) -> bool:
        self._world.wait(self._rank, self._meeting)
        return True


def _call_site() -> tuple[CodeType, int]:
    """Return the nearest line outside of torch and this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename == __file__ or "/torch/" in frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code, frame.f_lineno
