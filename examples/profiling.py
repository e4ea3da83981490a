# SPDX-License-Identifier: Apache-2.0
"""Find out what a training loop waits for, and mend it: here slow reading, by workers that read ahead.

    python examples/profiling.py
    accel launch --nproc-per-node 2 examples/profiling.py

Both halves of the run are profiled, the second with workers, and `accel profile` prints a table of each: where the time
of each process went. A state is a position in the data, not in a loader, so the loader may change on the way.
"""

from __future__ import annotations

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import schedule
from torch.utils.data import DataLoader, Dataset

import accel
import accel.cli


class SlowImages(Dataset[tuple[Tensor, Tensor]]):
    """Images of digits. Each takes a millisecond to read, as from a disk."""

    def __init__(self) -> None:
        digits = load_digits()
        self.images, self.labels = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(1e-3)
        return self.images[index], self.labels[index]


def main(ctx: accel.DistContext, *, steps: int, size: int, out: str) -> None:
    """Train a network of `size` units a layer for so many steps, half of them with workers."""
    accel.seeding.set_seed(ctx, 0)
    net = nn.Sequential(nn.Linear(64, size), nn.ReLU(), nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model, optimizer = accel.prepare(ctx, net, optimizer)

    every = max(1, steps // 20)
    to = [accel.trackers.jsonl(), accel.trackers.console(every=every)]
    with accel.tracking(ctx, "profiling", to=to, config={"size": size}, dir=out) as trackers:
        items = {"model": model, "optimizer": optimizer, "trackers": trackers}
        state = accel.resume(ctx, out, items, accel.train_state(ctx, seed=0, accumulation=1))

        def train(state: accel.TrainState, workers: int, end: int, profile: accel.trackers.Profile) -> accel.TrainState:
            plain = DataLoader(SlowImages(), batch_size=64, shuffle=True, num_workers=workers)
            loader = accel.prepare_loader(ctx, plain, global_batch=64)
            batches = profile.data(accel.batches(ctx, loader, state, repeat=True))  # marks the wait for a batch
            while state.updates < end:
                batch = next(batches)
                state, loss = accel.train_step(ctx, state, batch, model, optimizer, loss_sum)
                profile.step()
                values, _ = accel.metrics.running_metrics(loss="mean").add(batch.weight, loss=loss).read(ctx)
                accel.log(ctx, trackers, values, step=state.updates)
                if state.updates % every == 0 or state.updates == end:
                    accel.save_state(ctx, out, items | {"state": state}, step=state.updates, keep=2)
            return state

        for workers, end in [(0, steps // 2), (2, steps)]:
            folder = f"{out}/workers-{workers}"
            plan = schedule(wait=1, warmup=1, active=min(10, steps // 2 - 2), repeat=1)
            if state.updates < end:
                with accel.profile(ctx, out=folder, schedule=plan) as profile:
                    state = train(state, workers, end, profile)
            accel.print(ctx, f"{workers} workers:", flush=True)
            accel.on_main_process(ctx, accel.cli.main)(["profile", folder])


def loss_sum(output: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the samples' losses; the step divides by their number on all processes."""
    return cross_entropy(output, targets, reduction="sum")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps")
    parser.add_argument("--size", type=int, default=256, help="units of a hidden layer")
    parser.add_argument("--out", default="runs/profiling", help="folder of checkpoints and metrics")
    flags = parser.parse_args()
    with accel.session() as context:
        main(context, **vars(flags))
