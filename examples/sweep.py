# SPDX-License-Identifier: Apache-2.0
"""Try several learning rates and optimizers, and compare the runs on one page.

    pip install 'accel-torch[examples]'
    python examples/sweep.py
    accel launch --nproc-per-node 2 examples/sweep.py

Each trial is a run in a separate folder, with its settings in `config=`. The same command resumes where the sweep
stopped: finished trials only load. The page, `runs/sweep/report.html`, has the curves of all trials in one
figure, marks the settings in which they differ, and needs no server.
"""

from __future__ import annotations

import argparse
from itertools import product

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import accel
import accel.cli

OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
RATES = (1e-2, 1e-1)


def main(ctx: accel.DistContext, *, steps: int, size: int, out: str) -> None:
    """Train a network of `size` hidden units once for each setting, for so many steps."""
    found: dict[str, float] = {}
    for kind, rate in product(OPTIMIZERS, RATES):
        folder = f"{out}/{kind}-{rate:g}"
        found[folder] = train(ctx, kind, rate, steps=steps, size=size, out=folder)
        accel.print(ctx, f"{folder}  accuracy {found[folder]:.1%}", flush=True)
    accel.print(ctx, f"best: {max(found, key=lambda folder: found[folder])}")
    report = accel.on_main_process(ctx, accel.cli.main)
    report(["report", *found, "--output", f"{out}/report.html"])


def train(ctx: accel.DistContext, kind: str, rate: float, *, steps: int, size: int, out: str) -> float:
    """Run one trial; return the share of right answers on the test images."""
    accel.seeding.set_seed(ctx, 0)
    train_set, test_set = load_images()
    net = nn.Sequential(nn.Linear(64, size), nn.ReLU(), nn.Linear(size, 10))
    optimizer = OPTIMIZERS[kind](net.parameters(), lr=rate)
    loader = accel.prepare_loader(ctx, DataLoader(train_set, batch_size=64, shuffle=True), global_batch=64)
    test_loader = accel.prepare_loader(ctx, DataLoader(test_set, batch_size=256))
    model, optimizer = accel.prepare(ctx, net, optimizer)

    every, config = max(1, steps // 4), {"optimizer": kind, "lr": rate, "size": size}
    to = [
        accel.trackers.jsonl(),
        accel.trackers.console(every=every, label=f"{kind} {rate:g} step", formats={"accuracy": ".1%"}),
    ]
    with accel.tracking(ctx, "sweep", to=to, config=config, dir=out) as trackers:
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


def load_images() -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's digits for training and test, every fifth for the test: rows of 64 pixels from 0 to 1."""
    digits = load_digits()
    images, labels = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target).long()
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each trial")
    parser.add_argument("--size", type=int, default=64, help="hidden units of the model")
    parser.add_argument("--out", default="runs/sweep", help="folder of checkpoints and metrics")
    flags = parser.parse_args()
    with accel.session() as context:
        main(context, **vars(flags))
