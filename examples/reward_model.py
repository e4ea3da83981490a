# SPDX-License-Identifier: Apache-2.0
"""Train a reward model on pairs of a preferred and a rejected answer, by the loss of Bradley and Terry.

    accel launch --nproc-per-node 2 examples/reward_model.py

An answer is a row of digits, and people prefer the one with more neighbours in rising order. The model never sees that
number: it learns a score only from the choices, and in the end it orders new pairs. Answers differ in length, so rows
are padded, and a placeholder pair has no weight. A run resumes from its checkpoints.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import post_training

DIGITS, PADDING = 10, 10
SHORT, LONG = 4, 10  # digits of an answer


def make_pairs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return preferred answers and the other ones, each of shape [count, LONG]."""
    generator = torch.Generator().manual_seed(seed)
    answers = torch.randint(DIGITS, (2, 2 * count, LONG), generator=generator)
    lengths = torch.randint(SHORT, LONG + 1, (2, 2 * count, 1), generator=generator)
    inside = torch.arange(LONG) < lengths
    rising = ((answers[..., 1:] > answers[..., :-1]) & inside[..., 1:]).sum(2)
    first, second = answers.masked_fill(~inside, PADDING)
    differ = rising[0] != rising[1]
    better = (rising[0] > rising[1])[:, None]
    chosen, rejected = torch.where(better, first, second), torch.where(better, second, first)
    return chosen[differ][:count], rejected[differ][:count]


class Scorer(nn.Module):
    """A transformer with one number for each row, read at its last digit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.tokens, self.places = nn.Embedding(DIGITS + 1, width), nn.Embedding(LONG, width)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        hidden = self.layers(hidden, src_key_padding_mask=ids == PADDING)
        last = (ids != PADDING).sum(1) - 1
        return self.head(hidden[torch.arange(len(ids), device=ids.device), last])[:, 0]


def pair_loss(model: nn.Module, pairs: list[Tensor], real: Tensor) -> post_training.PairLoss:
    """Return the loss of pairs, with the share in the right order: one forward scores both answers."""
    chosen, rejected = model(torch.cat(pairs)).chunk(2)
    return post_training.reward_loss(chosen, rejected, weights=real)


@torch.no_grad()
def evaluate(ctx: accel.DistContext, model: nn.Module, loader: accel.Loader) -> dict[str, float]:
    """Return the share of test pairs in the right order, each counted once on any number of processes."""
    metrics = accel.metrics.running_metrics(right="mean")
    with accel.evaluating(model):
        for batch in accel.batches(ctx, loader):
            loss = pair_loss(model, batch.data, batch.mask.to(ctx.device))
            metrics = metrics.add(loss.weight, right=loss.accuracy)
    return metrics.read(ctx)[0]


def main(ctx: accel.DistContext, *, steps: int, size: int, out: str) -> None:
    """Train for so many optimizer steps."""
    with accel.seeding.seeded(ctx, 0):  # the first weights are the same on any number of processes
        model = Scorer(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, accel.schedules.Cosine(steps))
    pairs = DataLoader(TensorDataset(*make_pairs(4000, seed=0)), 64, shuffle=True)
    loader = accel.prepare_loader(ctx, pairs, global_batch=64)
    test_loader = accel.prepare_loader(ctx, DataLoader(TensorDataset(*make_pairs(200, seed=1)), 50))
    model, optimizer, scheduler = accel.prepare(ctx, model, optimizer, scheduler)
    to = [accel.trackers.jsonl(), accel.trackers.console(formats={"right": ".1%", "reward/accuracy": ".1%"})]
    with accel.tracking(ctx, "reward_model", to=to, dir=out) as trackers:
        items = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "trackers": trackers}
        state = accel.resume(ctx, out, items, accel.train_state(ctx, seed=0, accumulation=1))
        kinds = {"loss": "mean", "reward/accuracy": "mean", "reward/margin": "mean"}
        metrics, every = accel.metrics.running_metrics(**kinds), max(1, steps // 20)
        batches = accel.batches(ctx, loader, state, repeat=True)
        while state.updates < steps:
            batch = next(batches)
            state = state.next(batch)
            with accel.accumulate(ctx, state, model):
                with accel.autocast(ctx):
                    loss = pair_loss(model, batch.data, batch.mask.to(ctx.device))
                state = accel.backward(ctx, loss.mean, state, weight=loss.weight)
            state = accel.optimizer_step(ctx, optimizer, state, scheduler=scheduler, max_norm=1.0)
            values = {"loss": loss.mean, "reward/accuracy": loss.accuracy, "reward/margin": loss.margin}
            metrics = metrics.add(loss.weight, **values)
            if state.updates % every == 0 or state.updates == steps:
                values, metrics = metrics.read(ctx)
                values |= evaluate(ctx, model, test_loader)
                accel.log(ctx, trackers, values, step=state.updates)
                accel.save_state(ctx, out, items | {"state": state}, step=state.updates, keep=2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--size", type=int, default=32, help="width of the model")
    parser.add_argument("--out", default="runs/reward_model", help="folder of checkpoints and metrics")
    flags = parser.parse_args()
    with accel.session() as context:
        main(context, **vars(flags))
