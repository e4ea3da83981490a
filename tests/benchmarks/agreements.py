# SPDX-License-Identifier: Apache-2.0
"""Agreements of a save and a load among simulated ranks, and their time on a network that delays every message.

    python tests/benchmarks/agreements.py [--ranks 64] [--delay-ms 0 20]

Rank 0 sends each message late, so that every rank waits as long as for a message over such a network. Work is that of
all ranks in turn, since simulated ranks run one at a time; the delays come on top.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import accel
from accel.comm import Comm, _exchange, _message
from accel.testing import simulate


class Network:
    """Delays the messages of rank 0, and counts them."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.messages = 0

    def around(self, send: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that sends later."""

        def later(comm: Comm, *values: Any) -> Any:
            if comm.rank == 0:
                self.messages += 1
                time.sleep(self.delay_s)
            return send(comm, *values)

        return later

    def timed(self, ctx: accel.DistContext, run: Callable[[], object]) -> tuple[int, float]:
        """Return the messages and the seconds of a call."""
        accel.wait_for_everyone(ctx)
        before, start = self.messages, time.monotonic()
        run()
        return self.messages - before, time.monotonic() - start


def measure(ranks: int, delay_s: float) -> list[tuple[int, float]]:
    """Return messages and seconds of a save and of a load, on rank 0."""
    network = Network(delay_s)

    def body(ctx: accel.DistContext) -> list[tuple[int, float]]:
        model = nn.Linear(16, 16)
        items = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        return [
            network.timed(ctx, lambda: accel.save_state(ctx, folder, items, step=1)),
            network.timed(ctx, lambda: accel.load_state(ctx, folder, items)),
        ]

    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(_message, "start_gathered", network.around(_message.start_gathered)),
        patch.object(_message, "start_range", network.around(_message.start_range)),
        patch.object(_exchange, "gather_bytes", network.around(_exchange.gather_bytes)),
    ):
        return simulate(body, ranks)[0]


def main() -> None:
    """Print a line for each delay."""
    parser = argparse.ArgumentParser(description="Agreements of a save and a load on a network with a delay.")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--delay-ms", type=float, nargs="+", default=[0, 20])
    flags = parser.parse_args()
    for delay in flags.delay_ms:
        (saved, save_s), (loaded, load_s) = measure(flags.ranks, delay / 1e3)
        print(f"{flags.ranks} ranks, {delay:g} ms: save {saved} messages, {save_s:.2f} s;", end=" ")
        print(f"load {loaded} messages, {load_s:.2f} s")


if __name__ == "__main__":
    main()
