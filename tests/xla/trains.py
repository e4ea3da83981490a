# SPDX-License-Identifier: Apache-2.0
"""A small training on the device that the command names, saved and resumed; prints the sum of the parameters."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

import accel

EPOCHS = 2


class Digits(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(64, 8, generator=generator)
        self.targets = torch.randint(0, 4, (64,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[at], self.targets[at]


def train(ctx: accel.DistContext, folder: str) -> float:
    torch.manual_seed(0)
    shared = nn.Linear(8, 8)  # twice in the model: its parameters are tied
    model: nn.Module = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(8, 4))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: Any = torch.utils.data.DataLoader(Digits(), batch_size=8, shuffle=True)
    model, optimizer, loader = accel.prepare(ctx, model, optimizer, loader)
    cursor, accum, scaler = accel.Cursor(seed=0), accel.Accumulation(steps=2), accel.loss_scale(ctx)
    while cursor.epoch < EPOCHS:
        for batch in accel.batches(ctx, loader, cursor):
            inputs, targets = batch.data
            accum = accum.next(last=batch.is_last)
            with accel.training.parts.accumulate(ctx, accum, model):
                with accel.autocast(ctx):
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                accum = accel.training.parts.backward(ctx, loss, scaler, accum, weight=batch.valid)
            if accum.sync:
                step = accel.training.parts.optimizer_step(ctx, optimizer, scaler, accum, max_norm=1.0)
                accum, scaler = step.accum, step.scaler
            cursor = batch.next
        items = {"model": model, "optimizer": optimizer, "cursor": cursor, "accum": accum, "scaler": scaler}
        found = accel.save_state(ctx, folder, items, step=cursor.epoch)
    before = total(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loaded = accel.load_state(ctx, found, items)
    assert loaded["cursor"] == cursor
    assert total(model) == before
    assert accel.gather(ctx, {"loss": loss.detach()})["loss"].shape == (ctx.world_size,)
    return before


def total(model: nn.Module) -> float:
    return sum(parameter.detach().cpu().double().abs().sum().item() for parameter in model.parameters())


if __name__ == "__main__":
    with accel.session(device=sys.argv[1]) as ctx:
        sys.stdout.write(f"{ctx.device} {train(ctx, sys.argv[2])}\n")
