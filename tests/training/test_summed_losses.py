# SPDX-License-Identifier: Apache-2.0
"""A sum in the place of a mean changes with the number of ranks: `backward` refuses torch's losses that are sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from catching import assert_raises
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.errors import StepError
from accel.testing import Simulator

X = torch.linspace(-1, 1, 20, dtype=torch.float64).view(10, 2).sin()
Y = X.flip(0).cos()
Loss = Callable[[Tensor, Tensor, accel.Batch], Tensor]


def _squares(output: Tensor, target: Tensor, _batch: object = None) -> Tensor:
    return functional.mse_loss(output, target, reduction="sum")


def _of_terms(output: Tensor, target: Tensor, _batch: object = None) -> Tensor:
    return 0.1 * output.square().sum() + functional.smooth_l1_loss(output, target, reduction="sum")


def _mean(output: Tensor, target: Tensor, batch: accel.Batch) -> Tensor:
    return _squares(output, target) / max(batch.valid, 1)


def _train(
    ctx: accel.DistContext,
    loss_of: Loss,
    *,
    steps: int = 1,
    weighted: bool = False,
    batch_size: int = 4,
    penalty: float = 0.0,
) -> Tensor:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    loader = accel.prepare_loader(ctx, DataLoader(TensorDataset(X, Y), batch_size=batch_size), global_batch=batch_size)
    model, optimizer = accel.prepare(ctx, net, torch.optim.SGD(net.parameters(), lr=0.1))
    state = accel.train_state(ctx, accumulation=steps)
    for batch in accel.batches(ctx, loader, state):
        state = state.next(batch)
        with accel.accumulate(ctx, state, model):
            loss = loss_of(model(batch.data[0]), batch.data[1], batch)
            for each in model.parameters() if penalty else ():
                loss = loss + functional.mse_loss(each, torch.full_like(each, penalty), reduction="sum")
            state = accel.backward(ctx, loss, state, weight=batch.valid if weighted else None)
        if state.sync:
            state = accel.optimizer_step(ctx, optimizer, state)
    return accel.get_state_dict(ctx, model, dst=None)["0.weight"]


@pytest.mark.parametrize("loss_of", [_squares, _of_terms])
def test_a_sum_over_samples_of_several_ranks_or_micro_batches_is_refused(ranks: Simulator, loss_of: Loss) -> None:
    def refused(ctx: accel.DistContext, steps: int) -> None:
        with assert_raises(StepError, problem="the loss is a sum", fix=r"loss / max\(batch.valid, 1\)"):
            _train(ctx, loss_of, steps=steps)

    ranks.run(lambda ctx: refused(ctx, 1), 2)
    refused(accel.single(), 2)


def test_means_weights_and_sums_of_one_rank_are_taken(ranks: Simulator) -> None:
    mean = _train(accel.single(), _mean)
    for each in ranks.run(lambda ctx: _train(ctx, _mean), 2):
        torch.testing.assert_close(each, mean)
    _ = ranks.run(lambda ctx: _train(ctx, _squares, weighted=True), 2)
    _ = ranks.run(lambda ctx: _train(ctx, _squares, batch_size=2), 2)  # a sample a rank, which is its mean
    summed = _train(accel.single(), _squares)
    assert not torch.equal(summed, mean)
    for each in ranks.run(lambda ctx: _train(accel.replace(ctx, mesh="tp=2"), _squares), 2, default_group=True):
        torch.testing.assert_close(each, summed)


def test_a_sum_over_a_parameter_is_a_penalty_and_taken(ranks: Simulator) -> None:
    alone = _train(accel.single(), _mean, penalty=0.1)
    assert not torch.equal(alone, _train(accel.single(), _mean))
    for each in ranks.run(lambda ctx: _train(ctx, _mean, penalty=0.1), 2):
        torch.testing.assert_close(each, alone)
