# SPDX-License-Identifier: Apache-2.0
"""Teach a model which of its answers people prefer, by direct preference optimization (DPO) against a reference.

    accel launch --nproc-per-node 2 examples/dpo.py

First the model learns to sort digits, ascending or descending. Then it sees pairs of answers, and the ascending one is
preferred. A frozen copy of the model keeps it near its earlier answers. In the end it sorts in ascending order. Both
parts resume from their checkpoints. Rafailov et al. 2023, arXiv:2305.18290.
"""

from __future__ import annotations

import argparse
import copy
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import post_training

Objective = Callable[[accel.DistContext, nn.Module, list[Tensor], Tensor], tuple[post_training.LossSum, Tensor]]
DIGITS, TURN = 10, 10  # digits, and the token that asks for the answer
LONG = 4  # digits of a prompt
BETA = 0.5  # how much the reference holds the model back


def make_pairs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return prompts with the preferred answer and with the other one, each of shape [count, 2 * LONG + 1]."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.rand(count, DIGITS, generator=generator).argsort(1)[:, :LONG]  # no digit twice
    turns, up = torch.full((count, 1), TURN), prompts.sort(1).values
    return torch.cat([prompts, turns, up], 1), torch.cat([prompts, turns, up.flip(1)], 1)


class Decoder(nn.Module):
    """A causal transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.tokens, self.places = nn.Embedding(DIGITS + 1, width), nn.Embedding(2 * LONG + 1, width)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, DIGITS + 1)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device, dtype=hidden.dtype)
        return self.head(self.layers(hidden, mask=mask, is_causal=True))


def answer_logprobs(ctx: accel.DistContext, model: nn.Module, rows: Tensor) -> Tensor:
    """Return the log-probability of each row's answer."""
    logprobs = post_training.token_logprobs(ctx, model(rows[:, :-1]), rows[:, 1:])
    answers = torch.arange(1, rows.shape[1], device=rows.device) > LONG
    return post_training.sequence_sums(ctx, logprobs, answers.expand_as(logprobs))


def imitate(
    ctx: accel.DistContext, model: nn.Module, data: list[Tensor], real: Tensor
) -> tuple[post_training.LossSum, Tensor]:
    """Return the loss of answers of both kinds, and how often the preferred one is the more probable."""
    up, down = answer_logprobs(ctx, model, torch.cat(data)).chunk(2)
    weight = real.sum()
    loss = post_training.LossSum(-((up + down) * real).sum() / (2 * LONG), weight)
    return loss, ((up > down) * real).sum() / weight.clamp(min=1)


def prefer(
    frozen: nn.Module, ctx: accel.DistContext, model: nn.Module, data: list[Tensor], real: Tensor
) -> tuple[post_training.LossSum, Tensor]:
    """Return the loss of DPO: the preferred answer should gain more on the reference than the other one."""
    rows = torch.cat(data)
    with post_training.reference(ctx, frozen) as reference:
        before = answer_logprobs(ctx, reference, rows)
    up, down = answer_logprobs(ctx, model, rows).chunk(2)
    loss = post_training.dpo_loss(up, down, *before.chunk(2), beta=BETA, weights=real)
    return loss, ((up > down) * real).sum() / loss.weight.clamp(min=1)


def fit(
    ctx: accel.DistContext, model: nn.Module, objective: Objective, *, steps: int, lr: float, out: str
) -> nn.Module:
    """Train a model for so many optimizer steps; return it without what `prepare` puts around it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, accel.schedules.Cosine(steps))
    pairs = DataLoader(TensorDataset(*make_pairs(3000, seed=0)), 64, shuffle=True)
    loader = accel.prepare_loader(ctx, pairs, global_batch=64)
    test_loader = accel.prepare_loader(ctx, DataLoader(make_pairs(100, seed=1)[0], 50))
    model, optimizer, scheduler = accel.prepare(ctx, model, optimizer, scheduler)
    to = [
        accel.trackers.jsonl(),
        accel.trackers.console(label=f"{out} step", formats={"dpo/preferred": ".1%", "upwards": ".1%"}),
    ]
    with accel.tracking(ctx, "dpo", to=to, dir=out) as trackers:
        items = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "trackers": trackers}
        state = accel.resume(ctx, out, items, accel.train_state(ctx, seed=0, accumulation=1))
        metrics, every = accel.metrics.running_metrics(loss="mean", **{"dpo/preferred": "mean"}), max(1, steps // 20)
        batches = accel.batches(ctx, loader, state, repeat=True)
        while state.updates < steps:
            batch = next(batches)
            state = state.next(batch)
            with accel.accumulate(ctx, state, model):
                with accel.autocast(ctx):
                    loss, preferred = objective(ctx, model, batch.data, batch.mask.to(ctx.device))
                state = accel.backward(ctx, loss.mean, state, weight=loss.weight)
            state = accel.optimizer_step(ctx, optimizer, state, scheduler=scheduler, max_norm=1.0)
            metrics = metrics.add(loss.weight, loss=loss.mean, **{"dpo/preferred": preferred})
            if state.updates % every == 0 or state.updates == steps:
                values, metrics = metrics.read(ctx)
                values["upwards"] = sorts_upwards(ctx, model, test_loader)
                accel.log(ctx, trackers, values, step=state.updates)
                accel.save_state(ctx, out, items | {"state": state}, step=state.updates, keep=2)
    return accel.unwrap_model(model)


@torch.no_grad()
def sorts_upwards(ctx: accel.DistContext, model: nn.Module, loader: accel.Loader) -> float:
    """Return the share of prompts that the model answers with their digits in rising order."""
    metrics = accel.metrics.running_metrics(upwards="mean")
    with accel.evaluating(model):
        for batch in accel.batches(ctx, loader):
            answers = accel.training.generate(ctx, model, batch.data[:, : LONG + 1], max_new_tokens=LONG)
            metrics = metrics.add(batch.weights, upwards=(answers == batch.data).all(1).double())
    return metrics.read(ctx)[0]["upwards"]


def main(ctx: accel.DistContext, *, steps: int, size: int, out: str) -> None:
    """Train to imitate for so many optimizer steps, then to prefer for as many."""
    with accel.seeding.seeded(ctx, 0):  # the first weights are the same on any number of processes
        model = Decoder(size)
    model = fit(ctx, model, imitate, steps=steps, lr=2e-3, out=f"{out}/reference")
    frozen = accel.prepare_model(ctx, copy.deepcopy(model).requires_grad_(False))
    fit(ctx, model, functools.partial(prefer, frozen), steps=steps, lr=3e-5, out=out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each part")
    parser.add_argument("--size", type=int, default=64, help="width of the model")
    parser.add_argument("--out", default="runs/dpo", help="folder of checkpoints and metrics")
    flags = parser.parse_args()
    with accel.session() as context:
        main(context, **vars(flags))
