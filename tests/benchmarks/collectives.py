# SPDX-License-Identifier: Apache-2.0
"""Time of `gather` and `reduce` against one hand-packed collective, and against Accelerate when it is installed.

    accel launch --nproc-per-node 2 tests/benchmarks/collectives.py

By hand means: flatten, concatenate, one collective of torch, split, reshape; for a single tensor the collective alone,
which for a reduction overwrites a copy. Variants run in blocks that alternate within one run, so that a machine whose
speed drifts slows all of them alike. Printed is the median over blocks of the ratio to the hand-written one timed in
the same round, and the median time of a call.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import accel

Tree = dict[str, torch.Tensor]
Variant = Callable[[], object]


def gather_by_hand(ctx: accel.DistContext, tree: Tree) -> Tree:
    """One all-gather of everything, for tensors of equal shapes on all ranks."""
    leaves = list(tree.values())
    if len(leaves) == 1:
        return {name: _all_gather(ctx, leaf).view(-1, *leaf.shape[1:]) for name, leaf in tree.items()}
    if len({leaf.dtype for leaf in leaves}) > 1:
        return _gather_bytes_by_hand(ctx, tree)
    rows = _all_gather(ctx, torch.cat([leaf.reshape(-1) for leaf in leaves])).view(ctx.world_size, -1)
    parts = rows.split([leaf.numel() for leaf in leaves], dim=1)
    return {name: part.reshape(-1, *leaf.shape[1:]) for (name, leaf), part in zip(tree.items(), parts, strict=True)}


def _gather_bytes_by_hand(ctx: accel.DistContext, tree: Tree) -> Tree:
    """One all-gather of the bytes of tensors whose sizes are multiples of 8 bytes."""
    leaves = [leaf.contiguous().view(-1).view(torch.uint8) for leaf in tree.values()]
    rows = _all_gather(ctx, torch.cat(leaves)).view(ctx.world_size, -1)
    parts = rows.split([leaf.numel() for leaf in leaves], dim=1)
    return {
        name: part.reshape(-1).view(leaf.dtype).view(-1, *leaf.shape[1:])
        for (name, leaf), part in zip(tree.items(), parts, strict=True)
    }


def reduce_by_hand(ctx: accel.DistContext, tree: Tree) -> Tree:
    """One all-reduce of the tensors of each dtype."""
    leaves = list(tree.values())
    if len(leaves) == 1:
        copies = {name: leaf.clone() for name, leaf in tree.items()}
        dist.all_reduce(*copies.values(), group=ctx.comm.group)
        return copies
    reduced: Tree = {}
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        same = {name: leaf for name, leaf in tree.items() if leaf.dtype == dtype}
        flat = torch.cat([leaf.reshape(-1) for leaf in same.values()])
        dist.all_reduce(flat, group=ctx.comm.group)
        parts = flat.split([leaf.numel() for leaf in same.values()])
        reduced |= {name: part.view(leaf.shape) for (name, leaf), part in zip(same.items(), parts, strict=True)}
    return reduced


def _all_gather(ctx: accel.DistContext, mine: torch.Tensor) -> torch.Tensor:
    out = mine.new_empty(ctx.world_size * mine.numel())
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, mine.view(-1), group=ctx.comm.group)
    return out


def variants(ctx: accel.DistContext, call: str, tree: Tree, *, with_accelerate: bool) -> dict[str, Variant]:
    """The ways to do one thing, the hand-written first."""
    by_hand = gather_by_hand if call == "gather" else reduce_by_hand
    ways: dict[str, Variant] = {
        "torch, by hand": lambda: by_hand(ctx, tree),
        "accel": lambda: accel.gather(ctx, tree) if call == "gather" else accel.reduce(ctx, tree),
    }
    if with_accelerate:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=ctx.device.type == "cpu")
        ways["accelerate"] = lambda: accelerator.gather(tree) if call == "gather" else accelerator.reduce(tree)
    return ways


def compare(
    ctx: accel.DistContext, ways: dict[str, Variant], blocks: int, count: int, clock: Callable[[], float]
) -> None:
    """Time the ways in alternating blocks and print their ratios to the first."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        for _ in range(max(count // 4, 2)):
            way()
    for block in range(blocks):
        for name in list(ways) if block % 2 else list(reversed(ways)):
            accel.wait_for_everyone(ctx)
            start = clock()
            for _ in range(count):
                ways[name]()
            if ctx.device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append((clock() - start) / count)
    reference = times[next(iter(times))]
    for name, own in times.items():
        ratio = statistics.median(mine / theirs for mine, theirs in zip(own, reference, strict=True))
        accel.print(ctx, f"  {name:<16} {statistics.median(own) * 1e6:9.0f} us   {ratio:6.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--blocks", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=0.15, help="roughly, for a block")
    parser.add_argument("--skip-accelerate", action="store_true")
    parser.add_argument("--cpu-time", action="store_true", help="what a process computes, not how long it waits")
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    torch.set_num_threads(1)
    with_accelerate = importlib.util.find_spec("accelerate") is not None and not options.skip_accelerate
    one, two = (torch.float32,), (torch.float32, torch.int64)
    # leaves, elements of each, their dtypes in turn, and roughly the seconds of a call
    cases = [
        *((20, 4, one, 4e-4), (200, 4, one, 1e-3), (20, 64, one, 8e-4), (200, 64, one, 1.5e-3)),
        *((20, 4, two, 8e-4), (200, 4, two, 2e-3), (1, 1 << 22, one, 3e-2), (1, 1 << 24, one, 0.1)),
    ]
    with accel.session() as ctx:
        for call in ("gather", "reduce"):
            for leaves, elements, dtypes, seconds in cases:
                kinds = [dtypes[i % len(dtypes)] for i in range(leaves)]
                tree = {
                    f"leaf {i}": torch.ones(elements, dtype=kind, device=ctx.device) for i, kind in enumerate(kinds)
                }
                what = f"{leaves} x {elements} {' and '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}"
                accel.print(ctx, f"{call} of {what}, {ctx.world_size} ranks, {ctx.device.type}")
                ways = variants(ctx, call, tree, with_accelerate=with_accelerate and elements < 1 << 20)
                compare(ctx, ways, options.blocks, max(int(options.seconds / seconds), 2), clock)


if __name__ == "__main__":
    main()
