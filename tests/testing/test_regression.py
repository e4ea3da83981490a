# SPDX-License-Identifier: Apache-2.0
"""The regression whose answer is known: any split into ranks and micro-batches trains to the line of arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import accel
from accel.testing import Line, RegressionDataset, RegressionModel


@pytest.mark.parametrize(("size", "length", "per_step"), [(1, 7, 1), (2, 7, 2), (3, 10, 2)])
def test_any_split_of_the_points_descends_to_the_same_line(ranks, size, length, per_step):
    points = RegressionDataset(length, Line(-1.5, 0.25), seed=size, dtype=torch.float64)
    micro = -(-length // per_step)

    def rank(ctx: accel.DistContext) -> Line:
        net = RegressionModel(dtype=torch.float64)
        loader = accel.prepare_loader(ctx, DataLoader(points), global_batch=max(micro, ctx.world_size))
        model, optimizer = accel.prepare(ctx, net, torch.optim.SGD(net.parameters(), lr=0.1))
        state = accel.train_state(ctx, accumulation=len(list(accel.batches(ctx, loader))))
        while state.epoch < 2:
            for batch in accel.batches(ctx, loader, state):
                x, y = batch.data
                state = state.next(batch)
                with accel.accumulate(ctx, state, model):
                    state = accel.backward(ctx, functional.mse_loss(model(x), y), state)
                if state.sync:
                    state = accel.optimizer_step(ctx, optimizer, state)
        return net.line()

    expected = points.descend(lr=0.1, steps=2)
    for line in ranks.run(rank, size):
        torch.testing.assert_close(torch.tensor(line), torch.tensor(expected))


def test_the_best_line_is_where_descent_ends():
    points = RegressionDataset(32, noise=0.5, dtype=torch.float64)
    end = points.descend(lr=0.2, steps=500, start=Line(7.0, -7.0))
    torch.testing.assert_close(torch.tensor(end), torch.tensor(points.best()))
    assert RegressionDataset(8, noise=0.0, dtype=torch.float64).best() == Line(2.0, 3.0)
    assert RegressionModel(end, dtype=torch.float64).line() == end
