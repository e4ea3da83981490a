# SPDX-License-Identifier: Apache-2.0
"""Train a small Llama on Python's manual: documents packed into rows of one length, every byte weighing the same.

    accel launch --nproc-per-node 2 examples/causal_lm.py

A row holds several documents and some padding, so rows differ in the bytes that count. The weight of a batch is their
number, and a step is the same on any number of processes. Needs transformers.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import accel

LENGTH = 128  # bytes of a row
IGNORED = -100  # the label of a byte that has no next one


def make_documents() -> list[bytes]:
    """Return the paragraphs of Python's manual, the long ones cut to a row."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    paragraphs = [paragraph.strip().encode() for paragraph in text.split("\n\n")]
    return [paragraph[:LENGTH] for paragraph in paragraphs if len(paragraph) > 16]


def pack(documents: list[bytes]) -> list[dict[str, Tensor]]:
    """Return rows of whole documents; each goes into the first of the newest eight rows that has the room."""
    rows: list[list[bytes]] = []
    for document in documents:
        open_rows = (row for row in rows[-8:] if sum(map(len, row)) + len(document) <= LENGTH)
        if (row := next(open_rows, None)) is None:
            rows.append(row := [])
        row.append(document)
    return [make_row(row) for row in rows]


def make_row(documents: list[bytes]) -> dict[str, Tensor]:
    """Return bytes, labels and positions; positions that restart let each document attend only to itself."""
    inputs, labels, positions = (
        torch.zeros(LENGTH, dtype=torch.long),
        torch.full([LENGTH], IGNORED),
        torch.arange(LENGTH),
    )
    start = 0
    for document in documents:
        end = start + len(document)
        inputs[start:end] = torch.tensor(list(document))
        labels[start : end - 1] = inputs[start + 1 : end]  # the next byte of the same document
        positions[start:] = torch.arange(LENGTH - start)
        start = end
    positions[start:] = torch.arange(LENGTH - start)  # the padding is a separate document
    return {"input_ids": inputs, "position_ids": positions, "labels": labels}


def make_model(width: int) -> nn.Module:
    """Return a Llama of four layers over bytes."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, use_cache=False, **sizes))


def sum_of_losses(output: Any, labels: Tensor) -> Tensor:
    """Return the sum over the bytes that count, which `train_step` divides by their number over all processes."""
    logits = output.logits.flatten(0, 1).float()
    return nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")


def main(ctx: accel.DistContext, *, steps: int, size: int, out: str) -> None:
    """Train for so many optimizer steps; the loss is in nats a byte."""
    with accel.seeding.seeded(ctx, 0):  # the first weights are the same on any number of processes
        model = make_model(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = accel.schedules.Joined((accel.schedules.warmup(10), accel.schedules.Cosine(steps)))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    rows: Any = pack(make_documents())
    loader = accel.prepare_loader(ctx, DataLoader(rows, 32, shuffle=True), global_batch=32)
    model, optimizer, scheduler = accel.prepare(ctx, model, optimizer, scheduler)

    to = [accel.trackers.jsonl(), accel.trackers.console()]
    with accel.tracking(ctx, "causal_lm", to=to, dir=out) as trackers:
        items = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "trackers": trackers}
        state = accel.resume(ctx, out, items, accel.train_state(ctx, seed=0, accumulation=1))
        metrics, every = accel.metrics.running_metrics(loss="mean", bytes="count"), max(1, steps // 20)
        batches = accel.batches(ctx, loader, state, repeat=True)
        while state.updates < steps:
            batch = next(batches)
            inputs = dict(batch.data)
            labels = inputs.pop("labels")
            labels[int(batch.valid) :] = IGNORED  # placeholders, where there are more processes than rows
            count = (labels != IGNORED).sum()
            state, loss = accel.train_step(
                ctx, state, batch, model, optimizer, sum_of_losses, inputs=inputs, targets=labels, weight=count,
                scheduler=scheduler, max_norm=1.0,
            )  # fmt: skip
            metrics = metrics.add(count, loss=loss, bytes=count)
            if state.updates % every == 0 or state.updates == steps:
                values, metrics = metrics.read(ctx)
                accel.log(ctx, trackers, values, step=state.updates)
                accel.save_state(ctx, out, items | {"state": state}, step=state.updates, keep=2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--size", type=int, default=64, help="width of the model")
    parser.add_argument("--out", default="runs/causal_lm", help="folder of checkpoints and metrics")
    flags = parser.parse_args()
    with accel.session() as context:
        main(context, **vars(flags))
