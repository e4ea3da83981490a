# SPDX-License-Identifier: Apache-2.0
"""Time of a pipelined training step against torch's schedule, written by hand.

    accel launch --nproc-per-node 2 --mesh pp=2 tests/benchmarks/pipeline.py

All train the same blocks on the same batches, in turns within one run. Printed is the median time of a step, the
median over rounds of the ratio to the hand-written loop timed in the same round, and the CPU time of a step, that of
both ranks together: its least and its median, which other work on the machine disturbs less. The second loop by hand
gives both ranks the loss, as accel does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import msgspec
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import accel

Loop = Callable[[int], None]
BY_HAND, SHARED, OURS = "torch, by hand", "by hand, shares its loss", "accel"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


def make_blocks(width: int, depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(depth)))


def loss_sum(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum over samples of their means."""
    return (output - targets).square().flatten(1).mean(1).sum()


def by_hand(ctx: accel.DistContext, width: int, depth: int, micro: int, rows: int, *, shares: bool) -> Loop:
    half = depth // 2
    blocks = make_blocks(width, depth)
    own = blocks[:half] if ctx.rank == 0 else blocks[half:]
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-4)
    stage = PipelineStage(own, ctx.rank, 2, ctx.device, group=accel.group_of(ctx, "pp"))
    schedule = Schedule1F1B(stage, n_microbatches=micro, loss_fn=loss_sum, scale_grads=False)
    inputs, targets = make_batch(width, rows)

    def loop(count: int) -> None:
        for _ in range(count):
            losses: list[torch.Tensor] = []
            if ctx.rank == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=targets, losses=losses)
            if shares:
                mean = torch.stack(losses).sum() / rows if losses else torch.zeros(())
                torch.distributed.broadcast(mean, group=accel.group_of(ctx, "pp"), group_src=1)
            grads = [each.grad for each in own.parameters() if each.grad is not None]
            torch._foreach_mul_(grads, 1 / rows)
            power = torch.nn.utils.get_total_norm(grads).square().reshape(1)
            torch.distributed.all_reduce(power, group=accel.group_of(ctx, "pp"))
            assert power.isfinite()
            optimizer.step()
            optimizer.zero_grad()

    return loop


def ours(ctx: accel.DistContext, width: int, depth: int, micro: int, rows: int) -> Loop:
    blocks = make_blocks(width, depth)
    plan = accel.parallel.Plan(micro_batches=micro)
    model, optimizer = accel.prepare(ctx, blocks, torch.optim.AdamW(blocks.parameters(), lr=1e-4), plan=plan)
    inputs, targets = make_batch(width, rows)
    dataset = torch.utils.data.TensorDataset(inputs, targets)
    loader = accel.prepare_loader(ctx, torch.utils.data.DataLoader(dataset, batch_size=rows), global_batch=rows)
    batch = next(iter(accel.batches(ctx, loader)))
    # one that can be taken again and again: it ends where it begins
    start = accel.Cursor()
    batch = msgspec.structs.replace(batch, data=(inputs, targets), start=start, next=start, is_last=False)

    def loop(count: int) -> None:
        state = accel.train_state(ctx)
        for _ in range(count):
            state = state.next(batch)
            inputs, targets = batch.data
            _, state = accel.forward_backward(ctx, model, state, inputs, targets=targets, loss_fn=loss_sum)
            state = accel.optimizer_step(ctx, optimizer, state)

    return loop


def make_batch(width: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(2, rows, 32, width, generator=generator)
    return inputs, targets


def ratio(found: dict[str, list[float]], to: str) -> float:
    """Return the median over rounds of our figure to that of a hand-written loop."""
    return statistics.median(a / b for a, b in zip(found[OURS], found[to], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("width", 128), ("depth", 8), ("micro", 8), ("rows", 32), ("rounds", 15), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with accel.session(device="cpu") as ctx:
        sizes = (options.width, options.depth, options.micro, options.rows)
        loops = {
            BY_HAND: by_hand(ctx, *sizes, shares=False),
            OURS: ours(ctx, *sizes),
            SHARED: by_hand(ctx, *sizes, shares=True),
        }
        times: dict[str, list[float]] = {name: [] for name in loops}
        busy: dict[str, list[float]] = {name: [] for name in loops}
        for loop in loops.values():
            loop(2)
        for _ in range(options.rounds):
            for name, loop in loops.items():
                accel.wait_for_everyone(ctx)
                began, before = time.perf_counter(), time.process_time()
                loop(options.steps)
                times[name].append((time.perf_counter() - began) / options.steps)
                used = torch.tensor((time.process_time() - before) / options.steps, dtype=torch.float64)
                busy[name].append(float(accel.reduce(ctx, used)))
        for name, found in times.items():
            least, middle = min(busy[name]) * 1e3, statistics.median(busy[name]) * 1e3
            wall = statistics.median(found) * 1e3
            accel.print(ctx, f"{name:26s} {wall:8.2f} ms a step   CPU {least:8.2f} ms, median {middle:8.2f} ms")
        for to in (BY_HAND, SHARED):
            accel.print(ctx, f"accel to {to:26s} {ratio(times, to):8.3f}, CPU {ratio(busy, to):8.3f}")


if __name__ == "__main__":
    main()
