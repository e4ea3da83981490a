# SPDX-License-Identifier: Apache-2.0
"""A refused step names the ranks whose loss was not finite."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

import accel
from accel import NonFiniteError
from accel.comm._lost import RollCall
from accel.testing import Simulator

X = torch.linspace(-1, 1, 12).view(3, 4)


def _refused(ctx: accel.DistContext, factors: list[float], *, windows: bool = True, **options: Any) -> str:
    """The error of a step whose micro-batches multiply their losses by factors."""
    model = accel.prepare_model(ctx, nn.Linear(4, 2))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), accel.LossScale()
    accum = accel.Accumulation(steps=len(factors)) if windows else None
    for factor in factors:
        if accum is not None:
            accum = accum.next()
            with accel.accumulate(ctx, accum, model):
                accum = accel.backward(ctx, model(X).square().mean() * factor, scaler, accum)
        else:
            accel.backward(ctx, model(X).square().mean() * factor, scaler)
    with pytest.raises(NonFiniteError) as caught:
        accel.optimizer_step(ctx, optimizer, scaler, accum, **options)
    return str(caught.value)


@pytest.mark.parametrize("windows", [True, False])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_ranks_whose_loss_was_not_finite_are_named_on_all(
    ranks: Simulator, strategy: Any, bad: float, windows: bool
):
    def rank(ctx: accel.DistContext, guilty: set[int]) -> str:
        ctx = accel.replace(ctx, strategy=strategy)
        return _refused(ctx, [bad if ctx.rank in guilty else 1.0], windows=windows)

    for told in ranks.run(lambda ctx: rank(ctx, {1}), 3, default_group=True):
        assert "inf or NaN; the loss of rank 1 was not finite - at weight" in told
    for told in ranks.run(lambda ctx: rank(ctx, {0, 2}), 3, default_group=True):
        assert "; the loss of ranks 0, 2 was not finite - " in told


def test_every_micro_batch_of_the_window_counts(ranks: Simulator):
    def rank(ctx: accel.DistContext) -> str:
        return _refused(ctx, [1.0, math.nan if ctx.rank else 1.0, 1.0])

    assert all("; the loss of rank 1 was not finite" in told for told in ranks.run(rank, 2))


def test_a_window_that_was_given_up_is_not_blamed(ranks: Simulator):
    """A finite loss may have gradients that are not, as a square root at 0 has."""

    def rank(ctx: accel.DistContext) -> str:
        model = accel.prepare_model(ctx, nn.Linear(4, 2, bias=False))
        nn.init.zeros_(accel.unwrap_model(model).weight)
        optimizer, scaler, accum = torch.optim.SGD(model.parameters(), lr=0.1), accel.LossScale(), accel.Accumulation()
        for factor in (math.nan, 1.0):
            accum = accum.reset().next()
            accel.clear_gradients(model)
            with accel.accumulate(ctx, accum, model):
                loss = model(X).abs().sum().sqrt() * factor
                accum = accel.backward(ctx, loss, scaler, accum)
        with pytest.raises(NonFiniteError) as caught:
            accel.optimizer_step(ctx, optimizer, scaler, accum)
        return str(caught.value)

    for told in ranks.run(rank, 2):
        assert "; the loss was finite on every rank - at weight" in told


def test_one_rank_alone_is_not_named():
    assert "inf or NaN; the loss was not finite either - " in _refused(accel.single(), [math.nan])


def test_a_pipelines_ranks_know_the_loss_of_its_last_stage(ranks: Simulator):
    def rank(ctx: accel.DistContext) -> str:
        ctx = accel.replace(ctx, mesh="pp=2")
        net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
        model = accel.prepare_model(ctx, net)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), accel.LossScale()
        more: Any = {"loss_fn": lambda out: out.square().sum() * math.nan, "weight": 3.0}
        _, accum = accel.forward_backward(ctx, model, scaler, accel.Accumulation().next(), X, **more)
        with pytest.raises(NonFiniteError) as caught:
            accel.optimizer_step(ctx, optimizer, scaler, accum)
        return str(caught.value)

    assert all("; the loss of ranks 0, 1 was not finite" in told for told in ranks.run(rank, 2, default_group=True))


def test_a_rank_that_refuses_alone_under_local_sgd_asks_nobody(ranks: Simulator):
    def rank(ctx: accel.DistContext) -> str:
        model = accel.prepare_local_model(ctx, nn.Linear(4, 2))
        optimizer, scaler, accum = torch.optim.SGD(model.parameters(), lr=0.1), accel.LossScale(), accel.Accumulation()
        accum = accum.next()
        with accel.accumulate(ctx, accum, model):
            accum = accel.backward(ctx, model(X).sum() * (math.nan if ctx.rank else 1), scaler, accum)
        try:
            accel.optimizer_step(ctx, optimizer, scaler, accum)
        except NonFiniteError as error:
            return str(error)
        finally:
            accel.wait_for_everyone(ctx)
        return ""

    told = ranks.run(rank, 2)
    assert told[0] == ""
    assert "; the loss of rank 1 was not finite" in told[1]


def test_a_step_that_ignores_reads_no_loss():
    """Losses of torch's `meta` device hold nothing to read."""
    ctx, device = accel.single(), torch.device("meta")
    model = nn.Linear(4, 2, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accum = accel.backward(ctx, model(X.to(device)).sum(), accel.LossScale(), accel.Accumulation().next())
    assert accel.optimizer_step(ctx, optimizer, accel.LossScale(), accum, nonfinite="ignore").stepped


def test_processes_tell_each_other_through_the_store_and_wait_for_nobody_long():
    """Without a collective, as a rank may refuse a step alone."""
    store = HashStore()
    calls = [RollCall(store, rank, 2) for rank in range(2)]
    told: list[dict[int, str]] = []
    threads = [threading.Thread(target=lambda call=call: told.append(call.tell("losses", "finite"))) for call in calls]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert told == [{0: "finite", 1: "finite"}] * 2
    assert calls[1].tell("losses", "bad") == {1: "bad"}
