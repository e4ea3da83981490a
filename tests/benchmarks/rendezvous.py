# SPDX-License-Identifier: Apache-2.0
"""Requests of each rank to the store where ranks meet, counted on threads with connections of their own.

    python tests/benchmarks/rendezvous.py [--ranks 2 64 256 1024] [--late-s 2]

The last rank comes some seconds after the others, which wait for it. With --absent it does not come at all, and every
other rank names it. Requests are those of accel; torch's own, to open the group, come on top.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import threading
import time
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from torch.distributed import PrefixStore

import accel
from accel.comm import _rendezvous
from accel.env import read_env

_REQUESTS = ("add", "append", "check", "compare_set", "get", "set")


def _counting(requests: dict[int, int], name: str) -> Any:
    original = getattr(PrefixStore, name)

    def counted(store: PrefixStore, *values: Any) -> Any:
        thread = threading.get_ident()
        requests[thread] = requests.get(thread, 0) + 1
        return original(store, *values)

    return counted


def measure(ranks: int, late_s: float, *, absent: bool) -> tuple[list[int], list[float]]:
    """Return requests and seconds of each rank that came."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    requests: dict[int, int] = {}
    seconds: list[float] = []
    kept: list[Any] = []

    def meet(rank: int) -> None:
        env = read_env(common | {"RANK": str(rank)})
        began = time.monotonic()
        try:
            kept.append(_rendezvous.open_store(env, late_s if absent else 60))
        except accel.errors.PeerError as error:
            kept.append(error)
        seconds.append(time.monotonic() - began)

    with ExitStack() as stack:
        for name in _REQUESTS:
            _ = stack.enter_context(patch.object(PrefixStore, name, _counting(requests, name)))
        threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(ranks)]
        for thread in threads[:-1]:
            thread.start()
        if not absent:
            time.sleep(late_s)
            threads[-1].start()
        for thread in threads[: ranks - absent]:
            thread.join()
    return list(requests.values()), seconds


def main() -> None:
    """Print a line for each number of ranks."""
    parser = argparse.ArgumentParser(description="Requests of ranks that meet.")
    parser.add_argument("--ranks", type=int, nargs="+", default=(2, 64, 256, 1024))
    parser.add_argument("--late-s", type=float, default=2.0)
    parser.add_argument("--absent", action="store_true")
    flags = parser.parse_args()
    for ranks in flags.ranks:
        requests, seconds = measure(ranks, flags.late_s, absent=flags.absent)
        usual = f"{statistics.median(requests):.0f} requests a rank, {sum(requests)} in all"
        print(f"{ranks} ranks: {usual}, {max(seconds):.1f} s", flush=True)


if __name__ == "__main__":
    main()
