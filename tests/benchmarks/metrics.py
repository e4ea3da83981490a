# SPDX-License-Identifier: Apache-2.0
"""Cost of running metrics: adding 10 scalars a step, step statistics, and a read over all ranks.

    accel launch --nproc-per-node 2 tests/benchmarks/metrics.py

Printed are CPU microseconds of the thread that trains, which other work on the machine disturbs less than time. Beside
accel: a tensor addition for each scalar, by hand, and torchmetrics' `MeanMetric` if it is installed; for a read, one
all-gather of torch's. Blocks of all variants alternate, and medians are taken.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import accel

Loop = Callable[[int], object]
SCALARS = 10
MIXED = {"loss": "mean", "accuracy": "mean", "norm": "max", "step_s": "sum", "wait_s": "sum", "tokens": "count"}


def adding(kinds: dict[str, Any], values: dict[str, Any]) -> Loop:
    def loop(count: int) -> None:
        metrics = accel.metrics.running_metrics(**kinds)
        for _ in range(count):
            metrics = metrics.add(64, **values)

    return loop


def by_hand(values: dict[str, torch.Tensor]) -> Loop:
    def loop(count: int) -> None:
        sums = {name: torch.zeros((), dtype=torch.float64) for name in values}
        for _ in range(count):
            sums = {name: sums[name] + value * 64 for name, value in values.items()}

    return loop


def by_torchmetrics(values: dict[str, torch.Tensor]) -> Loop:
    from torchmetrics import MeanMetric

    def loop(count: int) -> None:
        metrics = {name: MeanMetric() for name in values}
        for _ in range(count):
            for name, value in values.items():
                metrics[name].update(value, 64)

    return loop


def stepping(ctx: accel.DistContext) -> Loop:
    """Step statistics with a loss, of batches that are there already."""
    loader = accel.prepare_loader(ctx, DataLoader(range(64), batch_size=4))
    batch = next(accel.batches(ctx, loader))
    state = accel.train_state(ctx)
    loss = torch.rand(())

    def loop(count: int) -> None:
        stats = accel.metrics.step_statistics(loss="mean")
        for _ in range(count):
            stats = stats.add(batch, state, tokens=4096, loss=loss)

    return loop


def reading(ctx: accel.DistContext, kinds: dict[str, Any], values: dict[str, Any]) -> Loop:
    metrics = accel.metrics.running_metrics(**kinds).add(64, **values)

    def loop(count: int) -> None:
        for _ in range(count):
            _ = metrics.read(ctx)

    return loop


def gathering() -> Loop:
    row = torch.zeros(2 * SCALARS, dtype=torch.float64)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]

    def loop(count: int) -> None:
        for _ in range(count):
            _ = dist.all_gather(rows, row)

    return loop


def variants(ctx: accel.DistContext) -> dict[str, tuple[Loop, int]]:
    """Each loop, and how often a block runs it."""
    scalars: dict[str, torch.Tensor] = {f"m{i}": torch.rand(()) for i in range(SCALARS)}
    means = dict.fromkeys(scalars, "mean")
    loss = torch.rand(())
    step = {"loss": loss, "accuracy": loss, "norm": loss, "step_s": 0.1, "wait_s": 0.01, "tokens": 4096}
    found: dict[str, tuple[Loop, int]] = {
        "add of 10 tensors": (adding(means, scalars), 1000),
        "add of 10 numbers": (adding(means, dict.fromkeys(scalars, 0.5)), 1000),
        "add of 3 tensors and 3 numbers": (adding(MIXED, step), 1000),
        "step statistics with a loss": (stepping(ctx), 1000),
        "10 tensor additions, by hand": (by_hand(scalars), 1000),
    }
    if importlib.util.find_spec("torchmetrics"):
        found["10 of torchmetrics' MeanMetric"] = (by_torchmetrics(scalars), 100)
    found["read of 10"] = (reading(ctx, means, scalars), 100)
    if ctx.world_size > 1:
        found["all-gather, by hand"] = (gathering(), 100)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    _ = parser.add_argument("--blocks", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    took: dict[str, list[float]] = {}
    with accel.session(device="cpu") as ctx:
        loops = variants(ctx)
        for loop, _ in loops.values():
            _ = loop(10)
        for _ in range(options.blocks):
            for label, (loop, count) in loops.items():
                accel.wait_for_everyone(ctx)
                began = time.thread_time()
                _ = loop(count)
                took.setdefault(label, []).append((time.thread_time() - began) / count)
        for label, seconds in took.items():
            accel.print(ctx, f"{label:34}{statistics.median(seconds) * 1e6:8.1f} us", flush=True)


if __name__ == "__main__":
    main()
