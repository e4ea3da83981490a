# SPDX-License-Identifier: Apache-2.0
"""A generative adversarial network that learns eight Gaussians on a ring: two models, two optimizers, one window.

    python examples/gan.py
    accel launch --nproc-per-node 2 examples/gan.py

Both models step on the same batch. The generator's loss reads the critic's weights as constants, so each backward
reaches only its model. `optimizer_step` takes both optimizers, and either both step or none does.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, Dataset

import accel

ANGLES = torch.arange(8) * (math.pi / 4)
MODES = torch.stack([ANGLES.cos(), ANGLES.sin()], dim=1)  # centres of the Gaussians
SPREAD = 0.05


class Ring(Dataset[tuple[Tensor, Tensor]]):
    """Points of the eight Gaussians, each with the noise from which the generator makes a point."""

    def __len__(self) -> int:
        return 25_600

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        # the loader seeds torch for each sample: the same draws on any number of processes
        return MODES[index % 8] + SPREAD * torch.randn(2), torch.randn(4)


def main(ctx: accel.DistContext, *, steps: int, size: int, out: str) -> None:
    """Train both models, of `size` units a layer, for so many steps."""
    accel.seeding.set_seed(ctx, 0)
    generator, critic = make_model(4, size, 2), make_model(2, size, 1)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-3, betas=(0.5, 0.99)) for each in (generator, critic)]
    plain = DataLoader(Ring(), batch_size=256, shuffle=True)
    loader = accel.prepare_loader(ctx, plain, global_batch=256, seed_samples=True)
    generator, critic, *optimizers = accel.prepare(ctx, generator, critic, *optimizers)

    every = max(1, steps // 20)
    to = [accel.trackers.jsonl(), accel.trackers.console(every=every)]
    with accel.tracking(ctx, "gan", to=to, config={"size": size}, dir=out) as trackers:
        models = {"generator": generator, "critic": critic}
        items = models | {"optimizer_g": optimizers[0], "optimizer_c": optimizers[1], "trackers": trackers}
        state = accel.resume(ctx, out, items, accel.train_state(ctx, seed=0, accumulation=1))
        batches = accel.batches(ctx, loader, state, repeat=True)
        while state.updates < steps:
            batch = next(batches)
            real, noise = batch.data
            state = state.next(batch)
            with accel.accumulate(ctx, state, generator, critic):
                fake = generator(noise)
                scores, opposed = critic(torch.cat([real, fake.detach()])).chunk(2)
                critic_loss = softplus(-scores).mean() + softplus(opposed).mean()
                state = accel.backward(ctx, critic_loss, state)
                generator_loss = softplus(-constant(critic, fake)).mean()
                state = accel.backward(ctx, generator_loss, state, same_units=True)
            state = accel.optimizer_step(ctx, optimizers, state)
            metrics = accel.metrics.running_metrics(critic_loss="mean", generator_loss="mean", distance="mean")
            losses = {"critic_loss": critic_loss, "generator_loss": generator_loss}
            values, _ = metrics.add(batch.weight, **losses, distance=nearest(fake.detach())[0].mean()).read(ctx)
            due = state.updates % every == 0 or state.updates == steps
            if due:
                values["modes"] = count_modes(draw(generator))
            accel.log(ctx, trackers, values, step=state.updates)
            if due:
                accel.save_state(ctx, out, items | {"state": state}, step=state.updates, keep=2)
    accel.save(ctx, {"pictures": picture(draw(generator))[None]}, f"{out}/pictures.safetensors")


def constant(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the model's outputs. Gradients reach the inputs, and none of its weights."""
    plain = accel.unwrap_model(model)
    weights = {name: weight.detach() for name, weight in plain.named_parameters()}
    return torch.func.functional_call(plain, weights, (inputs,))


@torch.no_grad()
def draw(generator: nn.Module) -> Tensor:
    """Return 2,000 points of the generator, [2000, 2]; the same noise each time."""
    noise = torch.randn(2000, 4, generator=accel.seeding.Key(1).generator())
    plain = accel.unwrap_model(generator)
    return plain(noise.to(next(plain.parameters()).device)).cpu()


def nearest(points: Tensor) -> tuple[Tensor, Tensor]:
    """Return each point's distance to the nearest mode, and which one it is."""
    distance, mode = torch.cdist(points, MODES.to(points.device)).min(dim=1)
    return distance, mode


def count_modes(points: Tensor) -> int:
    """Return the number of modes near which at least a fortieth of the points lie: a third of their fair share."""
    distance, mode = nearest(points)
    near = torch.bincount(mode[distance < 4 * SPREAD], minlength=8)
    return int((near >= len(points) / 24).sum())


def picture(points: Tensor, pixels: int = 64) -> Tensor:
    """Return the density of points as an image, [pixels, pixels] from 0 to 1."""
    at = ((points / 3 + 0.5) * pixels).long().clamp(0, pixels - 1)
    counts = torch.bincount(at[:, 1] * pixels + at[:, 0], minlength=pixels**2).float()
    return (counts / 4).clamp(max=1).view(pixels, pixels)


def make_model(inputs: int, width: int, outputs: int) -> nn.Module:
    """Return a network of two hidden layers."""
    return nn.Sequential(
        *(nn.Linear(inputs, width), nn.LeakyReLU(0.2)),
        *(nn.Linear(width, width), nn.LeakyReLU(0.2)),
        nn.Linear(width, outputs),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps")
    parser.add_argument("--size", type=int, default=128, help="width of both models")
    parser.add_argument("--out", default="runs/gan", help="folder of checkpoints and metrics")
    flags = parser.parse_args()
    with accel.session() as context:
        main(context, **vars(flags))
