# SPDX-License-Identifier: Apache-2.0
"""Two real processes that share a model out train as one does, and one process goes on from their checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import job, script_ranks

import accel

SCRIPT = """
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, inputs):
        return inputs + self.norm(torch.tanh(self.inner(inputs)))


def make_model():
    return nn.Sequential(nn.Linear(8, 16), Block(), Block(), nn.Linear(16, 1)).double()


def train(ctx, out, epochs):
    torch.manual_seed(ctx.rank)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.randn(96, 8, generator=torch.Generator().manual_seed(1)).double()
    loader = accel.prepare_loader(ctx, DataLoader(TensorDataset(rows, rows[:, :1]), 16, shuffle=True), global_batch=16)
    model, optimizer = accel.prepare(ctx, model, optimizer)
    model.eval()  # batch norms depend on how samples are divided
    state = accel.train_state(ctx, seed=3, accumulation=2)

    def items():
        return {"model": model, "optimizer": optimizer, "state": state}

    if found := accel.latest_checkpoint(out):
        state = accel.load_state(ctx, found, items())["state"]
    while state.epoch < epochs:
        for batch in accel.batches(ctx, loader, state):
            state = state.next(batch)
            with accel.accumulate(ctx, state, model):
                loss = nn.functional.mse_loss(model(batch.data[0]), batch.data[1])
                state = accel.backward(ctx, loss, state)
            if state.sync:
                state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.5)
    accel.save_state(ctx, out, items(), step=epochs)
    accel.save_model(ctx, model, out + "-model")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with accel.session(device="cpu") as ctx:
        assert (ctx.strategy, ctx.world_size) == ("fsdp", 2)
        train(ctx, sys.argv[1], 2)
"""


@pytest.mark.multiprocess
def test_two_processes_are_one(tmp_path: Path) -> None:
    script, both, alone = tmp_path / "train_shared.py", str(tmp_path / "both"), str(tmp_path / "alone")
    script.write_text(SCRIPT)
    with script_ranks(script, job(2, ACCEL_STRATEGY="fsdp"), both, folder=tmp_path) as ranks:
        assert [rank.wait(200) for rank in ranks] == [0, 0], [rank.said() for rank in ranks]
        assert [rank.said() for rank in ranks] == ["", ""]  # not a warning either

    names = {"__name__": "train_shared"}
    exec(SCRIPT, names)
    with torch.random.fork_rng(devices=[]):
        for out in (both, alone):
            names["train"](accel.single(), out, 3)
    ends = [names["make_model"]() for _ in range(2)]
    for model, out in zip(ends, (both, alone), strict=True):
        accel.load_state(accel.single(), accel.latest_checkpoint(out), {"model": model}, strict=False)
    torch.testing.assert_close(ends[0].state_dict(), ends[1].state_dict(), rtol=0, atol=1e-10)
