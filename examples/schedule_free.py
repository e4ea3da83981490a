# SPDX-License-Identifier: Apache-2.0
"""Train without a schedule: AdamW averages its weights, which are as good at any step as after a decay.

    pip install 'accel-torch[schedulefree]'
    python examples/schedule_free.py
    accel launch --nproc-per-node 2 examples/schedule_free.py

The parameters hold the weights to step from. `accel.evaluating(model, optimizer)` puts the averaged ones in their place
for a block: evaluate there, and save the model for others there. `save_state`, outside, saves the run.
"""

from __future__ import annotations

import argparse

import schedulefree
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import accel


def main(ctx: accel.DistContext, *, steps: int, size: int, out: str) -> None:
    """Train a network of `size` hidden units for so many steps."""
    accel.seeding.set_seed(ctx, 0)
    train_set, test_set = load_images()
    net = nn.Sequential(nn.Linear(64, size), nn.ReLU(), nn.Linear(size, 10))
    optimizer = schedulefree.AdamWScheduleFree(net.parameters(), lr=1e-2)
    loader = accel.prepare_loader(ctx, DataLoader(train_set, batch_size=64, shuffle=True), global_batch=64)
    test_loader = accel.prepare_loader(ctx, DataLoader(test_set, batch_size=256))
    model, optimizer = accel.prepare(ctx, net, optimizer)
    optimizer.train()

    every = max(1, steps // 20)
    to = [
        accel.trackers.jsonl(),
        accel.trackers.console(every=every, formats={"accuracy": ".1%", "accuracy_of_last": ".1%"}),
    ]
    with accel.tracking(ctx, "schedule_free", to=to, config={"size": size}, dir=out) as trackers:
        items = {"model": model, "optimizer": optimizer, "trackers": trackers}
        state = accel.resume(ctx, out, items, accel.train_state(ctx, seed=0, accumulation=1))
        batches = accel.batches(ctx, loader, state, repeat=True)
        while state.updates < steps:
            batch = next(batches)
            state, loss = accel.train_step(ctx, state, batch, model, optimizer, loss_sum)
            values, _ = accel.metrics.running_metrics(loss="mean").add(batch.weight, loss=loss).read(ctx)
            due = state.updates % every == 0 or state.updates == steps
            if due:
                with accel.evaluating(model, optimizer):
                    values["accuracy"] = accuracy(ctx, model, test_loader)
                values["accuracy_of_last"] = accuracy(ctx, model, test_loader)  # of the weights to step from
            accel.log(ctx, trackers, values, step=state.updates)
            if due:
                accel.save_state(ctx, out, items | {"state": state}, step=state.updates, keep=2)
    with accel.evaluating(model, optimizer):
        accel.save_model(ctx, model, f"{out}/model")


def loss_sum(output: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the samples' losses; the step divides by their number on all processes."""
    return cross_entropy(output, targets, reduction="sum")


@torch.no_grad()
def accuracy(ctx: accel.DistContext, model: nn.Module, loader: accel.Loader) -> float:
    """Return the share of right answers; each image counts once on any number of processes."""
    metrics = accel.metrics.running_metrics(right="mean")
    for batch in accel.batches(ctx, loader):
        inputs, targets = batch.data
        metrics = metrics.add(batch.weights, right=model(inputs).argmax(1) == targets)
    return metrics.read(ctx)[0]["right"]


def load_images() -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's digits for training and test, every fifth for the test: rows of 64 pixels from 0 to 1."""
    digits = load_digits()
    images, labels = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target).long()
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
    parser.add_argument("--size", type=int, default=64, help="hidden units of the model")
    parser.add_argument("--out", default="runs/schedule_free", help="folder of checkpoints and metrics")
    flags = parser.parse_args()
    with accel.session() as context:
        main(context, **vars(flags))
