# SPDX-License-Identifier: Apache-2.0
"""Time of a batch from a sharded loader against torch's DataLoader with DistributedSampler.

    accel launch --nproc-per-node 2 tests/benchmarks/loader.py [--cpu-time]

Blocks alternate within one run. Also printed: with workers, and with samples seeded one by one; the first batch of an
epoch of 10**9 samples at its beginning and far into it; the order itself, its time and its memory. On a machine that is
busy with other work, `--cpu-time` counts what each process computes and not how long it waits; rows with workers then
leave the workers out.
"""

from __future__ import annotations

import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import accel

Clock = Callable[[], float]


class Endless(Dataset[int]):
    """A dataset of 10**9 samples that are their own positions."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> int:
        return index


class Augmented(Dataset[torch.Tensor]):
    """Samples that take about as long as a small image with a random crop and noise."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        image = torch.full((3, 40, 40), float(index))
        top, left = torch.randint(8, (2,)).tolist()
        return image[:, top : top + 32, left : left + 32] + torch.randn(3, 32, 32)


class Photos(Dataset[torch.Tensor]):
    """Samples as an image classifier has them once they are decoded: cropped, turned round and normalised."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.photo = torch.randint(256, (3, 256, 256), dtype=torch.uint8)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        top, left, turned = torch.randint(32, (3,)).tolist()
        crop = self.photo[:, top : top + 224, left : left + 224].float()
        return ((crop.flip(-1) if turned < 16 else crop) / 255 - 0.45) / 0.225


def drain(batches: Iterable[object], clock: Clock) -> float:
    """Iterate to the end; return seconds a batch."""
    start, count = clock(), 0
    for _ in batches:
        count += 1
    return (clock() - start) / count


def compare(
    ctx: accel.DistContext,
    clock: Clock,
    name: str,
    dataset: Dataset[Any],
    batch_size: int,
    *,
    workers: int = 0,
    **options: Any,
) -> None:
    """Time epochs of both loaders in turn."""
    sampler = DistributedSampler(dataset, num_replicas=ctx.world_size, rank=ctx.rank, shuffle=True)
    both = {"batch_size": batch_size, "num_workers": workers, "persistent_workers": workers > 0}
    plain = DataLoader(dataset, sampler=sampler, **both)
    sharded = accel.prepare_loader(ctx, DataLoader(dataset, shuffle=True, **both), **options)
    ours, theirs = [], []
    for epoch in range(10):
        sampler.set_epoch(epoch)
        blocks: list[tuple[list[float], Callable[[], Iterable[object]]]] = [
            (theirs, lambda: plain),
            (ours, lambda at=epoch: accel.batches(ctx, sharded, accel.Cursor(epoch=at))),
        ]
        for times, make in blocks if epoch % 2 else blocks[::-1]:
            accel.wait_for_everyone(ctx)
            times.append(drain(make(), clock))
    ratios = [mine / other for mine, other in zip(ours[1:], theirs[1:], strict=True)]
    accel.print(
        ctx,
        f"  {name:<52} torch {statistics.median(theirs[1:]) * 1e6:7.1f} us   "
        f"accel {statistics.median(ours[1:]) * 1e6:7.1f} us   {statistics.median(ratios):5.2f}x",
    )


def resume(ctx: accel.DistContext, clock: Clock) -> None:
    """Time to the first batch of an epoch of 10**9 samples, at its beginning and far into it."""
    sharded = accel.prepare_loader(ctx, DataLoader(Endless(), batch_size=32, shuffle=True))
    for others in (0, 10, 10_000_000):
        cursor = accel.skip_first_batches(accel.Cursor(), others, sharded)
        times: list[float] = []
        for _ in range(50):
            accel.wait_for_everyone(ctx)
            start = clock()
            _ = next(accel.batches(ctx, sharded, cursor))
            times.append(clock() - start)
        accel.print(ctx, f"  first batch after {others:>10,} others: {statistics.median(times) * 1e3:.2f} ms")


def order(ctx: accel.DistContext, clock: Clock) -> None:
    """Time and memory of the order alone."""
    for n in (10**6, 10**9, 10**12):
        line = f"  {n:>17,} samples:"
        for count in (32, 65_536):
            positions = torch.randint(n, (count,))
            times: list[float] = []
            for _ in range(20):
                start = clock()
                _ = accel.data.order(0, 0, n).at(positions.clone())
                times.append(clock() - start)
            line += f"   {count:>6,} positions {statistics.median(times) * 1e6:8.0f} us"
        tracemalloc.start()
        found = accel.data.order(0, 0, n)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        accel.print(ctx, f"{line}   {len(found.keys)} keys, {held} bytes")


def main() -> None:
    torch.set_num_threads(1)
    clock = time.process_time if "--cpu-time" in sys.argv else time.perf_counter
    with accel.session(device="cpu") as ctx:
        accel.print(ctx, f"time of a batch, {ctx.world_size} ranks")
        for samples, batch_size in ((2_048, 32), (20_000, 32), (200_000, 32), (200_000, 512)):
            dataset = TensorDataset(torch.randn(samples, 16), torch.arange(samples))
            compare(ctx, clock, f"{samples:,} samples, batch {batch_size}", dataset, batch_size)
        small, images = TensorDataset(torch.randn(20_000, 16)), Augmented(4_000)
        compare(ctx, clock, "20,000 samples, batch 32, 1 worker", small, 32, workers=1)
        compare(ctx, clock, "the same, samples not seeded", small, 32, workers=1, seed_samples=False)
        compare(ctx, clock, "20,000 samples, batch 32, 2 workers, not seeded", small, 32, workers=2, seed_samples=False)
        compare(ctx, clock, "4,000 augmented images, batch 32, 1 worker", images, 32, workers=1)
        compare(ctx, clock, "1,000 photos, batch 32, 1 worker", Photos(1_000), 32, workers=1)
        compare(ctx, clock, "4,000 augmented images, batch 32", images, 32)
        compare(ctx, clock, "the same, samples seeded", images, 32, seed_samples=True)
        accel.print(ctx, "resume in 10**9 samples")
        resume(ctx, clock)
        accel.print(ctx, "order")
        order(ctx, clock)


if __name__ == "__main__":
    main()
