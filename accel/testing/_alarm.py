# SPDX-License-Identifier: Apache-2.0
"""The alarm of simulated ranks: all that wait in a call of the run raise, and begin anew once every rank has come."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Protocol

from accel.errors import PeerError
from accel.testing._scheduler import Scheduler, Waitable


class Cuttable(Protocol):
    """Calls under way that can be given up."""

    def give_up(self) -> list[Waitable]:
        """Forget all calls under way; return those that ranks may wait for."""
        ...


class Outage:
    """The failure that has cut the calls of a run, if any.

    Args:
        scheduler: of the run.

    Attributes:
        note: of the rank that rang first; None while calls go through.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.note: bytes | None = None
        self._scheduler = scheduler
        self._cut: set[int] = set()  # identities of calls that were given up
        self._kept: list[Waitable] = []  # so that these stay theirs
        self._renewal = _Renewal()

    def begin(self, note: bytes, groups: Iterable[Cuttable]) -> bytes:
        """Give up all calls under way, unless that was done; return the first note."""
        if self.note is None:
            self.note = note
            for event in [event for group in groups for event in group.give_up()]:
                self._kept.append(event)
                self._cut.add(id(event))
                self._scheduler.happened(event)
        return self.note

    def check(self, event: Waitable | None = None) -> None:
        """Raise `PeerError` where a call begins during an outage, or has been given up."""
        if id(event) in self._cut or (event is None and self.note is not None):
            raise PeerError("the call was given up, because a rank has failed")

    def end(self, rank: int) -> None:
        """Wait until all ranks have come here; from then on calls go through."""
        renewal = self._renewal
        renewal.came += 1
        if renewal.came < self._scheduler.size:
            self._scheduler.wait(rank, renewal)
            return
        self.note = None
        self._renewal = _Renewal()
        self._scheduler.happened(renewal)


class _Renewal:
    """The meeting at which an outage ends."""

    def __init__(self) -> None:
        self.came = 0
        self.done = False
        self.waiters: list[int] = []

    def describe(self, rank: int) -> str:
        """Say what `rank` waits for."""
        return "the group to be opened again, after a rank had failed"


class SimulatedAlarm:
    """One rank's view of a run's outage.

    Args:
        outage: of the run.
        groups: all that are cut.
        rank: the world's number.
    """

    def __init__(self, outage: Outage, groups: Iterable[Cuttable], rank: int) -> None:
        self._outage = outage
        self._groups = groups
        self._rank = rank

    def watching(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def ring(self, note: bytes) -> bytes:
        return self._outage.begin(note, self._groups)

    def cut(self) -> None:
        """Do nothing: no rank is lost here without the run's end."""

    def rung(self) -> bool:
        return self._outage.note is not None

    def renew(self) -> None:
        self._outage.end(self._rank)
