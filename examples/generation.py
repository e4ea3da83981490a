# SPDX-License-Identifier: Apache-2.0
"""Teach a small transformer to write words backwards, and let all processes generate the answers of a test.

    accel launch --nproc-per-node 2 examples/generation.py

Training predicts all letters at once. In the test the model writes them one by one, each process for its share of the
words, and the answers are counted once each.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import accel

LETTERS, TURN = 26, 26  # a to z, and the token that asks for the answer
LONG = 5  # letters of a word


def make_words(count: int, seed: int) -> Tensor:
    """Return random words, each with the turn and its answer: int64 of shape [count, 2 * LONG + 1]."""
    words = torch.randint(LETTERS, (count, LONG), generator=torch.Generator().manual_seed(seed))
    return torch.cat([words, torch.full((count, 1), TURN), words.flip(1)], dim=1)


def spell(tokens: Tensor) -> str:
    """Return tokens as text."""
    return "".join("abcdefghijklmnopqrstuvwxyz>"[int(token)] for token in tokens)


class Decoder(nn.Module):
    """A transformer in which no place sees those behind it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.tokens, self.places = nn.Embedding(LETTERS + 1, width), nn.Embedding(2 * LONG + 1, width)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, LETTERS + 1)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device, dtype=hidden.dtype)
        return self.head(self.layers(hidden, mask=mask, is_causal=True))


def sum_of_losses(logits: Tensor, answers: Tensor) -> Tensor:
    """Return the sum over words of the mean loss of a letter of the answer."""
    return cross_entropy(logits[:, LONG:].flatten(0, 1), answers.flatten(), reduction="sum") / LONG


def main(ctx: accel.DistContext, *, steps: int, size: int, out: str) -> None:
    """Train for so many optimizer steps, with twenty tests on the way."""
    with accel.seeding.seeded(ctx, 0):  # the first weights are the same on any number of processes
        model = Decoder(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = accel.schedules.Joined((accel.schedules.warmup(10), accel.schedules.Cosine(steps)))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    loader = accel.prepare_loader(ctx, DataLoader(make_words(6400, seed=0), 64, shuffle=True), global_batch=64)
    test_loader = accel.prepare_loader(ctx, DataLoader(make_words(100, seed=1), 50))
    model, optimizer, scheduler = accel.prepare(ctx, model, optimizer, scheduler)

    to = [accel.trackers.jsonl(), accel.trackers.console(formats={"right": ".1%"})]
    with accel.tracking(ctx, "generation", to=to, dir=out) as trackers:
        items = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "trackers": trackers}
        state = accel.resume(ctx, out, items, accel.train_state(ctx, seed=0, accumulation=1))
        metrics, every = accel.metrics.running_metrics(loss="mean"), max(1, steps // 20)
        batches = accel.batches(ctx, loader, state, repeat=True)
        while state.updates < steps:
            batch = next(batches)
            inputs, answers = batch.data[:, :-1], batch.data[:, LONG + 1 :]
            state, loss = accel.train_step(
                ctx, state, batch, model, optimizer, sum_of_losses, inputs=inputs, targets=answers,
                scheduler=scheduler, max_norm=1.0,
            )  # fmt: skip
            metrics = metrics.add(batch.weight, loss=loss)
            if state.updates % every == 0 or state.updates == steps:
                values, metrics = metrics.read(ctx)
                values["right"], sample = answer(ctx, model, test_loader)
                accel.log(ctx, trackers, values, step=state.updates)
                accel.save_state(ctx, out, items | {"state": state}, step=state.updates, keep=2)
                accel.print(ctx, sample, flush=True)


@torch.no_grad()
def answer(ctx: accel.DistContext, model: nn.Module, loader: accel.Loader) -> tuple[float, str]:
    """Return the share of words that the model writes backwards without an error, and an answer."""
    metrics, written = accel.metrics.running_metrics(right="mean"), torch.empty(0)
    with accel.evaluating(model):
        for batch in accel.batches(ctx, loader):
            prompts = batch.data[:, : LONG + 1]
            written = accel.training.generate(ctx, model, prompts, max_new_tokens=LONG)
            metrics = metrics.add(batch.weights, right=(written == batch.data).all(1).double())
    return metrics.read(ctx)[0]["right"], spell(written[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--size", type=int, default=64, help="width of the model")
    parser.add_argument("--out", default="runs/generation", help="folder of checkpoints and metrics")
    flags = parser.parse_args()
    with accel.session() as context:
        main(context, **vars(flags))
