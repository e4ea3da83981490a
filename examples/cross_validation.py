# SPDX-License-Identifier: Apache-2.0
"""Cross-validate: train five models, each without a fifth of the images, and test each on the fifth that it never saw.

    python examples/cross_validation.py
    accel launch --nproc-per-node 2 examples/cross_validation.py
    accel report runs/cross_validation/fold-*

Each fold is a run in a separate folder, so the same command resumes in the fold where it stopped: finished runs only
load. The folds have equal shares of each digit, and every image is tested once.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean, stdev

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset

import accel


def main(ctx: accel.DistContext, *, steps: int, size: int, out: str) -> None:
    """Train and test five networks of `size` hidden units, each for so many steps."""
    digits = load_digits()
    images = torch.from_numpy(digits.data).float() / 16
    dataset = TensorDataset(images, torch.from_numpy(digits.target).long())
    folds = StratifiedKFold(5, shuffle=True, random_state=0).split(digits.data, digits.target)
    scores: list[float] = []
    for fold, (train_rows, test_rows) in enumerate(folds):
        parts = Subset(dataset, train_rows.tolist()), Subset(dataset, test_rows.tolist())
        scores.append(train(ctx, *parts, steps=steps, size=size, out=f"{out}/fold-{fold}"))
        accel.print(ctx, f"fold {fold}  accuracy {scores[-1]:.1%} of {len(test_rows)} images", flush=True)
    accel.print(ctx, f"accuracy {mean(scores):.1%}  standard deviation over folds {stdev(scores):.1%}")


def train(
    ctx: accel.DistContext, train_set: Subset[Tensor], test_set: Subset[Tensor], *, steps: int, size: int, out: str
) -> float:
    """Train on one set; return the share of right answers on the other."""
    accel.seeding.set_seed(ctx, 0)
    net = nn.Sequential(nn.Linear(64, size), nn.ReLU(), nn.Linear(size, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    loader = accel.prepare_loader(ctx, DataLoader(train_set, batch_size=64, shuffle=True), global_batch=64)
    test_loader = accel.prepare_loader(ctx, DataLoader(test_set, batch_size=256))
    model, optimizer = accel.prepare(ctx, net, optimizer)

    every = max(1, steps // 4)
    to = [
        accel.trackers.jsonl(),
        accel.trackers.console(every=every, label=f"{Path(out).name} step", formats={"accuracy": ".1%"}),
    ]
    with accel.tracking(ctx, "cross_validation", to=to, dir=out) as trackers:
        items = {"model": model, "optimizer": optimizer, "trackers": trackers}
        state = accel.resume(ctx, out, items, accel.train_state(ctx, seed=0, accumulation=1))
        batches = accel.batches(ctx, loader, state, repeat=True)
        while state.updates < steps:
            batch = next(batches)
            state, loss = accel.train_step(ctx, state, batch, model, optimizer, loss_sum)
            values, _ = accel.metrics.running_metrics(loss="mean").add(batch.weight, loss=loss).read(ctx)
            due = state.updates % every == 0 or state.updates == steps
            if due:
                values["accuracy"] = accuracy(ctx, model, test_loader)
            accel.log(ctx, trackers, values, step=state.updates)
            if due:
                accel.save_state(ctx, out, items | {"state": state}, step=state.updates, keep=2)
    return accuracy(ctx, model, test_loader)


def loss_sum(output: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the samples' losses; the step divides by their number on all processes."""
    return cross_entropy(output, targets, reduction="sum")


@torch.no_grad()
def accuracy(ctx: accel.DistContext, model: nn.Module, loader: accel.Loader) -> float:
    """Return the share of right answers; each image counts once on any number of processes."""
    metrics = accel.metrics.running_metrics(right="mean")
    with accel.evaluating(model):
        for batch in accel.batches(ctx, loader):
            inputs, targets = batch.data
            metrics = metrics.add(batch.weights, right=model(inputs).argmax(1) == targets)
    return metrics.read(ctx)[0]["right"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each fold")
    parser.add_argument("--size", type=int, default=64, help="hidden units of the model")
    parser.add_argument("--out", default="runs/cross_validation", help="folder of checkpoints and metrics")
    flags = parser.parse_args()
    with accel.session() as context:
        main(context, **vars(flags))
