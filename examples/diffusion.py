# SPDX-License-Identifier: Apache-2.0
"""Train a diffusion model of handwritten digits, and draw digits on request from its averaged weights.

    python examples/diffusion.py
    accel launch --nproc-per-node 2 examples/diffusion.py

`accel.training.Ema` follows the weights after each step and is an item of the checkpoint like the model. The dataset
draws time and noise, and the loader seeds each sample: so the losses are the same on any number of processes.
"""

from __future__ import annotations

import argparse
import math

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import accel
from accel.schedules import Cosine

TIMES = 50
KEPT = torch.cumprod(1 - torch.linspace(1e-3, 0.2, TIMES), 0)  # share of the image's variance that is left


class Noised(Dataset[tuple[tuple[Tensor, Tensor, Tensor], Tensor]]):
    """Images with noise of a random time; and the noise, for the model to tell."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        time, noise = torch.randint(TIMES, ()), torch.randn(64)
        noisy = KEPT[time].sqrt() * self.images[index] + (1 - KEPT[time]).sqrt() * noise
        return (noisy, time, self.labels[index]), noise


class Denoiser(nn.Module):
    """Tells the noise in an image of a known time and digit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.image, self.time, self.label = nn.Linear(64, width), nn.Embedding(TIMES, width), nn.Embedding(10, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(4))
        self.head = nn.Linear(width, 64)

    def forward(self, image: Tensor, time: Tensor, label: Tensor) -> Tensor:
        known = self.time(time) + self.label(label)
        hidden = self.image(image)
        for layer in self.layers:
            hidden = hidden + nn.functional.silu(layer(hidden + known))
        return self.head(hidden)


def main(ctx: accel.DistContext, *, steps: int, size: int, out: str) -> None:
    """Train a denoiser of `size` units a layer for so many steps."""
    accel.seeding.set_seed(ctx, 0)
    images, labels = load_images()
    net = Denoiser(size)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, Cosine(steps, end=0.05))
    plain = DataLoader(Noised(images, labels), batch_size=128, shuffle=True)
    loader = accel.prepare_loader(ctx, plain, global_batch=128, seed_samples=True)
    model, optimizer, scheduler = accel.prepare(ctx, net, optimizer, scheduler)
    ema = accel.training.Ema(model, decay=0.995)

    every = max(1, steps // 20)
    to = [accel.trackers.jsonl(), accel.trackers.console(every=every, formats={"right": ".1%"})]
    with accel.tracking(ctx, "diffusion", to=to, config={"size": size}, dir=out) as trackers:
        items = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "ema": ema, "trackers": trackers}
        state = accel.resume(ctx, out, items, accel.train_state(ctx, seed=0, accumulation=1))
        batches = accel.batches(ctx, loader, state, repeat=True)
        while state.updates < steps:
            batch = next(batches)
            state, loss = accel.train_step(ctx, state, batch, model, optimizer, loss_sum, scheduler=scheduler)
            ema.update_(model, state)
            values, _ = accel.metrics.running_metrics(loss="mean").add(batch.weight, loss=loss).read(ctx)
            due = state.updates % every == 0 or state.updates == steps
            if due:
                with ema.applied_to(model):
                    values["right"] = judge(sample(model, ctx.device), images, labels)
            accel.log(ctx, trackers, values, step=state.updates)
            if due:
                accel.save_state(ctx, out, items | {"state": state}, step=state.updates, keep=2)
    with ema.applied_to(model):
        drawn = sample(model, ctx.device)[:40]
    accel.save(ctx, {"pictures": (drawn.view(-1, 8, 8) + 1).div(2).clamp(0, 1)}, f"{out}/pictures.safetensors")


def loss_sum(output: Tensor, noise: Tensor) -> Tensor:
    """Return the sum over images of the mean squared error over pixels."""
    return (output - noise).square().mean(1).sum()


@torch.no_grad()
def sample(model: nn.Module, device: torch.device) -> Tensor:
    """Return 20 images of each digit, [200, 64], the digits in turn; every rank draws the same ones."""
    plain, source = accel.unwrap_model(model), accel.seeding.Key(1).generator()
    image, label = torch.randn(200, 64, generator=source).to(device), (torch.arange(200) % 10).to(device)
    for time in reversed(range(TIMES)):
        kept, before = float(KEPT[time]), float(KEPT[time - 1]) if time else 1.0
        noise = plain(image, torch.full_like(label, time), label)
        clean = ((image - math.sqrt(1 - kept) * noise) / math.sqrt(kept)).clamp(-1, 1)
        mean = math.sqrt(before) * (1 - kept / before) * clean + math.sqrt(kept / before) * (1 - before) * image
        fresh = torch.randn(200, 64, generator=source).to(device)
        image = mean / (1 - kept) + math.sqrt((1 - before) / (1 - kept) * (1 - kept / before)) * fresh
    return image.cpu()


def judge(drawn: Tensor, images: Tensor, labels: Tensor) -> float:
    """Return the share of drawn digits for which the nearest real image shows the requested digit."""
    found = labels[torch.cdist(drawn, images).argmin(1)]
    return float((found == torch.arange(len(drawn)) % 10).float().mean())


def load_images() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's digits as rows of 64 pixels from -1 to 1, and their labels."""
    digits = load_digits()
    return torch.from_numpy(digits.data).float() / 8 - 1, torch.from_numpy(digits.target).long()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800, help="optimizer steps")
    parser.add_argument("--size", type=int, default=256, help="width of the model")
    parser.add_argument("--out", default="runs/diffusion", help="folder of checkpoints and metrics")
    flags = parser.parse_args()
    with accel.session() as context:
        main(context, **vars(flags))
