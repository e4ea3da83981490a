# SPDX-License-Identifier: Apache-2.0
"""Train on slow networks by local SGD: each process steps alone, and every eighth step averages the models.

    python examples/local_sgd.py
    accel launch --nproc-per-node 2 examples/local_sgd.py

One message of the model's size replaces eight of gradients. After an average the processes are equal: there the loop
saves, and a resumed run ends with the same bits. On another number of processes the training is another one.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.parallel import LocalSgd, local_sgd_step, prepare_local_model


def main(ctx: accel.DistContext, *, steps: int, size: int, out: str) -> None:
    """Train a network of `size` hidden units; so many steps on each process."""
    accel.seeding.set_seed(ctx, 0)
    train_set, test_set = load_images()
    net = nn.Sequential(nn.Linear(64, size), nn.ReLU(), nn.Linear(size, 10))
    model = prepare_local_model(ctx, net)  # on every process the weights of the first; no backward exchanges gradients
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    loader = accel.prepare_loader(ctx, DataLoader(train_set, batch_size=64, shuffle=True), global_batch=64)
    test_loader = accel.prepare_loader(ctx, DataLoader(test_set, batch_size=256))

    local = LocalSgd(every=8)
    to = [accel.trackers.jsonl(), accel.trackers.console(formats={"accuracy": ".1%"})]
    with accel.tracking(ctx, "local_sgd", to=to, config={"size": size}, dir=out) as trackers:
        items = {"model": model, "optimizer": optimizer, "trackers": trackers}
        state = accel.resume(ctx, out, items, accel.train_state(ctx, seed=0, accumulation=1))
        metrics = accel.metrics.running_metrics(loss="mean")
        batches = accel.batches(ctx, loader, state, repeat=True)
        while state.updates < steps:
            batch = next(batches)
            inputs, targets = batch.data
            state = state.next(batch)
            with accel.accumulate(ctx, state):  # without the model: there is nothing to exchange
                loss = cross_entropy(model(inputs), targets)
                state = accel.backward(ctx, loss, state)
            state = accel.optimizer_step(ctx, optimizer, state)
            last = state.updates == steps
            local = local_sgd_step(ctx, model, local, optimizer=optimizer, last=last)
            metrics = metrics.add(batch.weight, loss=loss)
            if local.taken == 0:  # an average: the one message of eight steps, and another for the metrics
                values, metrics = metrics.read(ctx)
                values["accuracy"] = accuracy(ctx, model, test_loader)
                accel.log(ctx, trackers, values, step=state.updates)
                accel.save_state(ctx, out, items | {"state": state}, step=state.updates, keep=2)


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
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of each process")
    parser.add_argument("--size", type=int, default=64, help="hidden units of the model")
    parser.add_argument("--out", default="runs/local_sgd", help="folder of checkpoints and metrics")
    flags = parser.parse_args()
    with accel.session() as context:
        main(context, **vars(flags))
