# SPDX-License-Identifier: Apache-2.0
"""Classify handwritten digits with augmentation: each image is shifted and turned anew whenever it is read.

    python examples/images.py
    accel launch --nproc-per-node 2 examples/images.py

Augmentation draws from torch's global stream, which the loader seeds for each sample (`seed_samples=True`). So the same
images come on any number of processes and workers, and after a resume; and both commands print the same losses.
"""

from __future__ import annotations

import argparse
import math
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample
from torch.utils.data import DataLoader, Dataset, TensorDataset

import accel
from accel.schedules import Cosine


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Images that are turned by up to 15 degrees and shifted by up to a pixel, differently at each reading."""

    def __init__(self, images: TensorDataset) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.images[index]
        angle, right, down = (torch.rand(3) * 2 - 1).mul(torch.tensor([math.pi / 12, 0.25, 0.25])).tolist()
        cos, sin = math.cos(angle), math.sin(angle)
        moves = torch.tensor([[[cos, -sin, right], [sin, cos, down]]])
        grid = affine_grid(moves, [1, *image.shape], align_corners=False)
        return grid_sample(image[None], grid, align_corners=False)[0], label


def main(ctx: accel.DistContext, *, steps: int, size: int, out: str) -> None:
    """Train a CNN of `size` channels for so many steps."""
    train_set, test_set = load_images()
    accel.seeding.set_seed(ctx, 0)
    model = make_model(size)  # `prepare` gives every process the weights of the first
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, Cosine(steps))
    plain = DataLoader(Augmented(train_set), batch_size=64, shuffle=True)
    loader = accel.prepare_loader(ctx, plain, global_batch=64, seed_samples=True)
    test_loader = accel.prepare_loader(ctx, DataLoader(test_set, batch_size=256))
    model, optimizer, scheduler = accel.prepare(ctx, model, optimizer, scheduler)

    every = max(1, steps // 20)
    loss_sum = partial(cross_entropy, reduction="sum", label_smoothing=0.1)
    to = [accel.trackers.jsonl(), accel.trackers.console(every=every, formats={"accuracy": ".1%"})]
    with accel.tracking(ctx, "images", to=to, config={"size": size}, dir=out) as trackers:
        items = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "trackers": trackers}
        state = accel.resume(ctx, out, items, accel.train_state(ctx, seed=0, accumulation=1))
        batches = accel.batches(ctx, loader, state, repeat=True)
        while state.updates < steps:
            batch = next(batches)
            state, loss = accel.train_step(ctx, state, batch, model, optimizer, loss_sum, scheduler=scheduler)
            values, _ = accel.metrics.running_metrics(loss="mean").add(batch.weight, loss=loss).read(ctx)
            due = state.updates % every == 0 or state.updates == steps
            if due:
                values["accuracy"] = accuracy(ctx, model, test_loader)
            accel.log(ctx, trackers, values, step=state.updates)
            if due:
                accel.save_state(ctx, out, items | {"state": state}, step=state.updates, keep=2)
    seen = [loader.dataset[at][0][0] for at in range(32)]
    accel.save(ctx, {"pictures": torch.stack(seen)}, f"{out}/pictures.safetensors")


@torch.no_grad()
def accuracy(ctx: accel.DistContext, model: nn.Module, loader: accel.Loader) -> float:
    """Return the share of right answers; each image counts once on any number of processes."""
    metrics = accel.metrics.running_metrics(right="mean")
    with accel.evaluating(model):
        for batch in accel.batches(ctx, loader):
            images, labels = batch.data
            metrics = metrics.add(batch.weights, right=model(images).argmax(1) == labels)
    return metrics.read(ctx)[0]["right"]


def load_images() -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's digits, [n, 1, 8, 8] from 0 to 1, for training and test; every fifth is for the test."""
    digits = load_digits()
    images, labels = torch.from_numpy(digits.images).float()[:, None] / 16, torch.from_numpy(digits.target).long()
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


def make_model(size: int) -> nn.Module:
    """Return a CNN of two convolutions."""
    return nn.Sequential(
        *(nn.Conv2d(1, size, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(size, 2 * size, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(2 * size * 16, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
    parser.add_argument("--size", type=int, default=24, help="channels of the first layer")
    parser.add_argument("--out", default="runs/images", help="folder of checkpoints and metrics")
    flags = parser.parse_args()
    with accel.session() as context:
        main(context, **vars(flags))
