# SPDX-License-Identifier: Apache-2.0
"""Stop where the validation loss no longer falls, and load the best checkpoint: `best_checkpoint` and `only=`.

    python examples/early_stopping.py
    accel launch --nproc-per-node 2 examples/early_stopping.py

Two fifths of the training labels are random: a long training memorizes them. The validation loss is averaged over all
processes, so all stop at the same step, without another message. `Keep(best=1)` keeps the best checkpoint and the
newest one. `best_checkpoint` finds it, and `load_state(only=("model",))` loads its weights. The best evaluation and the
number of later ones are an item, so a resumed run stops where an uninterrupted one does.
"""

from __future__ import annotations

import argparse

import msgspec
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.checkpoint import Keep, best_checkpoint


class Best(msgspec.Struct, frozen=True):
    """The best evaluation so far."""

    loss: float = float("inf")
    step: int = 0
    waited: int = 0  # evaluations since then

    def after(self, loss: float, step: int) -> Best:
        """Return the best evaluation after one more."""
        return Best(loss, step) if loss < self.loss else msgspec.structs.replace(self, waited=self.waited + 1)


def main(ctx: accel.DistContext, *, steps: int, size: int, out: str) -> None:
    """Train a network of `size` hidden units for so many steps at most."""
    accel.seeding.set_seed(ctx, 0)
    train_set, valid_set, test_set = load_images()
    net = nn.Sequential(nn.Linear(64, size), nn.ReLU(), nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    loader = accel.prepare_loader(ctx, DataLoader(train_set, batch_size=64, shuffle=True), global_batch=64)
    valid_loader = accel.prepare_loader(ctx, DataLoader(valid_set, batch_size=256))
    test_loader = accel.prepare_loader(ctx, DataLoader(test_set, batch_size=256))
    model, optimizer = accel.prepare(ctx, net, optimizer)

    every, patience, best = max(1, steps // 40), 4, Best()
    keep = Keep(newest=1, best=1, by="valid_loss")
    to = [accel.trackers.jsonl(), accel.trackers.console()]
    with accel.tracking(ctx, "early_stopping", to=to, config={"size": size}, dir=out) as trackers:
        items = {"model": model, "optimizer": optimizer, "trackers": trackers}
        state = accel.train_state(ctx, seed=0, accumulation=1)
        train_loss = accel.metrics.running_metrics(loss="mean")
        if accel.latest_checkpoint(out):
            loaded = accel.load_state(ctx, out, items | {"state": state, "best": best})
            state, best = loaded["state"], loaded["best"]
        batches = accel.batches(ctx, loader, state, repeat=True)
        while state.updates < steps and best.waited < patience:
            batch = next(batches)
            state, loss = accel.train_step(ctx, state, batch, model, optimizer, loss_sum)
            train_loss = train_loss.add(batch.weight, loss=loss)
            if state.updates % every and state.updates < steps:
                continue
            values, train_loss = train_loss.read(ctx)
            values["valid_loss"] = evaluate(ctx, model, valid_loader)
            best = best.after(values["valid_loss"], state.updates)
            accel.log(ctx, trackers, values, step=state.updates)
            now, metrics = items | {"state": state, "best": best}, {"valid_loss": values["valid_loss"]}
            accel.save_state(ctx, out, now, step=state.updates, keep=keep, metrics=metrics)
        last = evaluate(ctx, model, test_loader)
        found = best_checkpoint(out, by=keep.by)
        assert found is not None  # at least one evaluation has saved
        accel.load_state(ctx, found, {"model": model}, only=("model",))
        values = {"valid_loss": best.loss, "test_loss": evaluate(ctx, model, test_loader), "test_loss_of_last": last}
        accel.log(ctx, trackers, values, step=state.updates)
    accel.print(ctx, f"stopped at step {state.updates}; the best checkpoint is from step {best.step}")


def loss_sum(output: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the samples' losses; the step divides by their number on all processes."""
    return cross_entropy(output, targets, reduction="sum")


@torch.no_grad()
def evaluate(ctx: accel.DistContext, model: nn.Module, loader: accel.Loader) -> float:
    """Return the mean loss; each image counts once on any number of processes."""
    metrics = accel.metrics.running_metrics(loss="mean")
    with accel.evaluating(model):
        for batch in accel.batches(ctx, loader):
            inputs, targets = batch.data
            metrics = metrics.add(batch.weights, loss=cross_entropy(model(inputs), targets, reduction="none"))
    return metrics.read(ctx)[0]["loss"]


def load_images() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """Return scikit-learn's digits, rows of 64 pixels, for training, validation and test; wrong labels in the first."""
    digits = load_digits()
    images, labels = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target).long()
    part = torch.arange(len(labels)) % 5
    source = torch.Generator().manual_seed(0)
    wrong = (torch.rand(len(labels), generator=source) < 0.4) & (part > 1)
    labels[wrong] = torch.randint(10, (int(wrong.sum()),), generator=source)
    rows = (part > 1, part == 0, part == 1)
    first, second, third = (TensorDataset(images[row], labels[row]) for row in rows)
    return first, second, third


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="most optimizer steps")
    parser.add_argument("--size", type=int, default=128, help="hidden units of the model")
    parser.add_argument("--out", default="runs/early_stopping", help="folder of checkpoints and metrics")
    flags = parser.parse_args()
    with accel.session() as context:
        main(context, **vars(flags))
