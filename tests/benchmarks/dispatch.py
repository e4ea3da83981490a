# SPDX-License-Identifier: Apache-2.0
"""Time of a batch that rank 0 reads and hands to all ranks, against a hand-written scatter and against Accelerate.

    accel launch --nproc-per-node 2 tests/benchmarks/dispatch.py

The hand-written loop knows structure and shapes beforehand and checks nothing. Blocks of one epoch alternate within one
run; printed are the median time of a step and the median ratios of the blocks. Reading and collating, which is the same
for all, is included; its time alone is printed too. On a machine that does other work, look at the best blocks, or
print with `--cpu-time` what rank 0 computes instead of how long it waits.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

import accel


class Samples(IterableDataset[dict[str, Any]]):
    """Samples of two arrays and a label that cost nothing to make."""

    def __init__(self, samples: int, width: int) -> None:
        self.samples = samples
        self.sample = {"inputs": torch.randn(width), "mask": torch.ones(width, dtype=torch.bool), "label": 1}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(self.samples):
            yield self.sample


def by_hand(ctx: accel.DistContext, steps: int, size: int, width: int) -> Callable[[], Iterable[Any]]:
    """One scatter of known shapes a step."""
    parts = [(torch.float32, (size, width)), (torch.bool, (size, width)), (torch.int64, (size,))]
    sizes = [torch.Size(shape).numel() * dtype.itemsize for dtype, shape in parts]
    group, world = ctx.comm.group, ctx.world_size
    loader = DataLoader(Samples(steps * size * world, width), batch_size=size * world)

    def epoch() -> Iterator[Any]:
        batches = iter(loader) if ctx.is_main_process else None
        for _ in range(steps):
            mine = torch.empty(sum(sizes), dtype=torch.uint8)
            rows: list[torch.Tensor] | None = None
            if batches is not None:
                batch = next(batches)
                leaves = [batch["inputs"], batch["mask"], batch["label"]]
                packed = torch.cat([leaf.view(world, -1).view(torch.uint8).view(world, -1) for leaf in leaves], 1)
                rows = list(packed)
            dist.scatter(mine, rows, group=group, group_src=0)
            flat = mine.split(sizes)
            yield [part.view(dtype).view(shape) for part, (dtype, shape) in zip(flat, parts, strict=True)]

    return epoch


def with_accel(ctx: accel.DistContext, steps: int, size: int, width: int) -> Callable[[], Iterable[Any]]:
    """As `docs/streams.md` has it."""
    raw = DataLoader(Samples(steps * size * ctx.world_size, width), batch_size=size)
    loader = accel.prepare_loader(ctx, raw, stream="dispatch")
    return lambda: accel.batches(ctx, loader, accel.Cursor())


def with_accelerate(ctx: accel.DistContext, steps: int, size: int, width: int) -> Callable[[], Iterable[Any]]:
    """As Accelerate's documentation has it."""
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    raw = DataLoader(Samples(steps * size * ctx.world_size, width), batch_size=size)
    prepared: Any = accelerator.prepare(raw)
    return lambda: prepared


def drain(batches: Iterable[object], clock: Callable[[], float]) -> float:
    """Iterate to the end; return seconds a batch."""
    start, count = clock(), 0
    for _ in batches:
        count += 1
    return (clock() - start) / count


def compare(ctx: accel.DistContext, steps: int, size: int, width: int, blocks: int, clock: Callable[[], float]) -> None:
    """Time epochs of all ways in turn."""
    arguments = (ctx, steps, size, width)
    ways = {"accel": with_accel(*arguments), "by hand": by_hand(*arguments)}
    if importlib.util.find_spec("accelerate") is not None:
        ways["Accelerate"] = with_accelerate(*arguments)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(blocks):
        for name, epoch in ways.items():
            accel.wait_for_everyone(ctx)
            times[name].append(drain(epoch(), clock))
    alone = drain(DataLoader(Samples(steps * size * ctx.world_size, width), batch_size=size * ctx.world_size), clock)
    accel.print(ctx, f"  batch {size} x {width}, reading alone {alone * 1e6:.0f} us")
    for name, mine in times.items():
        ratio = statistics.median(theirs / ours for theirs, ours in zip(mine[1:], times["accel"][1:], strict=True))
        told = f"{ratio:5.2f}x accel; best block {min(mine) * 1e6:8.1f} us, {min(mine) / min(times['accel']):5.2f}x"
        accel.print(ctx, f"    {name:12s} {statistics.median(mine[1:]) * 1e6:8.1f} us, {told}")


def main() -> None:
    parser = argparse.ArgumentParser()
    _ = parser.add_argument("--cpu-time", action="store_true")
    clock = time.process_time if parser.parse_args().cpu_time else time.perf_counter
    torch.set_num_threads(1)
    with accel.session(device="cpu") as ctx:
        accel.print(ctx, f"time of a dispatched batch, {ctx.world_size} ranks")
        for size, width in ((8, 8), (32, 64), (64, 3072)):
            compare(ctx, 100, size, width, 12, clock)


if __name__ == "__main__":
    main()
