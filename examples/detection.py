# SPDX-License-Identifier: Apache-2.0
"""Find boxes and discs in made images, from one to four in each: ragged targets, and a loss weighted by objects.

    python examples/detection.py
    accel launch --nproc-per-node 2 examples/detection.py

A batch is a tensor of images and a list of tensors, one [objects, 5] an image. The loss is a mean over objects, and
`weight=` is their number on this rank: so the step counts every object of all ranks the same.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, l1_loss
from torch.utils.data import DataLoader, Dataset

import accel

PIXELS, GRID = 32, 8  # an image has 32 x 32 pixels; the model answers for 8 x 8 cells of it


class Shapes(Dataset[tuple[Tensor, Tensor]]):
    """Images [1, 32, 32] with objects: class (0 box, 1 disc), centre, width and height as shares of the image."""

    def __init__(self, first: int, count: int) -> None:
        self.numbers = range(first, first + count)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        source = accel.seeding.Key(0).fold_in("image", self.numbers[index]).generator()
        count = int(torch.randint(1, 5, (), generator=source))
        kinds = torch.randint(0, 2, (count, 1), generator=source)
        centres = 0.2 + 0.6 * torch.rand(count, 2, generator=source)
        sizes = 0.15 + 0.2 * torch.rand(count, 2, generator=source)
        image, at = 0.1 * torch.rand(1, PIXELS, PIXELS, generator=source), (torch.arange(PIXELS) + 0.5) / PIXELS
        for kind, (x, y), (width, height) in zip(kinds.flatten(), centres, sizes, strict=True):
            right, down = ((at - x) / width * 2).abs(), ((at - y) / height * 2).abs()[:, None]
            image[0, (right**2 + down**2 < 1) if kind else ((right < 1) & (down < 1))] = 1.0
        return image, torch.cat([kinds, centres, sizes], dim=1)


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[Tensor]]:
    """Return the images as one tensor, and the objects of each image as one of a list."""
    images, objects = zip(*samples, strict=True)
    return torch.stack(images), list(objects)


def main(ctx: accel.DistContext, *, steps: int, size: int, out: str) -> None:
    """Train a detector of `size` channels for so many steps."""
    accel.seeding.set_seed(ctx, 0)
    model = make_model(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    plain = DataLoader(Shapes(0, 2000), batch_size=32, shuffle=True, collate_fn=collate)
    loader = accel.prepare_loader(ctx, plain, global_batch=32)
    test_loader = accel.prepare_loader(ctx, DataLoader(Shapes(2000, 200), batch_size=100, collate_fn=collate))
    model, optimizer = accel.prepare(ctx, model, optimizer)

    every = max(1, steps // 20)
    to = [accel.trackers.jsonl(), accel.trackers.console(every=every)]
    with accel.tracking(ctx, "detection", to=to, config={"size": size}, dir=out) as trackers:
        items = {"model": model, "optimizer": optimizer, "trackers": trackers}
        state = accel.resume(ctx, out, items, accel.train_state(ctx, seed=0, accumulation=1))
        batches = accel.batches(ctx, loader, state, repeat=True)
        while state.updates < steps:
            batch = next(batches)
            images, objects = batch.data
            objects = objects[: batch.valid]  # a placeholder has none
            count = sum(len(each) for each in objects)
            state = state.next(batch)
            with accel.accumulate(ctx, state, model):
                loss = loss_sum(model(images), objects) / max(count, 1)
                state = accel.backward(ctx, loss, state, weight=count)
            state = accel.optimizer_step(ctx, optimizer, state)
            values, _ = accel.metrics.running_metrics(loss="mean").add(count, loss=loss).read(ctx)
            due = state.updates % every == 0 or state.updates == steps
            if due:
                values["f1"] = evaluate(ctx, model, test_loader)
            accel.log(ctx, trackers, values, step=state.updates)
            if due:
                accel.save_state(ctx, out, items | {"state": state}, step=state.updates, keep=2)


def at_objects(output: Tensor, objects: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return of the cells with an object's centre: answers [n, 3], boxes [n, 4], objects [n, 5]; and a map of them."""
    truth = torch.cat([output.new_zeros(0, 5), *objects])
    counts = torch.tensor([len(each) for each in objects], dtype=torch.long)
    image = torch.arange(len(objects)).repeat_interleave(counts)
    at = (truth[:, 1:3] * GRID).long()
    cells = torch.zeros_like(output[:, 0])
    cells[image, at[:, 1], at[:, 0]] = 1
    answers = output[image, :, at[:, 1], at[:, 0]]
    centres, sizes = answers[:, 3:].sigmoid().chunk(2, dim=1)
    return answers[:, :3], torch.cat([(at + centres) / GRID, sizes], dim=1), truth, cells


def loss_sum(output: Tensor, objects: list[Tensor]) -> Tensor:
    """Return the sum of the losses of the objects, and of all cells that should see none."""
    output = output[: len(objects)]
    answers, boxes, truth, cells = at_objects(output, objects)
    seen = binary_cross_entropy_with_logits(output[:, 0], cells, reduction="sum")
    kinds = cross_entropy(answers[:, 1:], truth[:, 0].long(), reduction="sum")
    return seen + kinds + 10 * l1_loss(boxes, truth[:, 1:], reduction="sum")


@torch.no_grad()
def evaluate(ctx: accel.DistContext, model: nn.Module, loader: accel.Loader) -> float:
    """Return the F1 score. An object is found by the right class at its cell, and a box that overlaps it by half."""
    metrics = accel.metrics.running_metrics(found="count", objects="count", answered="count")
    with accel.evaluating(model):
        for batch in accel.batches(ctx, loader):
            output = model(batch.data[0])[: batch.valid]
            answers, boxes, truth, _ = at_objects(output, batch.data[1][: batch.valid])
            right = (answers[:, 0] > 0) & (answers[:, 1:].argmax(1) == truth[:, 0])
            found = right & (overlap(boxes, truth[:, 1:]) > 0.5)
            metrics = metrics.add(1, found=found.sum(), objects=len(truth), answered=(output[:, 0] > 0).sum())
    counts = metrics.read(ctx)[0]
    return 2 * counts["found"] / (counts["objects"] + counts["answered"])


def overlap(one: Tensor, other: Tensor) -> Tensor:
    """Return intersection over union of boxes [n, 4], pair by pair."""
    low = torch.maximum(one[:, :2] - one[:, 2:] / 2, other[:, :2] - other[:, 2:] / 2)
    high = torch.minimum(one[:, :2] + one[:, 2:] / 2, other[:, :2] + other[:, 2:] / 2)
    shared = (high - low).clamp(min=0).prod(1)
    return shared / (one[:, 2:].prod(1) + other[:, 2:].prod(1) - shared)


def make_model(size: int) -> nn.Module:
    """Return a CNN with 7 answers a cell: seen or not, 2 classes, centre, width and height."""
    return nn.Sequential(
        *(nn.Conv2d(1, size, 5, padding=2, stride=2), nn.ReLU()),
        *(nn.Conv2d(size, 2 * size, 5, padding=2, stride=2), nn.ReLU()),
        *(nn.Conv2d(2 * size, 2 * size, 5, padding=2), nn.ReLU(), nn.Conv2d(2 * size, 7, 1)),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps")
    parser.add_argument("--size", type=int, default=16, help="channels of the first layer")
    parser.add_argument("--out", default="runs/detection", help="folder of checkpoints and metrics")
    flags = parser.parse_args()
    with accel.session() as context:
        main(context, **vars(flags))
