# SPDX-License-Identifier: Apache-2.0
"""Ranks that share samples, as those of a tensor-parallel group do, weigh no more than one rank would."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel

TOLERANCE = {"rtol": 0, "atol": 1e-10}


def _model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3), nn.Tanh()).double()


def _loader(samples: int, batch_size: int) -> DataLoader[Any]:
    rows = torch.randn(samples, 5, generator=torch.Generator().manual_seed(samples), dtype=torch.float64)
    return DataLoader(TensorDataset(rows), batch_size=batch_size, shuffle=True)


def _train(ctx: accel.DistContext, model: nn.Module, loader: Any, steps: int, how: str) -> Any:
    """Two epochs of clipped steps: the norms of gradients, and the mean loss as metrics count it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    accum, scaler, mean, norms = accel.Accumulation(steps), accel.loss_scale(ctx), accel.Mean(), []
    cursor = accel.Cursor(seed=4)
    while cursor.epoch < 2:
        for batch in accel.batches(ctx, loader, cursor):
            accum, cursor = accum.next(last=batch.is_last), batch.next
            losses = model(batch.data[0]).square().mean(1)[: batch.valid or None]
            weight = {"count": batch.valid, "number": int(batch.valid), "tensor": torch.tensor(int(batch.valid))}[how]
            with accel.accumulate(ctx, accum, model):
                accum = accel.backward(ctx, losses.mean(), scaler, accum, weight=weight)
            mean = mean.add(losses.mean(), batch)
            if accum.sync:
                step = accel.optimizer_step(ctx, optimizer, scaler, accum, max_norm=0.05)
                accum, scaler = step.accum, step.scaler
                norms.append(step.grad_norm)
    return norms, mean.value(ctx)


@settings(deadline=None, max_examples=25)
@given(
    share=st.sampled_from([1, 2, 4]),
    samples=st.integers(5, 12),
    per_step=st.sampled_from([4, 8]),
    steps=st.integers(1, 3),
    how=st.sampled_from(["count", "number", "tensor"]),
)
def test_replicas_that_share_samples_step_as_one_process(ranks, share, samples, per_step, steps, how):
    def rank(ctx):
        model = accel.prepare_model(ctx, _model())
        place = (ctx.rank // share, ctx.world_size // share)
        raw = _loader(samples, per_step * share // ctx.world_size)
        loader = accel.prepare_loader(ctx, raw, data_parallel=place)
        return _train(ctx, model, loader, steps, how), [each.detach().clone() for each in model.parameters()]

    alone, model = accel.single(), _model()
    loader = accel.prepare_loader(alone, _loader(samples, per_step))
    expected = _train(alone, model, loader, steps, "count"), [each.detach() for each in model.parameters()]
    for got in ranks.run(rank, 4):
        torch.testing.assert_close(got, expected, **TOLERANCE)
