# SPDX-License-Identifier: Apache-2.0
"""Meetings of ranks: the n-th collective of all ranks of a group is one meeting, and a send meets its receive."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

from torch import Tensor

from accel.errors import CollectiveMismatch, PeerError
from accel.testing._collectives import SimulatedCall, fill, layout
from accel.testing._faults import Injector
from accel.testing._networks import Network
from accel.testing._process import outside_of_modes
from accel.testing._scheduler import Scheduler, Stopped, Waitable, name_ranks
from accel.testing._sites import SimulationError, Site, call_site, units_differ


class Members:
    """The ranks of one group, and its name in reports; the group of all ranks needs no mention.

    Args:
        name: c10d's name of the group.
        ranks: the world's numbers of its ranks, in the group's order.
        whole: whether it is the group of all ranks.
    """

    def __init__(self, name: str, ranks: Sequence[int], *, whole: bool) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.label = "" if whole else f" in group {name!r} of {name_ranks(ranks)}"


@dataclasses.dataclass(slots=True, eq=False)
class Meeting:
    """One collective call of all ranks of a group."""

    number: int  # meetings of the group before this one
    call: SimulatedCall  # the call of the first rank to come
    members: Members  # the group
    # Contribution of each rank, until all are there.
    brought: dict[int, Any] = dataclasses.field(default_factory=dict[int, Any])
    result: Any = None  # of the contributions, once all are there
    sites: dict[int, Site] = dataclasses.field(default_factory=dict[int, Site])  # line of each rank's call
    waiters: list[int] = dataclasses.field(default_factory=list[int])  # ranks that wait for the others
    done: bool = False  # whether all have come

    def describe(self, rank: int) -> str:
        """Describe the call of `rank`, its line, and the ranks that have come."""
        came = f"joined by {name_ranks(sorted(self.sites))} of {len(self.members.ranks)}"
        return f"{self.sites[rank].calls(self.call)}: collective #{self.number}{self.members.label}, {came}"


@dataclasses.dataclass(slots=True, eq=False)
class MessageSide:
    """One side of a message between two ranks."""

    kind: Literal["send", "recv"]  # side of the message
    source: int | None  # the sender; None for a receive from any rank
    target: int  # the receiver
    tag: int  # number that both sides must agree on
    tensor: Tensor  # the one to send, or to fill
    members: Members  # the group of the message
    site: Site  # line of the call
    waiters: list[int] = dataclasses.field(default_factory=list[int])  # ranks that wait for the other side
    done: bool = False  # whether both sides have come

    @property
    def rank(self) -> int:
        """The rank of this side."""
        return self.target if self.source is None or self.kind == "recv" else self.source

    def fits(self, other: MessageSide) -> bool:
        """Whether these are the two sides of one message."""
        either = self.source is None or other.source is None
        return self.kind != other.kind and (either or self.source == other.source)

    def describe(self, rank: int) -> str:
        """Describe the call of `rank` and its line."""
        sender = "any rank" if self.source is None else f"rank {self.source}"
        peer = f"to rank {self.target}" if self.kind == "send" else f"from {sender}"
        return self.site.calls(f"{self.kind}({layout(self.tensor)}) {peer}, tag {self.tag}{self.members.label}")


B = TypeVar("B")

_SAME_CALLS = "Let every rank of the group make the same calls in the same order."


class CallTraffic:
    """All calls of a run, by group.

    Args:
        scheduler: of the ranks.
        faults: failures to inject.
        network: backend with the limits to keep.

    Attributes:
        note: of the rank that rang first; None while calls go through.
    """

    def __init__(self, scheduler: Scheduler, faults: Injector, network: Network | None) -> None:
        self.scheduler = scheduler
        self.network: Network | None = network
        self.note: bytes | None = None
        self._faults = faults
        self._given_up: dict[int, Waitable] = {}  # by identity, kept so that it stays theirs
        self._renewal = _Renewal()
        self._groups: dict[tuple[str, tuple[int, ...]], MeetingPoint] = {}

    def rendezvous(self, name: str, ranks: Sequence[int]) -> MeetingPoint:
        """Return the rendezvous of these ranks under that name; the same for all of them."""
        key = (name, tuple(ranks))
        if key not in self._groups:
            for known in self._groups.values():
                if known.members.name == name and set(known.members.ranks) & set(ranks):
                    self._refuse_group(known, ranks)
            whole = not self._groups  # the first group has all ranks
            self._groups[key] = MeetingPoint(self, Members(name, ranks, whole=whole))
        return self._groups[key]

    def _refuse_group(self, known: MeetingPoint, ranks: Sequence[int]) -> NoReturn:
        self.scheduler.stop(
            CollectiveMismatch(
                f"ranks disagree about group {known.members.name!r}",
                expected=f"{name_ranks(known.members.ranks)} as first asked for at {known.site}",
                got=name_ranks(ranks),
                where=str(call_site()),
                fix="Let all ranks make the same groups in the same order, members or not.",
            )
        )
        raise Stopped

    def begin(self, rank: int, name: str) -> None:
        """Let `rank` begin a call on its thread, perhaps after another rank; inject faults, and raise `PeerError`."""
        self.scheduler.check(rank, name)
        self._faults.call(rank)
        self.scheduler.pause(rank)
        self.check()

    def check(self, event: Waitable | None = None) -> None:
        """Raise `PeerError` where a call begins after a rank has rung, or has been given up."""
        if id(event) in self._given_up or (event is None and self.note is not None):
            raise PeerError("the call was given up, because a rank has failed")

    def ring(self, note: bytes) -> bytes:
        """Give up all calls under way, unless a rank has rung before; return the first note."""
        if self.note is None:
            self.note = note
            for event in [event for group in self._groups.values() for event in group.give_up()]:
                self._given_up[id(event)] = event
                self.scheduler.happened(event)
        return self.note

    def renew(self, rank: int) -> None:
        """Wait until all ranks have come here; from then on calls go through."""
        renewal = self._renewal
        renewal.came += 1
        if renewal.came < self.scheduler.size:
            self.scheduler.wait(rank, renewal)
            return
        self.note = None
        self._renewal = _Renewal()
        self.scheduler.happened(renewal)

    def unfinished(self) -> list[str]:
        """Describe calls that nobody waited for and that peers never joined."""
        return [line for rendezvous in self._groups.values() for line in rendezvous.unfinished()]

    def close(self) -> None:
        """Forget the groups: they refer to this object, and would wait for the garbage collector together."""
        self._groups.clear()


class MeetingPoint:
    """The calls under way in one group.

    Args:
        traffic: of the run.
        members: the group's ranks; all ranks below are the world's numbers.
    """

    def __init__(self, traffic: CallTraffic, members: Members) -> None:
        self.members = members
        self.site = call_site()
        self.network: Network | None = traffic.network
        self._traffic = traffic
        self._scheduler = traffic.scheduler
        self._joined = dict.fromkeys(members.ranks, 0)
        self._meetings: dict[int, Meeting] = {}
        self._transfers: dict[tuple[int, int], list[MessageSide]] = {}

    def join(self, rank: int, call: SimulatedCall, brought: B, run: Callable[[Sequence[B]], object]) -> Meeting:
        """Come to the rank's next meeting; the last to come runs `run` on all contributions, by rank, for all."""
        self._traffic.begin(rank, call.name)
        number = self._joined[rank]
        self._joined[rank] += 1
        meeting = self._meetings.get(number)
        if meeting is None:
            meeting = self._meetings[number] = Meeting(number, call, self.members)
        meeting.sites[rank] = call_site()
        if meeting.call != call:
            self._refuse_call(meeting, rank, call)
        meeting.brought[rank] = brought
        if len(meeting.brought) == len(self.members.ranks):
            del self._meetings[number]
            self._finish(meeting, run)
        return meeting

    def post(
        self, kind: Literal["send", "recv"], source: int | None, target: int, tag: int, tensor: Tensor
    ) -> MessageSide:
        """Offer or ask for a message; it is copied when both sides are there, as gloo and nccl do."""
        mine = MessageSide(kind, source, target, tag, tensor, self.members, call_site())
        self._traffic.begin(mine.rank, kind)
        queue = self._transfers.setdefault((target, tag), [])
        other = next((transfer for transfer in queue if transfer.fits(mine)), None)
        if other is None:
            queue.append(mine)
            return mine
        queue.remove(other)
        send, receive = (mine, other) if kind == "send" else (other, mine)
        receive.source = send.source
        try:
            with outside_of_modes():
                fill(receive.tensor, send.tensor)
        except CollectiveMismatch as error:
            self._refuse(error, f"{send.describe(send.rank)}; {receive.describe(target)}")
        self._scheduler.happened(mine)
        self._scheduler.happened(other)
        return mine

    def among(self, name: str, ranks: Sequence[int]) -> MeetingPoint:
        """Return the rendezvous of another group of the same run."""
        return self._traffic.rendezvous(name, ranks)

    def wait(self, rank: int, event: Meeting | MessageSide) -> None:
        """Let `rank` wait for the end of a call; `PeerError` if it was given up because a rank has failed."""
        self._scheduler.wait(rank, event)
        self._traffic.check(event)

    def alarm(self, rank: int) -> SimulatedAlarm | None:
        """Return the alarm by which `rank` ends all calls of the run; None unless this group has all ranks."""
        is_whole = len(self.members.ranks) == self._scheduler.size
        return SimulatedAlarm(self._traffic, rank) if is_whole else None

    def give_up(self) -> list[Waitable]:
        """Forget all calls under way; return those that ranks may wait for."""
        posted = [transfer for queue in self._transfers.values() for transfer in queue]
        given_up: list[Waitable] = [*self._meetings.values(), *posted]
        self._meetings.clear()
        self._transfers.clear()
        self._joined = dict.fromkeys(self.members.ranks, 0)
        return given_up

    def poll(self, rank: int) -> None:
        """Let others continue before `rank` asks how far a call is."""
        self._scheduler.poll(rank)

    def unfinished(self) -> list[str]:
        """Describe calls that nobody waited for and that peers never joined."""
        meetings = [f"rank {rank}: {m.describe(rank)}" for m in self._meetings.values() for rank in m.sites]
        return meetings + [f"rank {t.rank}: {t.describe(t.rank)}" for queue in self._transfers.values() for t in queue]

    def _finish(self, meeting: Meeting, run: Callable[[Sequence[Any]], object]) -> None:
        try:
            with outside_of_modes():
                meeting.result = run([meeting.brought[rank] for rank in self.members.ranks])
        except CollectiveMismatch as error:
            places = "; ".join(f"rank {rank} at {site}" for rank, site in sorted(meeting.sites.items()))
            self._refuse(error, f"{meeting.call}{self.members.label}: {places}")
        except RuntimeError as error:  # no one rank's fault
            what = f"{meeting.call}{self.members.label} cannot be computed: {error}"
            self._scheduler.stop(SimulationError(what, where=str(next(iter(meeting.sites.values())))))
            raise Stopped from error
        meeting.brought.clear()
        self._scheduler.happened(meeting)

    def _refuse_call(self, meeting: Meeting, rank: int, call: SimulatedCall) -> NoReturn:
        other = next(iter(meeting.brought))
        error = CollectiveMismatch(
            f"ranks disagree about collective #{meeting.number}{self.members.label}",
            expected=f"{meeting.call} as rank {other} called at {meeting.sites[other]}",
            got=f"{call} from rank {rank}",
            fix=units_differ(meeting.sites) or _SAME_CALLS,
        )
        self._refuse(error, str(meeting.sites[rank]))

    def _refuse(self, error: CollectiveMismatch, where: str) -> NoReturn:
        error.where = where
        self._scheduler.stop(error)
        raise Stopped


class _Renewal:
    """The meeting at which calls go through again, after a rank had rung."""

    def __init__(self) -> None:
        self.came = 0
        self.done = False
        self.waiters: list[int] = []

    def describe(self, rank: int) -> str:
        """Describe what `rank` waits for."""
        return "the group to be opened again, after a rank had failed"


class SimulatedAlarm(NamedTuple):
    """The alarm of a rank, by its number in the world; see `accel.comm.Alarm`."""

    traffic: CallTraffic
    rank: int

    def watching(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def ring(self, note: bytes) -> bytes:
        return self.traffic.ring(note)

    def cut(self) -> None:
        """Do nothing: no rank is lost here without the run's end."""

    def rung(self) -> bool:
        return self.traffic.note is not None

    def renew(self) -> None:
        self.traffic.renew(self.rank)
