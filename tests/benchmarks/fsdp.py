# SPDX-License-Identifier: Apache-2.0
"""Time of one step of a sharded model against hand-written `fully_shard`.

    OMP_NUM_THREADS=1 accel launch --nproc-per-node 2 tests/benchmarks/fsdp.py

Both train the same transformer blocks on the same batches, in blocks of steps that alternate within one run. Printed
are the median times of a step, the median over blocks of the ratio to the hand-written loop of the same round, and the
least CPU time of a step, which other work on the machine disturbs less. The hand-written loop shards the same units in
the same formats, clips, and looks for inf and NaN as accel does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import accel

Loop = Callable[[int], None]
TOKENS = 64


class Blocks(nn.Module):
    """Encoder blocks and a head."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def make_model(width: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    return Blocks(width, depth)


def make_batch(ctx: accel.DistContext, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(ctx.rank)
    inputs = torch.randn(TOKENS, width, generator=generator)
    return inputs.to(ctx.device), torch.randint(16, (TOKENS,), generator=generator).to(ctx.device)


def hand_written(ctx: accel.DistContext, width: int, depth: int) -> Loop:
    """The loop that an expert writes with torch alone."""
    model: Any = make_model(width, depth).to(ctx.device)
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
    narrow = torch.bfloat16 if ctx.precision.compute == "bf16" else None
    policy = MixedPrecisionPolicy(narrow, torch.float32 if narrow else None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs, targets = make_batch(ctx, width)

    def loop(count: int) -> None:
        for _ in range(count):
            nn.functional.cross_entropy(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()
            optimizer.zero_grad()

    return loop


def with_accel(ctx: accel.DistContext, width: int, depth: int) -> Loop:
    """The loop of the README, its batch made once."""
    model = make_model(width, depth)
    model, optimizer = accel.prepare(ctx, model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    inputs, targets = make_batch(ctx, width)

    def loop(count: int) -> None:
        accum, scaler = accel.Accumulation(), accel.loss_scale(ctx)
        for _ in range(count):
            accum = accum.next()
            with accel.training.parts.accumulate(ctx, accum, model):
                with accel.autocast(ctx):
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                accum = accel.training.parts.backward(ctx, loss, scaler, accum)
            step = accel.training.parts.optimizer_step(ctx, optimizer, scaler, accum, max_norm=1.0)
            accum, scaler = step.accum, step.scaler

    return loop


def measure(loops: dict[str, Loop], rounds: int, count: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return seconds of a step for each loop and round, and the least CPU seconds; the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in loops}
    cpu: dict[str, list[float]] = {name: [] for name in loops}
    for at in range(rounds + 1):
        for name in list(loops) if at % 2 else list(loops)[::-1]:
            start, busy = time.perf_counter(), time.process_time()
            loops[name](count)
            times[name].append((time.perf_counter() - start) / count)
            cpu[name].append((time.process_time() - busy) / count)
    return {name: each[1:] for name, each in times.items()}, {name: min(each[1:]) for name, each in cpu.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--count", type=int, default=10)
    arguments = parser.parse_args()
    with accel.session(strategy="fsdp") as ctx:
        shape = (arguments.width, arguments.depth)
        loops = {"torch, by hand": hand_written(ctx, *shape), "accel": with_accel(ctx, *shape)}
        times, cpu = measure(loops, arguments.rounds, arguments.count)
        if not ctx.is_main_process:
            return
        by_hand = times["torch, by hand"]
        for name, each in times.items():
            ratio = statistics.median(own / hand for own, hand in zip(each, by_hand, strict=True))
            wall = f"{statistics.median(each) * 1e3:8.2f} ms  {ratio:5.2f}x"
            print(f"{name:16} {wall}  CPU {cpu[name] * 1e3:8.2f} ms  {ctx.precision.name}")


if __name__ == "__main__":
    main()
