# SPDX-License-Identifier: Apache-2.0
"""Time of a batch from a sharded loader against torch's DataLoader with DistributedSampler.

    accel launch --nproc-per-node 2 tests/benchmarks/loader.py

Blocks alternate within one run. Also printed: the time to the first batch from the beginning and from the middle of an
epoch of 10**9 samples.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import accel


class Endless(Dataset[int]):
    """A dataset of 10**9 samples that are their own positions."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> int:
        return index


def drain(batches: Iterable[object]) -> float:
    """Iterate to the end; return seconds a batch."""
    start, count = time.perf_counter(), 0
    for _ in batches:
        count += 1
    return (time.perf_counter() - start) / count


def compare(ctx: accel.DistContext, samples: int, batch_size: int, blocks: int) -> None:
    """Time epochs of both loaders in turn."""
    dataset = TensorDataset(torch.randn(samples, 16), torch.arange(samples))
    sampler = DistributedSampler(dataset, num_replicas=ctx.world_size, rank=ctx.rank, shuffle=True)
    plain = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    sharded = accel.prepare_loader(ctx, DataLoader(dataset, batch_size=batch_size, shuffle=True))
    ours, theirs = [], []
    for epoch in range(blocks + 1):
        sampler.set_epoch(epoch)
        theirs.append(drain(plain))
        ours.append(drain(accel.batches(ctx, sharded, accel.Cursor(epoch=epoch))))
    ratio = statistics.median(mine / other for mine, other in zip(ours[1:], theirs[1:], strict=True))
    accel.print(
        ctx,
        f"  {samples:>9,} samples, batch {batch_size:>4}: torch {statistics.median(theirs) * 1e6:7.1f} us   "
        f"accel {statistics.median(ours) * 1e6:7.1f} us   {ratio:5.2f}x",
    )


def resume(ctx: accel.DistContext) -> None:
    """Time to the first batch of an epoch of 10**9 samples, at its beginning and at batch 10,000,000."""
    sharded = accel.prepare_loader(ctx, DataLoader(Endless(), batch_size=32, shuffle=True))
    for at in (0, 10_000_000 * 32 * ctx.world_size):
        times = []
        for _ in range(20):
            start = time.perf_counter()
            _ = next(iter(accel.batches(ctx, sharded, accel.Cursor(consumed=at))))
            times.append(time.perf_counter() - start)
        others = at // (32 * ctx.world_size)
        accel.print(ctx, f"  first batch after {others:>10,} others: {statistics.median(times) * 1e3:.2f} ms")


def main() -> None:
    torch.set_num_threads(1)
    with accel.session(device="cpu") as ctx:
        accel.print(ctx, f"time of a batch, {ctx.world_size} ranks")
        for samples, batch_size in ((20_000, 32), (200_000, 32), (200_000, 512)):
            compare(ctx, samples, batch_size, 7)
        accel.print(ctx, "resume in 10**9 samples")
        resume(ctx)


if __name__ == "__main__":
    main()
