# SPDX-License-Identifier: Apache-2.0
"""Calls under way between simulated ranks: a collective of a group, and one side of a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from accel.testing._collectives import SimulatedCall, layout
from accel.testing._scheduler import name_ranks
from accel.testing._sites import Site, call_site


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


class Meeting:
    """One collective call of all ranks of a group.

    Attributes:
        number: meetings of the group before this one.
        call: the call of the first rank to come.
        members: the group.
        brought: contribution of each rank, until all are there.
        result: of the contributions, once all are there.
        sites: line of each rank's call.
        waiters: ranks that wait for the others.
        done: whether all have come.
    """

    __slots__ = ("brought", "call", "done", "members", "number", "result", "sites", "waiters")

    def __init__(self, number: int, call: SimulatedCall, members: Members) -> None:
        self.number = number
        self.call = call
        self.members = members
        self.brought: dict[int, Any] = {}
        self.result: Any = None
        self.sites: dict[int, Site] = {}
        self.waiters: list[int] = []
        self.done = False

    def describe(self, rank: int) -> str:
        """Describe the call of `rank`, its line, and the ranks that have come."""
        came = f"joined by {name_ranks(sorted(self.sites))} of {len(self.members.ranks)}"
        return f"{self.sites[rank].calls(self.call)}: collective #{self.number}{self.members.label}, {came}"


class Transfer:
    """One side of a message between two ranks.

    Args:
        kind: side of the message.
        source: the sender; None for a receive from any rank.
        target: the receiver.
        tag: number that both sides must agree on.
        tensor: the one to send, or to fill.
        members: the group of the message.
    """

    __slots__ = ("done", "kind", "members", "site", "source", "tag", "target", "tensor", "waiters")

    def __init__(
        self,
        kind: Literal["send", "recv"],
        source: int | None,
        target: int,
        tag: int,
        tensor: Tensor,
        members: Members,
    ) -> None:
        self.kind = kind
        self.source = source
        self.target = target
        self.tag = tag
        self.tensor = tensor
        self.members = members
        self.site = call_site()
        self.waiters: list[int] = []
        self.done = False

    @property
    def rank(self) -> int:
        """The rank of this side."""
        return self.target if self.source is None or self.kind == "recv" else self.source

    def fits(self, other: Transfer) -> bool:
        """Whether these are the two sides of one message."""
        either = self.source is None or other.source is None
        return self.kind != other.kind and (either or self.source == other.source)

    def describe(self, rank: int) -> str:
        """Describe the call of `rank` and its line."""
        sender = "any rank" if self.source is None else f"rank {self.source}"
        peer = f"to rank {self.target}" if self.kind == "send" else f"from {sender}"
        return self.site.calls(f"{self.kind}({layout(self.tensor)}) {peer}, tag {self.tag}{self.members.label}")
