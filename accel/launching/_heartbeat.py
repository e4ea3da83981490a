# SPDX-License-Identifier: Apache-2.0
"""Heartbeats of the hosts of a launch, counted in the store where they met."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

SILENT_S = 60.0  # without a heartbeat, after which a host is lost
_LISTEN_S = 5.0  # between two reads, as each host reads those of all others


class Heartbeats:
    """Counts a host's heartbeats and watches those of the others.

    Args:
        store: store of the hosts.
        node_rank: position of this host.
        others: positions of the other hosts.
    """

    def __init__(self, store: Store, node_rank: int, others: Sequence[int]) -> None:
        self._store = store
        self._node_rank = node_rank
        self._others = others
        self._heard: dict[int, tuple[int, float]] = {}  # the last count of each host, and when it was new
        self._due_s = 0.0

    def beat(self) -> None:
        """Count one more of this host."""
        _ = self._store.add(f"heartbeats/{self._node_rank}", 1)

    def find_silent(self) -> list[int]:
        """Return the hosts without a heartbeat for `SILENT_S`, counted from the first call at the earliest."""
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + _LISTEN_S
            for at in self._others:
                count = self._store.add(f"heartbeats/{at}", 0)
                if at not in self._heard or count != self._heard[at][0]:
                    self._heard[at] = count, now_s
        return [at for at, (_, heard_s) in self._heard.items() if now_s - heard_s > SILENT_S]
