# SPDX-License-Identifier: Apache-2.0
"""Train a small language model on Python's manual under any strategy: the same script, the same losses.

    accel launch --nproc-per-node 2 examples/engines.py --strategy fsdp
    accel launch --nproc-per-node 2 examples/engines.py --strategy zero2 --start-from runs/engines/fsdp

`zero1` to `zero3` are stages of DeepSpeed (pip install 'accel-torch[deepspeed]'). One seed determines the initial
weights and the order of the data, on any number of processes. A run can resume from another strategy's checkpoint.
"""

from __future__ import annotations

import argparse
import copy
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import accel

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "zero1": {"strategy": "deepspeed", "deepspeed": accel.engines.deepspeed.DeepSpeed(stage=1)},
    "zero2": {"strategy": "deepspeed", "deepspeed": accel.engines.deepspeed.DeepSpeed(stage=2)},
    "zero3": {"strategy": "deepspeed", "deepspeed": accel.engines.deepspeed.DeepSpeed(stage=3)},
}
BYTES, LENGTH = 256, 64  # a token is a byte; bytes of a sequence
SEQUENCES, MICRO_BATCHES = 32, 2  # of one optimizer step, all processes together


def train(ctx: accel.DistContext, *, steps: int, out: str, start_from: str | None = None) -> None:
    """Train to that step; losses are nats a byte.

    Args:
        ctx: the context, with the strategy.
        steps: optimizer steps from the very first one.
        out: folder of the checkpoint of the last step, of the weights, and of metrics.jsonl.
        start_from: folder of a checkpoint, of any strategy; None to begin anew.
    """
    with accel.seeding.seeded(ctx, 0):  # the first weights are the same on any number of ranks
        model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    size = SEQUENCES // MICRO_BATCHES
    loader = accel.prepare_loader(ctx, DataLoader(load_text(), size, shuffle=True, drop_last=True), global_batch=size)
    model, optimizer, loader = accel.prepare(ctx, model, optimizer, loader)
    items = {"model": model, "optimizer": optimizer}
    state = accel.train_state(ctx, seed=0, accumulation=MICRO_BATCHES)
    if start_from is not None:
        state = accel.resume(ctx, start_from, items, state)

    to = [accel.trackers.jsonl(), accel.trackers.console()]
    with accel.tracking(ctx, "engines", to=to, dir=out) as trackers:
        losses: list[float] = []
        for batch in accel.batches(ctx, loader, state):
            inputs, targets = batch.data[:, :-1], batch.data[:, 1:]
            state = state.next(batch)
            with accel.accumulate(ctx, state, model):
                positions = torch.arange(inputs.shape[1], device=ctx.device)
                with accel.autocast(ctx):
                    loss = nn.functional.cross_entropy(model(inputs, positions).flatten(0, 1), targets.flatten())
                state = accel.backward(ctx, loss, state)
            losses.append(float(loss.detach()))
            if state.sync:
                state = accel.optimizer_step(ctx, optimizer, state, max_norm=1.0)
                mean = float(accel.reduce(ctx, torch.tensor(losses[-MICRO_BATCHES:]).mean(), "mean"))
                accel.log(ctx, trackers, {"loss": mean, "norm": state.grad_norm}, step=state.updates)
                if state.updates == steps:
                    break
        accel.save_state(ctx, out, items | {"state": state}, step=state.updates)
        accel.save_model(ctx, model, f"{out}/weights")


def load_text() -> Tensor:
    """Return Python's manual as sequences of bytes, int64 of shape [sequences, LENGTH]."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)


class Transformer(nn.Module):
    """A plain torch transformer, which sees no position after its own."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.tokens = nn.Embedding(BYTES, width)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(depth))
        self.head = nn.Linear(width, BYTES)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.tokens(input_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1], device=hidden.device, dtype=hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=STRATEGIES, default="ddp", help="how the model is spread")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps from the very first one")
    parser.add_argument("--out", help="folder of what is saved (default: runs/engines/STRATEGY)")
    parser.add_argument("--start-from", metavar="DIR", help="folder of a checkpoint, of any strategy")
    given = parser.parse_args()
    with accel.session(**STRATEGIES[given.strategy]) as ctx:
        folder = given.out or f"runs/engines/{given.strategy}"
        train(ctx, steps=given.steps, out=folder, start_from=given.start_from)
