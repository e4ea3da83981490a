# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT of nanoGPT's size on the sources of Python's library, on any mesh, with its throughput and MFU.

    accel launch --nproc-per-node 8 examples/gpt.py
    accel launch --nproc-per-node 8 --mesh dp=4,tp=2 --strategy fsdp examples/gpt.py --size 2048 --depth 24
    accel launch --nproc-per-node 2 examples/gpt.py --size 64 --depth 4 --length 64 --batch 32 --vocabulary 1024

A step takes `--batch` rows on any mesh, as many at a time as fit into memory. The loss of each step is the same on
every mesh. A GPU computes in bf16, with compiled blocks.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import accel
from accel.schedules import Cosine, Joined, warmup


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each after a norm and added to its input."""

    def __init__(self, ctx: accel.DistContext, width: int) -> None:
        super().__init__()
        self.ctx, self.head_width = ctx, 64 if width % 64 == 0 and width > 64 else width // 4
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.before(x)).unflatten(2, (3, -1, self.head_width)).transpose(1, 3)
        mixed = accel.parallel.context_attention(self.ctx, *heads.unbind(2))  # crosses ranks along cp
        x = x + self.join(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.between(x)), approximate="tanh"))


class Gpt(nn.Module):
    """A decoder like GPT-2, with a head that is tied to the embedding."""

    def __init__(self, ctx: accel.DistContext, width: int, depth: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(ctx, width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for weight in (each for each in self.parameters() if each.dim() == 2):
            nn.init.normal_(weight, std=0.02)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.tokens(input_ids) + self.places(position_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def load_words(vocabulary: int, length: int) -> Tensor:
    """Return the sources of Python's library as rows of the most frequent words, 0 for all others."""
    files = sorted(Path(argparse.__file__).parent.glob("*.py"))
    words = re.findall(r" ?\w+| ?[^\w\s]|\s+", "\n".join(path.read_text(errors="ignore") for path in files))
    numbers = {word: at for at, (word, _) in enumerate(Counter(words).most_common(vocabulary - 1), 1)}
    return torch.tensor([numbers.get(word, 0) for word in words]).unfold(0, length, length)


def sum_of_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum over the words that count; `train_step` divides it by their number on all ranks."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def take_step(
    ctx: accel.DistContext, state: accel.TrainState, batch: accel.Batch, model: nn.Module,
    optimizer: torch.optim.Optimizer, scheduler: LambdaLR,
) -> tuple[accel.TrainState, Tensor, Tensor]:  # fmt: skip
    """Train on the rows of a micro-batch; return the state, the mean loss and the number of words in it."""
    labels = batch.data.clone()
    labels[int(batch.valid) :] = -100  # placeholders, if there are more ranks than rows
    inputs = accel.parallel.split_sequence(ctx, {"input_ids": batch.data, "labels": labels})
    targets = inputs.pop("labels")  # the words that follow
    count = (targets != -100).sum()
    state, loss = accel.train_step(
        ctx, state, batch, model, optimizer, sum_of_losses, inputs=inputs, targets=targets, weight=count,
        scheduler=scheduler, max_norm=1.0,
    )  # fmt: skip
    return state, loss, count


def main(
    ctx: accel.DistContext, *, steps: int, size: int, out: str, depth: int = 12, vocabulary: int = 50304,
    length: int = 1024, batch: int = 512, lr: float = 6e-4,
) -> None:  # fmt: skip
    """Train for so many optimizer steps of `batch` rows; the loss is in nats a word."""
    rows, sizes = load_words(vocabulary, length), (size, depth, vocabulary, length)
    rows = rows[: len(rows) // batch * batch]  # an epoch is a number of full steps
    example = {"input_ids": rows[:1], "position_ids": torch.arange(length)[None]}
    alone = Gpt(accel.single(), *sizes)  # not divided
    flops = accel.metrics.count_flops(alone, **example).per_sample(1)
    styles = accel.parallel.tensor_plan(alone, example=example) if ctx.axis("tp").size > 1 else {}
    on_gpu, every = ctx.device.type == "cuda", max(1, steps // 20)

    def train(at_once: int) -> None:
        with accel.seeding.seeded(ctx, 0):  # the first weights are the same on every mesh
            model = Gpt(ctx, *sizes)
        model = accel.compile_model(model, "repeated", dynamic=False) if on_gpu else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        scheduler = LambdaLR(optimizer, Joined((warmup(1 + steps // 20), Cosine(steps, end=0.1))))
        data = DataLoader(rows, at_once, shuffle=True, pin_memory=on_gpu)
        loader = accel.prepare_loader(ctx, data, global_batch=at_once)
        plan = accel.parallel.Plan(tensor=styles, logits="deferred")  # the loss computes them by chunks
        model, optimizer, scheduler = accel.prepare(ctx, model, optimizer, scheduler, plan=plan)
        to = [accel.trackers.jsonl(), accel.trackers.console(names=["loss"], rates=True)]
        with accel.tracking(ctx, "gpt", to=to, dir=out) as trackers:
            items = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "trackers": trackers}
            state = accel.resume(ctx, out, items, accel.train_state(ctx, seed=0, accumulation=batch // at_once))
            statistics = accel.metrics.step_statistics(loss="mean")
            batches = accel.batches(ctx, loader, state, repeat=True)
            while state.updates < steps:
                part = next(batches)
                state, loss, count = take_step(ctx, state, part, model, optimizer, scheduler)
                statistics = statistics.add(part, state, loss=loss, weight=count, tokens=part.weight * length)
                if state.accum.micro == 0 and (state.updates % every == 0 or state.updates == steps):
                    values, statistics = statistics.read(ctx, flops_per_sample=flops)
                    logged = {name: values[name] for name in ("loss", "grad_norm", "time")}
                    accel.log(ctx, trackers, logged, step=state.updates)
                    accel.save_state(ctx, out, items | {"state": state}, step=state.updates, keep=2)

    accel.find_executable_batch_size(  # as many rows at a time, on all ranks together, as fit
        ctx, train, batch, shrink=lambda rows: max(each for each in range(rows) if not each or batch % each == 0)
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"steps": (200, "optimizer steps"), "size": (768, "width"), "depth": (12, "blocks"), "lr": (6e-4, "rate")}
    numbers |= {"vocabulary": (50304, "words"), "length": (1024, "of a row"), "batch": (512, "rows of a step")}
    for name, (default, about) in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=about)
    parser.add_argument("--out", default="runs/gpt", help="folder of checkpoints and metrics")
    flags = parser.parse_args()
    with accel.session() as context:
        if context.device.type == "cuda" and "precision" not in context.launched:
            context = accel.replace(context, precision="bf16")
        main(context, **vars(flags))
