# SPDX-License-Identifier: Apache-2.0
"""Adapt a frozen Llama from Python's manual to Python's sources by low-rank adapters (LoRA) of peft.

    accel launch --nproc-per-node 2 examples/lora.py

The base is trained first, in a separate folder. Then a few percent of the weights are trained: checkpoints of that part
hold only the adapters, and a digest of their base. Losses are in nats a byte. `gain` is the loss on held-out sources
without the adapters, minus the loss with them. Needs transformers and peft.
"""

from __future__ import annotations

import argparse
import inspect
import typing
from pydoc_data.topics import topics
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import accel

LENGTH = 64  # bytes of a sequence


def make_rows(text: str) -> Tensor:
    """Return a text as sequences of bytes, int64 of shape [sequences, LENGTH + 1]."""
    tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    return tokens[: len(tokens) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)


def load_manual() -> Tensor:
    """Return Python's manual."""
    return make_rows("\n".join(topics[name] for name in sorted(topics)))


def load_sources() -> Tensor:
    """Return sources of Python's library."""
    return make_rows("\n".join(inspect.getsource(module) for module in (argparse, inspect, typing)))


def make_model(width: int) -> nn.Module:
    """Return a Llama of four layers over bytes."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, use_cache=False, **sizes))


def sum_of_losses(output: Any, targets: Tensor) -> Tensor:
    """Return the sum over sequences of the mean loss of a byte."""
    logits = output.logits.flatten(0, 1).float()
    return nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum") / LENGTH


def fit(ctx: accel.DistContext, model: nn.Module, rows: Tensor, *, steps: int, lr: float, out: str) -> nn.Module:
    """Train what is not frozen for so many optimizer steps; return the model as it was before `prepare`."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    schedule = accel.schedules.Joined((accel.schedules.warmup(10), accel.schedules.Cosine(steps)))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    loader = accel.prepare_loader(ctx, DataLoader(rows[100:], 32, shuffle=True), global_batch=32)
    test_loader = accel.prepare_loader(ctx, DataLoader(rows[:100], 50))
    model, optimizer, scheduler = accel.prepare(ctx, model, optimizer, scheduler)
    to = [accel.trackers.jsonl(), accel.trackers.console(label=f"{out} step")]
    with accel.tracking(ctx, "lora", to=to, dir=out) as trackers:
        items = {"model": accel.items.TrainableOnly(model), "optimizer": optimizer, "scheduler": scheduler}
        items |= {"trackers": trackers}
        state = accel.resume(ctx, out, items, accel.train_state(ctx, seed=0, accumulation=1))
        metrics, every = accel.metrics.running_metrics(loss="mean"), max(1, steps // 20)
        batches = accel.batches(ctx, loader, state, repeat=True)
        while state.updates < steps:
            batch = next(batches)
            inputs, targets = {"input_ids": batch.data[:, :-1]}, batch.data[:, 1:]
            state, loss = accel.train_step(
                ctx, state, batch, model, optimizer, sum_of_losses, inputs=inputs, targets=targets,
                scheduler=scheduler, max_norm=1.0,
            )  # fmt: skip
            metrics = metrics.add(batch.weight, loss=loss)
            if state.updates % every == 0 or state.updates == steps:
                values, metrics = metrics.read(ctx)
                values |= evaluate(ctx, model, test_loader)
                accel.log(ctx, trackers, values, step=state.updates)
                accel.save_state(ctx, out, items | {"state": state}, step=state.updates, keep=2)
    return accel.unwrap_model(model)


@torch.no_grad()
def evaluate(ctx: accel.DistContext, model: nn.Module, loader: accel.Loader) -> dict[str, float]:
    """Return what adapters gain on test sequences, each counted once on any number of processes; nothing of a base."""
    plain = accel.unwrap_model(model)
    if not isinstance(plain, PeftModel):
        return {}
    metrics = accel.metrics.running_metrics(gain="mean")
    with accel.evaluating(model):
        for batch in accel.batches(ctx, loader):
            inputs, targets = batch.data[:, :-1], batch.data[:, 1:]
            adapted = sum_of_losses(plain(input_ids=inputs), targets)
            with plain.disable_adapter():
                gain = sum_of_losses(plain(input_ids=inputs), targets) - adapted
            metrics = metrics.add(batch.weight, gain=gain / batch.rows)
    return metrics.read(ctx)[0]


def main(ctx: accel.DistContext, *, steps: int, size: int, out: str) -> None:
    """Train base and adapters for so many optimizer steps each."""
    with accel.seeding.seeded(ctx, 0):  # the first weights are the same on any number of processes
        base = make_model(size)
    base = fit(ctx, base, load_manual(), steps=steps, lr=4e-3, out=f"{out}/base")
    with accel.seeding.seeded(ctx, 1):
        model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    fit(ctx, model, load_sources(), steps=steps, lr=4e-3, out=out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of the base, and of the adapters")
    parser.add_argument("--size", type=int, default=64, help="width of the model")
    parser.add_argument("--out", default="runs/lora", help="folder of checkpoints and metrics")
    flags = parser.parse_args()
    with accel.session() as context:
        main(context, **vars(flags))
