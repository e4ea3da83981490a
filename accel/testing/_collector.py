# SPDX-License-Identifier: Apache-2.0
"""python's cyclic garbage collector while many ranks share it."""

from __future__ import annotations

import gc

_MOST = 2**31 - 1  # a threshold is a C int


class SharedCollector:
    """Lets python look for cyclic garbage as often for each rank as it would in a process of the rank's own.

    The collector starts after so many new objects, and goes through those of the whole process now and then. Ranks in
    one process make new objects W times as fast. So the first threshold is W times the one that was found; thresholds
    that somebody sets in between stay.
    """

    def __init__(self) -> None:
        self._found = self._set = gc.get_threshold()
        self._ranks = 0

    def add(self, ranks: int) -> None:
        """Count ranks that begin, or with a negative number those that have ended."""
        self._ranks += ranks
        if gc.get_threshold() == self._set:
            first, *others = self._found
            self._set = (min(first * max(self._ranks, 1), _MOST), *others)
            gc.set_threshold(*self._set)
