# SPDX-License-Identifier: Apache-2.0
"""Time of a layer whose experts ranks share, forward and backward, against all-to-alls by hand and against no sharing.

    accel launch --nproc-per-node 2 tests/benchmarks/experts.py

By hand the capacity is known: each rank sends an equal number of rows to each other one, padded to what the busiest
expert may get, by one all-to-all of fixed sizes there and one back; what is beyond the capacity is dropped. Every rank
with all experts, and no exchange, is the third. Blocks alternate within one run; printed are best blocks and the median
ratio of blocks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import accel

EXPERTS, K, CAPACITY = 8, 2, 1.25


class Swap(torch.autograd.Function):
    """An all-to-all of equal parts, which is its own gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        out = torch.empty_like(rows)
        dist.all_to_all_single(out, rows.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return Swap.forward(ctx, grads[0])


def run_experts(rows: list[Tensor], up: Tensor, down: Tensor) -> list[Tensor]:
    return [functional.silu(one @ a.T) @ b.T for one, a, b in zip(rows, up, down, strict=True)]


def shared(ctx: accel.DistContext) -> Callable[..., Tensor]:
    """As `docs/experts.md` has it."""
    group = accel.group_of(ctx, "ep")

    def layer(tokens: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
        routing = accel.parallel.route_tokens(tokens @ router.T, K)
        sent = accel.parallel.dispatch_tokens(tokens, routing.indices, experts=EXPERTS, group=group)
        outputs = torch.cat(run_experts(list(sent.rows.split(list(sent.counts))), up, down))
        return accel.parallel.combine_tokens(outputs, sent, routing.weights)

    return layer


def by_hand(ctx: accel.DistContext) -> Callable[..., Tensor]:
    """Slots of a fixed number for each expert on each rank."""
    ranks = ctx.world_size

    def layer(tokens: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
        count, width = tokens.shape
        slots = int(CAPACITY * count * K / EXPERTS)
        weights, chosen = (tokens @ router.T).softmax(-1).topk(K, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        flat = chosen.flatten()
        place = functional.one_hot(flat, EXPERTS).cumsum(0).gather(1, flat[:, None])[:, 0] - 1
        kept = place < slots
        at = (flat * slots + place)[kept]
        rows = tokens.repeat_interleave(K, 0)[kept]
        buffer = tokens.new_zeros(EXPERTS * slots, width).index_copy(0, at, rows)
        own = EXPERTS // ranks
        came = Swap.apply(buffer).view(ranks, own, slots, width).transpose(0, 1).reshape(own, ranks * slots, width)
        outputs = torch.stack(run_experts(list(came), up, down))
        back = outputs.view(own, ranks, slots, width).transpose(0, 1).reshape(EXPERTS * slots, width)
        done = tokens.new_zeros(count * K, width)
        done = done.index_copy(0, kept.nonzero()[:, 0], Swap.apply(back)[at])
        return (done.view(count, K, width) * weights[..., None]).sum(1)

    return layer


def alone(_ctx: accel.DistContext) -> Callable[..., Tensor]:
    """All experts on every rank."""

    def layer(tokens: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
        routing = accel.parallel.route_tokens(tokens @ router.T, K)
        sent = accel.parallel.dispatch_tokens(tokens, routing.indices, experts=EXPERTS)
        outputs = torch.cat(run_experts(list(sent.rows.split(list(sent.counts))), up, down))
        return accel.parallel.combine_tokens(outputs, sent, routing.weights)

    return layer


def compare(ctx: accel.DistContext, tokens: int, width: int, blocks: int, steps: int) -> None:
    """Time blocks of all ways in turn."""
    generator = torch.Generator().manual_seed(ctx.rank)
    inputs = torch.randn(tokens, width, generator=generator, requires_grad=True)
    up = torch.randn(EXPERTS, 4 * width, width, generator=generator) / width**0.5
    down = up.transpose(1, 2).contiguous()
    router = torch.randn(EXPERTS, width, generator=torch.Generator().manual_seed(9)) / width**0.5
    own = EXPERTS // ctx.world_size
    ways: dict[str, tuple[Callable[..., Tensor], int]] = {
        "accel": (shared(ctx), own),
        "by hand": (by_hand(ctx), own),
        "not shared": (alone(ctx), EXPERTS),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(blocks):
        for name, (layer, count) in ways.items():
            leaves = [each.detach().clone().requires_grad_() for each in (router, up[:count], down[:count])]
            accel.wait_for_everyone(ctx)
            start = time.perf_counter()
            for _ in range(steps):
                layer(inputs, *leaves).sum().backward()
            times[name].append((time.perf_counter() - start) / steps)
    accel.print(ctx, f"  {tokens} tokens a rank of width {width}, {EXPERTS} experts, {K} of each token")
    for name, mine in times.items():
        ratio = statistics.median(theirs / ours for theirs, ours in zip(times["accel"][1:], mine[1:], strict=True))
        told = f"accel takes {ratio:4.2f}x of it, best blocks {min(times['accel']) / min(mine):4.2f}x"
        accel.print(ctx, f"    {name:12s} {min(mine) * 1e3:7.2f} ms, {told}")


def main() -> None:
    torch.set_num_threads(1)
    with accel.session(device="cpu", mesh="dp=-1,ep=2") as ctx:
        accel.print(ctx, f"a layer of experts, forward and backward, {ctx.world_size} ranks")
        for tokens, width in ((256, 64), (1024, 256)):
            compare(ctx, tokens, width, blocks=8, steps=5)


if __name__ == "__main__":
    main()
