# SPDX-License-Identifier: Apache-2.0
"""Time of attention over a sequence that ranks share, against an equal share of attention over all of it.

    OMP_NUM_THREADS=1 accel launch --nproc-per-node 2 --mesh cp=2 tests/benchmarks/context_parallel.py

Every rank computes forward and backward of the whole sequence by torch's `scaled_dot_product_attention`, and then its
part by each method, in blocks that alternate within one run. Printed is the median time, and the median over blocks of
its ratio to the whole attention divided by the number of ranks: 1.00x would be parallel work without any cost.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor, nn

import accel
from accel.topology import ContextMethod

WHOLE = "torch, whole"


def forward_backward(attend: Callable[..., Tensor], tensors: dict[str, Tensor]) -> Callable[[], None]:
    """A forward and a backward of attention over tensors that were cut before."""
    leaves = [tensors[name].clone().requires_grad_() for name in "qkv"]

    def run() -> None:
        out = attend(*leaves)
        torch.autograd.backward(out, tensors["grad"])
        for each in leaves:
            each.grad = None

    return run


def variants_of(ctx: accel.DistContext, options: argparse.Namespace, length: int) -> dict[str, Callable[[], None]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": options.heads, "k": options.key_heads, "v": options.key_heads, "grad": options.heads}
    dtype = torch.bfloat16 if ctx.device.type == "cuda" else torch.float32
    whole = {
        name: torch.randn(1, heads, length, options.dim, generator=generator).to(ctx.device, dtype)
        for name, heads in shapes.items()
    }
    part = accel.parallel.split_sequence(ctx, whole, dim=2)

    def all_of_it(*leaves: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)

    def by(method: Any) -> Callable[..., Tensor]:
        return lambda *leaves: accel.parallel.context_attention(ctx, *leaves, method=method)

    shared = {method: forward_backward(by(method), part) for method in get_args(ContextMethod)}
    return {WHOLE: forward_backward(all_of_it, whole), **shared}


def compare(ctx: accel.DistContext, variants: dict[str, Callable[[], None]], blocks: int) -> None:
    times: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        run()
    names = list(variants)
    for block in range(blocks):
        first = block % len(names)
        for name in names[first:] + names[:first]:
            accel.wait_for_everyone(ctx)
            start = time.perf_counter()
            variants[name]()
            if ctx.device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    size = ctx.axis("cp").size
    for name, own in times.items():
        share = 1 if name == WHOLE else size
        ratio = statistics.median(mine * share / whole for mine, whole in zip(own, times[WHOLE], strict=True))
        accel.print(ctx, f"  {name:<14} {statistics.median(own) * 1e3:8.1f} ms   {ratio:5.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--key-heads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64, help="of a head")
    parser.add_argument("--blocks", type=int, default=12)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    with accel.session() as ctx:
        for length in options.lengths:
            shapes = f"{options.heads} heads, {options.key_heads} of keys, dim {options.dim}"
            accel.print(ctx, f"{length} positions, {shapes}, {ctx.axis('cp').size} ranks, {ctx.device.type}")
            compare(ctx, variants_of(ctx, options, length), options.blocks)


if __name__ == "__main__":
    main()
