# SPDX-License-Identifier: Apache-2.0
"""Distil a CNN that reads handwritten digits into a network of a tenth of its size, using only its answers.

    accel launch --nproc-per-node 2 examples/distillation.py

The teacher learns from labels and is frozen. The student never sees a label: it learns the teacher's probabilities, on
noisy images too. Each has a folder of checkpoints, so the same command resumes whichever was interrupted.
Needs scikit-learn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from torch.utils.data import DataLoader, TensorDataset

import accel

Loss = Callable[[Tensor, Tensor], Tensor]
HEAT = 3.0  # divides logits, so that small probabilities count as well


def make_sets() -> tuple[TensorDataset, TensorDataset]:
    """Return images and labels for training and for the test; every fifth of the 1,797 is for the test."""
    digits = load_digits()
    images, labels = torch.from_numpy(digits.images).float().unsqueeze(1) / 16, torch.from_numpy(digits.target).long()
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


def make_teacher(width: int) -> nn.Module:
    """Return a CNN."""
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * width, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def make_student(width: int) -> nn.Module:
    """Return a perceptron."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2 * width), nn.ReLU(), nn.Linear(2 * width, 10))


def label_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum over images, which `train_step` divides by the number over all processes."""
    return cross_entropy(logits, labels, reduction="sum")


def answer_losses(logits: Tensor, answers: Tensor) -> Tensor:
    """Return the sum over images of the divergence from the teacher's probabilities."""
    student, teacher = (logits / HEAT).log_softmax(1), (answers / HEAT).log_softmax(1)
    return kl_div(student, teacher, reduction="sum", log_target=True) * HEAT**2


def fit(
    ctx: accel.DistContext, model: nn.Module, loss_fn: Loss, *, steps: int, out: str, teacher: nn.Module | None = None
) -> nn.Module:
    """Train a model on the labels, or on a teacher's answers; return it without what `prepare` puts around it."""
    train_set, test_set = make_sets()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, accel.schedules.Cosine(steps))
    loader = accel.prepare_loader(ctx, DataLoader(train_set, 64, shuffle=True), global_batch=64)
    test_loader = accel.prepare_loader(ctx, DataLoader(test_set, 180))
    model, optimizer, scheduler = accel.prepare(ctx, model, optimizer, scheduler)
    name = "distillation" if teacher else "teacher"
    to = [accel.trackers.jsonl(), accel.trackers.console(label=f"{name} step", formats={"accuracy": ".1%"})]
    with accel.tracking(ctx, name, to=to, dir=out) as trackers:
        items = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "trackers": trackers}
        state = accel.resume(ctx, out, items, accel.train_state(ctx, seed=0, accumulation=1))
        metrics, every = accel.metrics.running_metrics(loss="mean"), max(1, steps // 20)
        batches = accel.batches(ctx, loader, state, repeat=True)
        while state.updates < steps:
            batch = next(batches)
            images, targets = batch.data
            if teacher is not None:
                images = images + 0.2 * torch.randn_like(images)
                with torch.no_grad():
                    targets = teacher(images)
            state, loss = accel.train_step(
                ctx, state, batch, model, optimizer, loss_fn, inputs=images, targets=targets, scheduler=scheduler
            )
            metrics = metrics.add(batch.weight, loss=loss)
            if state.updates % every == 0 or state.updates == steps:
                values, metrics = metrics.read(ctx)
                values["accuracy"] = accuracy(ctx, model, test_loader)
                accel.log(ctx, trackers, values, step=state.updates)
                accel.save_state(ctx, out, items | {"state": state}, step=state.updates, keep=2)
    return accel.unwrap_model(model)


@torch.no_grad()
def accuracy(ctx: accel.DistContext, model: nn.Module, loader: accel.Loader) -> float:
    """Return the share of right answers, each image counted once on any number of processes."""
    metrics = accel.metrics.running_metrics(accuracy="mean")
    with accel.evaluating(model):
        for batch in accel.batches(ctx, loader):
            images, labels = batch.data
            metrics = metrics.add(batch.weights, accuracy=(model(images).argmax(1) == labels).double())
    return metrics.read(ctx)[0]["accuracy"]


def main(ctx: accel.DistContext, *, steps: int, size: int, out: str) -> None:
    """Train teacher and student for so many optimizer steps each."""
    with accel.seeding.seeded(ctx, 0):  # the first weights are the same on any number of processes
        teacher, student = make_teacher(size), make_student(size)
    teacher = fit(ctx, teacher, label_losses, steps=steps, out=f"{out}/teacher")
    teacher = teacher.requires_grad_(False).eval()
    accel.seeding.set_seed(ctx, 0)  # the noise: each process draws its own
    fit(ctx, student, answer_losses, steps=steps, out=out, teacher=teacher)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of the teacher, and of the student")
    parser.add_argument("--size", type=int, default=32, help="channels of the teacher; the student is twice as wide")
    parser.add_argument("--out", default="runs/distillation", help="folder of checkpoints and metrics")
    flags = parser.parse_args()
    with accel.session() as context:
        main(context, **vars(flags))
