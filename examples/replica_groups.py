# SPDX-License-Identifier: Apache-2.0
"""Classify handwritten digits on replica groups that may come and go at any step.

Start a lighthouse, then the groups; each group is a separate launch:

    torchft_lighthouse --min_replicas 1 --bind [::]:29510 --heartbeat_timeout_ms 2000 &
    accel launch examples/replica_groups.py --lighthouse http://$(hostname):29510 --name a &
    accel launch examples/replica_groups.py --lighthouse http://$(hostname):29510 --name b &

Kill one, and start it again: the others continue meanwhile, and it adopts their state.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.engines import torchft


class Dealt(NamedTuple):
    """The numbers of the samples that this group has in one step."""

    turn: torchft.Turn
    samples: list[int]


def digits() -> TensorDataset:
    """Return images, labels and the number of each sample."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32) / 16
    return TensorDataset(inputs, torch.tensor(labels), torch.arange(len(inputs)))


def ignore(_event: object) -> None:
    """Do nothing with what happens."""


def train(
    ctx: accel.DistContext, flags: argparse.Namespace, watch: Callable[[Dealt | torchft.StepReport], None] = ignore
) -> tuple[nn.Module, accel.TrainState]:
    """Train until the job has made its steps; return the model and the state.

    Args:
        ctx: the context of this group.
        flags: flags of the command line.
        watch: called with what a step is about to exchange, and with the report of each step.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=flags.steps)
    loader = accel.prepare_loader(ctx, DataLoader(digits(), batch_size=50, shuffle=True), global_batch=50)
    model, optimizer, scheduler = accel.prepare(ctx, model, optimizer, scheduler)
    items = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state = accel.train_state(ctx, seed=0)
    loss = torch.tensor(0.0)

    with torchft.replica(ctx, lighthouse=flags.lighthouse, name=flags.name, timeout_s=20) as group:
        while state.updates < flags.steps:
            turn = torchft.begin_step(group, state, items)
            state = turn.state
            samples: list[int] = []
            while not state.sync:
                batch = torchft.next_batch(group, loader, turn, state)
                inputs, labels, numbers = batch.data
                samples += numbers[: int(batch.valid)].tolist()
                state = state.next(batch)
                with accel.accumulate(ctx, state, model):
                    loss = nn.functional.cross_entropy(model(inputs), labels)
                    state = accel.backward(ctx, loss, state)
            watch(Dealt(turn, samples))
            state, report = torchft.optimizer_step(group, turn, optimizer, state, scheduler=scheduler, max_norm=1.0)
            watch(report)
    accel.print(ctx, f"group {flags.name}: {state.updates} steps, loss {loss.item():.3f}")
    return accel.unwrap_model(model), state


def parse(args: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lighthouse", required=True, help="address, such as http://host:29510")
    parser.add_argument("--name", required=True, help="name of this replica group")
    parser.add_argument("--steps", type=int, default=200, help="steps of the whole job")
    return parser.parse_args(args)


if __name__ == "__main__":
    with accel.session() as context:
        _ = train(context, parse())
