# SPDX-License-Identifier: Apache-2.0
"""Where ranks meet: the n-th collective of every rank is one meeting, and a send meets its receive."""

from __future__ import annotations

from collections import deque
from typing import Literal, NoReturn

import torch
from torch import Tensor

from accel.errors import CollectiveMismatch
from accel.testing._collectives import Buffers, Call, Run, fill, layout
from accel.testing._faults import Injector
from accel.testing._scheduler import Scheduler, Stopped
from accel.testing._sites import Site, call_site

_SAME_CALLS = "Let every rank of the group make the same calls in the same order."


class Meeting:
    """One collective call of all ranks."""

    __slots__ = ("buffers", "call", "done", "number", "sites", "size", "waiters")

    def __init__(self, number: int, call: Call, size: int) -> None:
        self.number = number
        self.call = call
        self.size = size
        self.buffers: dict[int, Buffers] = {}
        self.sites: dict[int, Site | None] = {}
        self.waiters: list[int] = []
        self.done = False

    def describe(self, rank: int) -> str:
        """Say what `rank` called, where, and who has come."""
        came = ", ".join(map(str, sorted(self.sites)))
        return f"{self.call} at {self.sites[rank]}: collective #{self.number}, joined by rank {came} of {self.size}"


class Transfer:
    """One side of a message between two ranks."""

    __slots__ = ("done", "kind", "site", "source", "tag", "target", "tensor", "waiters")

    def __init__(self, kind: Literal["send", "recv"], source: int, target: int, tag: int, tensor: Tensor) -> None:
        self.kind = kind
        self.source = source
        self.target = target
        self.tag = tag
        self.tensor = tensor
        self.site = call_site()
        self.waiters: list[int] = []
        self.done = False

    @property
    def rank(self) -> int:
        """The rank whose side it is."""
        return self.source if self.kind == "send" else self.target

    def describe(self, rank: int) -> str:
        """Say what `rank` called, and where."""
        peer = f"to rank {self.target}" if self.kind == "send" else f"from rank {self.source}"
        return f"{self.kind}({layout(self.tensor)}) {peer}, tag {self.tag}, at {self.site}"


class Rendezvous:
    """The calls under way in one world.

    Args:
        scheduler: whose ranks meet here.
        faults: what was asked to happen to them.
    """

    def __init__(self, scheduler: Scheduler, faults: Injector) -> None:
        self._scheduler = scheduler
        self._faults = faults
        self._joined = [0] * scheduler.size
        self._meetings: dict[int, Meeting] = {}
        self._transfers: dict[tuple[int, int, int], deque[Transfer]] = {}

    def join(self, rank: int, call: Call, buffers: Buffers, run: Run) -> Meeting:
        """Come to the rank's next meeting; the last to come does the work for all.

        Args:
            rank: who comes.
            call: what it calls; the same for all ranks of a meeting.
            buffers: its tensors.
            run: what to do with the tensors of all.

        Raises:
            SimulationError: the calling thread is not the rank.
        """
        self._begin(rank, call.name)
        number = self._joined[rank]
        self._joined[rank] += 1
        meeting = self._meetings.get(number)
        if meeting is None:
            meeting = self._meetings[number] = Meeting(number, call, self._scheduler.size)
        meeting.sites[rank] = call_site()
        if meeting.call != call:
            self._refuse_call(meeting, rank, call)
        meeting.buffers[rank] = buffers
        if len(meeting.buffers) == meeting.size:
            del self._meetings[number]
            self._finish(meeting, run)
        return meeting

    def post(self, kind: Literal["send", "recv"], source: int, target: int, tag: int, tensor: Tensor) -> Transfer:
        """Offer or ask for a message; it is copied when both sides are there, as gloo and nccl do.

        Raises:
            SimulationError: the calling thread is not the rank whose side this is.
        """
        self._begin(source if kind == "send" else target, kind)
        mine = Transfer(kind, source, target, tag, tensor)
        queue = self._transfers.setdefault((source, target, tag), deque())
        if not queue or queue[0].kind == kind:
            queue.append(mine)
            return mine
        other = queue.popleft()
        send, receive = (mine, other) if kind == "send" else (other, mine)
        try:
            with torch.no_grad():
                fill(receive.tensor, send.tensor)
        except CollectiveMismatch as error:
            self._refuse(error, f"{send.describe(source)}; {receive.describe(target)}")
        self._scheduler.happened(mine)
        self._scheduler.happened(other)
        return mine

    def wait(self, rank: int, event: Meeting | Transfer) -> None:
        """Let `rank` wait for the end of a call.

        Raises:
            SimulationError: the calling thread is not the rank.
        """
        self._scheduler.wait(rank, event)

    def unfinished(self) -> list[str]:
        """Describe the calls that were made and not waited for, and whose peers never came."""
        meetings = [f"rank {rank}: {m.describe(rank)}" for m in self._meetings.values() for rank in m.sites]
        return meetings + [f"rank {t.rank}: {t.describe(t.rank)}" for queue in self._transfers.values() for t in queue]

    def _begin(self, rank: int, name: str) -> None:
        self._scheduler.check(rank, name)
        self._faults.call(rank)
        self._scheduler.pause(rank)

    def _finish(self, meeting: Meeting, run: Run) -> None:
        try:
            with torch.no_grad():
                run([meeting.buffers[rank] for rank in range(meeting.size)])
        except CollectiveMismatch as error:
            places = "; ".join(f"rank {rank} at {site}" for rank, site in sorted(meeting.sites.items()))
            self._refuse(error, f"{meeting.call}: {places}")
        meeting.buffers.clear()
        self._scheduler.happened(meeting)

    def _refuse_call(self, meeting: Meeting, rank: int, call: Call) -> NoReturn:
        other = next(iter(meeting.buffers))
        error = CollectiveMismatch(
            f"ranks disagree about collective #{meeting.number}",
            expected=f"{meeting.call} as rank {other} called at {meeting.sites[other]}",
            got=f"{call} from rank {rank}",
            fix=_SAME_CALLS,
        )
        self._refuse(error, str(meeting.sites[rank]))

    def _refuse(self, error: CollectiveMismatch, where: str) -> NoReturn:
        error.where = where
        self._scheduler.stop(error)
        raise Stopped
