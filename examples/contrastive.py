# SPDX-License-Identifier: Apache-2.0
"""Learn embeddings without labels (SimCLR): two views of an image match, and all other pairs do not.

    python examples/contrastive.py
    accel launch --nproc-per-node 2 examples/contrastive.py

Every view is compared with all views of the global batch, also from other ranks. `gather_for_metrics` gathers these
without gradients, and each rank replaces its rows with the ones that have gradients. So on each rank the loss of the
global batch has the gradient of that rank's rows, and the step adds the gradients. The training is the same on any
number of processes.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample, normalize
from torch.utils.data import DataLoader, Dataset

import accel


class Views(Dataset[Tensor]):
    """Two views [2, 1, 8, 8] of each image: turned, stretched and shifted at random, with noise."""

    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        # the loader seeds torch for each sample: the same draws on any number of processes
        moves = torch.tensor([[1.0, 0, 0], [0, 1.0, 0]]) + 0.2 * torch.randn(2, 2, 3)
        grid = affine_grid(moves, [2, 1, 8, 8], align_corners=False)
        return grid_sample(self.images[[index, index]], grid, align_corners=False) + 0.1 * torch.randn(2, 1, 8, 8)


def main(ctx: accel.DistContext, *, steps: int, size: int, out: str) -> None:
    """Train an encoder of `size` channels for so many steps."""
    accel.seeding.set_seed(ctx, 0)
    images, labels = load_images()
    encoder = make_encoder(size)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-3)
    plain = DataLoader(Views(images), batch_size=128, shuffle=True, drop_last=True)
    loader = accel.prepare_loader(ctx, plain, global_batch=128, seed_samples=True)
    model, optimizer = accel.prepare(ctx, encoder, optimizer)

    every = max(1, steps // 20)
    to = [accel.trackers.jsonl(), accel.trackers.console(every=every, formats={"right": ".1%"})]
    with accel.tracking(ctx, "contrastive", to=to, config={"size": size}, dir=out) as trackers:
        items = {"model": model, "optimizer": optimizer, "trackers": trackers}
        state = accel.resume(ctx, out, items, accel.train_state(ctx, seed=0, accumulation=1))
        batches = accel.batches(ctx, loader, state, repeat=True)
        while state.updates < steps:
            batch = next(batches)
            state = state.next(batch)
            with accel.accumulate(ctx, state, model):
                rows = model(batch.data.flatten(0, 1)).view(batch.rows, 2, -1)
                loss = pair_loss(gathered(ctx, rows, batch))
                # every rank has the loss of the whole batch: the mean over `batch.valid.world` rows
                share = loss * batch.valid.world / max(batch.valid, 1)
                state = accel.backward(ctx, share, state)
            state = accel.optimizer_step(ctx, optimizer, state)
            values = {"loss": loss.item()}
            due = state.updates % every == 0 or state.updates == steps
            if due:
                values["right"] = judge(model, images.to(ctx.device), labels.to(ctx.device))
            accel.log(ctx, trackers, values, step=state.updates)
            if due:
                accel.save_state(ctx, out, items | {"state": state}, step=state.updates, keep=2)


def gathered(ctx: accel.DistContext, own: Tensor, batch: accel.Batch) -> Tensor:
    """Return the rows of all ranks, in rank order and without placeholders; this rank's have their gradients."""
    ranks = torch.full((len(own),), ctx.rank, device=own.device)
    rows, ranks = accel.gather_for_metrics(ctx, (own.detach(), ranks), batch)
    return rows.index_put((ranks == ctx.rank,), own[: batch.valid])


def pair_loss(rows: Tensor, temperature: float = 0.2) -> Tensor:
    """Return the mean cross entropy of telling each view's partner from all other views; rows is [n, 2, width]."""
    views = normalize(torch.cat(rows.unbind(1)), dim=1)
    own = torch.eye(len(views), dtype=torch.bool, device=views.device)
    alike = (views @ views.T / temperature).masked_fill(own, float("-inf"))
    partner = torch.arange(len(views), device=views.device).roll(len(rows))
    return cross_entropy(alike, partner)


@torch.no_grad()
def judge(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of images that show the same digit as the most alike of 30 labelled ones."""
    encoder = accel.unwrap_model(model).get_submodule("0")
    features = normalize(encoder(images), dim=1)
    found = labels[:30][(features[30:] @ features[:30].T).argmax(1)]
    return float((found == labels[30:]).float().mean())


def load_images() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's digits [n, 1, 8, 8] from 0 to 1, and their labels."""
    digits = load_digits()
    return torch.from_numpy(digits.images).float()[:, None] / 16, torch.from_numpy(digits.target).long()


def make_encoder(size: int) -> nn.Sequential:
    """Return an encoder, and the head that the loss sees and evaluation leaves out."""
    encoder = nn.Sequential(
        *(nn.Conv2d(1, size, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(size, 2 * size, 3, padding=1, stride=2), nn.ReLU(), nn.Flatten()),
        nn.Linear(2 * size * 16, 4 * size),
    )
    head = nn.Sequential(nn.ReLU(), nn.Linear(4 * size, 4 * size), nn.ReLU(), nn.Linear(4 * size, 32))
    return nn.Sequential(encoder, head)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--size", type=int, default=32, help="channels of the first layer")
    parser.add_argument("--out", default="runs/contrastive", help="folder of checkpoints and metrics")
    flags = parser.parse_args()
    with accel.session() as context:
        main(context, **vars(flags))
