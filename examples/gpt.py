# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT of nanoGPT's size on the sources of Python's library, on any mesh, with its throughput and MFU.

    accel launch --nproc-per-node 8 --precision bf16 --accumulation 4 examples/gpt.py
    accel launch --nproc-per-node 8 --precision bf16 --mesh dp=4,tp=2 --strategy fsdp examples/gpt.py --model llama
    accel launch --nproc-per-node 2 examples/gpt.py --size 64 --depth 4 --length 64 --batch 16 --vocabulary 1024

The loss of each step is the same on every mesh. Models but `gpt` are those of Hugging Face's transformers.
"""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import accel

STYLES: Any = {  # how ranks along tp divide a `Gpt`
    "tokens": "embedding_rowwise",
    "blocks.*.qkv": "packed_colwise_3",
    "blocks.*.join": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise",
}


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each after a norm and added to its input."""

    def __init__(self, ctx: accel.DistContext, width: int) -> None:
        super().__init__()
        self.ctx, self.head_width = ctx, 64 if width % 64 == 0 and width > 64 else width // 4
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.before(x)).unflatten(2, (3, -1, self.head_width))  # as many as tp leaves this rank
        mixed = accel.parallel.context_attention(self.ctx, *heads.transpose(1, 3).unbind(2))  # crosses ranks along cp
        x = x + self.join(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.between(x)), approximate="tanh"))


class Gpt(nn.Module):
    """A decoder as GPT-2's, whose head has the weights of its embedding."""

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


def make_model(ctx: accel.DistContext, name: str, width: int, depth: int, vocabulary: int, length: int) -> nn.Module:
    """Return a model with first weights of one seed; heads are 64 wide, or a fourth of a narrow model."""
    with accel.seeding.seeded(ctx, 0):
        if name == "gpt":
            return Gpt(ctx, width, depth, vocabulary, length)
        from transformers import AutoConfig, AutoModelForCausalLM

        sizes = {"vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": depth, "n_positions": length}
        sizes |= {"num_attention_heads": width // 64 if width > 64 else 4, "intermediate_size": 2 * width}
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "num_local_experts": 4, "use_cache": False}
        sizes |= {} if name == "gpt2" else {"num_key_value_heads": 2}
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes))


def load_words(vocabulary: int, length: int) -> Tensor:
    """Return the sources of Python's library as sequences of the most frequent words, 0 for all others."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    words = re.findall(r" ?\w+| ?[^\w\s]|\s+", "\n".join(path.read_text(errors="ignore") for path in files))
    numbers = {word: at for at, (word, _) in enumerate(Counter(words).most_common(vocabulary - 1), 1)}
    tokens = torch.tensor([numbers.get(word, 0) for word in words])
    return tokens[: len(tokens) // length * length].view(-1, length)


def main(
    ctx: accel.DistContext, *, steps: int, size: int, out: str, model: str = "gpt", depth: int = 12,
    vocabulary: int = 50304, length: int = 1024, batch: int = 8, lr: float = 6e-4,
) -> None:  # fmt: skip
    """Train for so many optimizer steps; the loss is in nats a word."""
    rows, sizes = load_words(vocabulary, length), (size, depth, vocabulary, length)
    alone, places = make_model(accel.single(), model, *sizes), torch.arange(length)[None]
    flops = accel.metrics.count_flops(alone, input_ids=rows[:1], position_ids=places).per_sample(1)
    net = make_model(ctx, model, *sizes)
    styles = STYLES if model == "gpt" else accel.parallel.tensor_plan(net, head="colwise")
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = accel.schedules.Joined((accel.schedules.warmup(1 + steps // 20), accel.schedules.Cosine(steps, end=0.1)))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    loader = accel.prepare_loader(ctx, DataLoader(rows, batch, shuffle=True, drop_last=True), global_batch=batch)
    net, optimizer, scheduler = accel.prepare(ctx, net, optimizer, scheduler, plan=accel.parallel.Plan(tensor=styles))

    def sum_of_losses(output: Any, targets: Tensor) -> Tensor:
        logits = output if isinstance(output, Tensor) else output.logits  # along tp, those of this rank's words
        return accel.parallel.vocab_cross_entropy(ctx, logits.flatten(0, 1), targets.flatten())

    to = [accel.trackers.jsonl(), accel.trackers.console()]
    with accel.tracking(ctx, "gpt", to=to, dir=out) as trackers:
        items = {"model": net, "optimizer": optimizer, "scheduler": scheduler, "trackers": trackers}
        state = accel.resume(ctx, out, items, accel.train_state(ctx, seed=0))
        statistics, every = accel.metrics.step_statistics(loss="mean"), max(1, steps // 20)
        batches = accel.batches(ctx, loader, state, repeat=True)
        while state.updates < steps:
            each = next(batches)
            labels, taken = each.data.clone(), state.updates
            labels[int(each.valid) :] = -100  # placeholders, where there are more ranks than rows
            part = accel.parallel.split_sequence(ctx, {"input_ids": each.data, "labels": labels})
            count = ((targets := part.pop("labels")) != -100).sum()  # the words that follow
            state, loss = accel.train_step(
                ctx, state, each, net, optimizer, sum_of_losses, inputs=part, targets=targets, weight=count,
                scheduler=scheduler, max_norm=1.0,
            )  # fmt: skip
            statistics = statistics.add(each, state, loss=loss, weight=count, tokens=each.weight * length)
            if state.updates > taken and (state.updates % every == 0 or state.updates == steps):
                values, statistics = statistics.read(ctx, flops_per_sample=flops)
                kept = {name: values[name] for name in ("loss", "grad_norm", "time")}
                accel.log(ctx, trackers, kept, step=state.updates)
                accel.save_state(ctx, out, items | {"state": state}, step=state.updates, keep=2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"steps": (200, "optimizer steps"), "size": (768, "width"), "depth": (12, "blocks"), "lr": (6e-4, "rate")}
    numbers |= {"vocabulary": (50304, "words"), "length": (1024, "of a row"), "batch": (8, "rows of a micro-batch")}
    for name, (default, about) in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=about)
    parser.add_argument("--model", default="gpt", choices=["gpt", "llama", "mixtral", "gpt2"], help="kind of model")
    parser.add_argument("--out", default="runs/gpt", help="folder of checkpoints and metrics")
    flags = parser.parse_args()
    with accel.session() as context:
        main(context, **vars(flags))
