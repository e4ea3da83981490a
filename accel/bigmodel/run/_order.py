# SPDX-License-Identifier: Apache-2.0
"""The order of streamed blocks, planned at first and then observed, and the next slot to fill. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class ObservedOrder:
    """The successor of each block: that of the plan until it ran once, then the one that followed it last.

    Blocks are numbers from 0 in the order of the plan.
    """

    def __init__(self, count: int) -> None:
        self._next = [*range(1, count), 0]
        self.last = count - 1

    def ran(self, block: int) -> bool:
        """Note that a block runs; return whether another one was expected."""
        surprise = self._next[self.last] != block
        self._next[self.last] = block
        self.last = block
        return surprise

    def ahead(self, count: int) -> list[int]:
        """Return at most `count` blocks that are expected after the last one, the nearest first, each once."""
        found: list[int] = []
        block = self._next[self.last]
        while len(found) < count and block != self.last and block not in found:
            found.append(block)
            block = self._next[block]
        return found


def choose_fill(
    held: Sequence[int | None], free: Sequence[bool], demanded: Sequence[int], ahead: Sequence[int]
) -> tuple[int, int] | None:
    """Return the block to fetch next and the slot for it; None if nothing is worth fetching.

    A demanded block comes first. Others come in the order expected, and replace only a block that is wanted later.

    Args:
        held: by slot, the block that it holds or is being filled with; None for an empty one.
        free: by slot, whether it may be filled now.
        demanded: blocks that a thread waits for, the first come first.
        ahead: blocks expected next, the nearest first; others are wanted later than all of these.
    """
    spare = [slot for slot, is_free in enumerate(free) if is_free]
    if not spare:
        return None
    distance = {block: at for at, block in enumerate(ahead)}

    def wanted(slot: int) -> tuple[bool, int]:
        block = held[slot]
        return block is None, len(ahead) if block is None else distance.get(block, len(ahead))

    victim = max(spare, key=wanted)
    for block in demanded:
        if block not in held:
            return block, victim
    for at, block in enumerate(ahead[: len(held)]):
        if block not in held and at < wanted(victim)[1]:
            return block, victim
    return None
