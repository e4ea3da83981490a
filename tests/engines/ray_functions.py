# SPDX-License-Identifier: Apache-2.0
"""Functions that ranks on a Ray cluster run; in a module of their own, as their processes import them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

import accel


def train(ctx: accel.DistContext, steps: int) -> tuple[int, int, float]:
    """Train on batches of one dataset; the weights are the same on every rank."""
    torch.manual_seed(ctx.rank)
    generator = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(21, 4, generator=generator))
    loader = accel.prepare_loader(ctx, torch.utils.data.DataLoader(data, batch_size=4), global_batch=4)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accel.prepare(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = accel.train_state(ctx)
    while state.updates < steps:
        for batch in accel.batches(ctx, loader, state):
            state = state.next(batch)
            state = accel.backward(ctx, model(batch.data[0]).square().mean(), state)
            state = accel.optimizer_step(ctx, optimizer, state)
    accel.print(ctx, f"trained {state.updates} steps")
    return ctx.rank, os.getppid(), accel.unwrap_model(model).weight.sum().item()


def fail_on_one(ctx: accel.DistContext) -> None:
    """Raise on rank 1, while rank 0 waits for it."""
    if ctx.rank == 1:
        raise ValueError("no such value")
    accel.wait_for_everyone(ctx)


def lose_actor(ctx: accel.DistContext, note: str) -> None:
    """Kill the actor that holds rank 1, while rank 0 waits for it."""
    Path(note, f"pid-{ctx.rank}").write_text(str(os.getpid()))
    accel.wait_for_everyone(ctx)
    if ctx.rank == 1:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    accel.wait_for_everyone(ctx)


def stop_when_asked(ctx: accel.DistContext, note: str) -> None:
    """Count steps until a stop request, and note at which step each rank saw it."""
    with accel.preempt.stop_requests(ctx, [signal.SIGTERM]) as requests:
        for step in range(10_000):
            Path(note, f"begun-{ctx.rank}").touch()
            if stop := accel.preempt.stop_agreed(ctx, requests):
                Path(note, f"stopped-{ctx.rank}").write_text(str(step))
                raise stop
            time.sleep(0.02)


def own_folder(ctx: accel.DistContext) -> str:
    """Return the folder of the rank's files, which its command names."""
    words = Path("/proc/self/cmdline").read_text().split("\0")
    return next(word for word in words if Path(word).is_dir())
