# SPDX-License-Identifier: Apache-2.0
"""Clocks of a simulated device's streams and its host: accesses to memory with nothing between them are races."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from accel.testing._device_memory import Access, MemoryBlock

HOST = 0

Clock = dict[int, int]
"""The number of operations of each actor that come before."""


def join(clock: Clock, other: Mapping[int, int]) -> None:
    """Let what comes before another clock come before this one, too."""
    for actor, count in other.items():
        if clock.get(actor, 0) < count:
            clock[actor] = count


class RaceWatch:
    """Looks at each access in program order, by vector clocks (Mattern 1988; Lamport 1978).

    Attributes:
        host: the host's clock.
        races: a line for each pair of accesses with nothing between them.
    """

    def __init__(self) -> None:
        self.host: Clock = {HOST: 0}
        self.races = list[str]()
        self._unseen: list[tuple[int, int, Callable[[], object]]] = []

    def tick(self) -> int:
        """Count an operation of the host, and return its number."""
        self.host[HOST] += 1
        return self.host[HOST]

    def look(self, block: MemoryBlock, access: Access, clock: Mapping[int, int]) -> None:
        """Compare an access with those before it, and remember it."""
        kept = list[Access]()
        for former in block.log:
            is_after = former.actor == access.actor or clock.get(former.actor, 0) >= former.number
            overlaps = access.first < former.end and former.first < access.end
            if overlaps and not is_after and (access.writes or former.writes):
                self.races.append(_race(access, former, block))
            covers = access.first <= former.first and former.end <= access.end
            # what comes after this access also comes after the former one, if nothing is lost by forgetting it
            is_told = is_after and covers and (access.writes or (not former.writes and former.actor == access.actor))
            if not is_told:
                kept.append(former)
        block.log = [*kept, access]

    def join_host(self, clock: Mapping[int, int]) -> None:
        """Let the host know of what comes before a clock."""
        join(self.host, clock)
        known = [each for each in self._unseen if self.host.get(each[0], 0) >= each[1]]
        self._unseen = [each for each in self._unseen if each not in known]
        for _, _, then in known:
            _ = then()

    def once_known(self, actor: int, count: int, then: Callable[[], object]) -> None:
        """Call a function once the host knows of a stream's operation."""
        self._unseen.append((actor, count, then))


def _race(access: Access, former: Access, block: MemoryBlock) -> str:
    now = f"{access.name} on {_name(access.actor)} {'writes' if access.writes else 'reads'}"
    before = f"{former.name} on {_name(former.actor)} {'wrote' if former.writes else 'read'}"
    return f"{now}, {before}: nothing between them ({block.kind} memory)"


def _name(actor: int) -> str:
    return "the host" if actor == HOST else f"stream {actor}"
