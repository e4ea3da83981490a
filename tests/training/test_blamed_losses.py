# SPDX-License-Identifier: Apache-2.0
"""A refused step names the ranks whose loss was not finite."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from steps import WAYS, ByState, begin_batch
from torch import nn
from torch.distributed import HashStore

import accel
from accel.comm._lost import RollCall
from accel.errors import NonFiniteError
from accel.testing import Simulator

X = torch.linspace(-1, 1, 12).view(3, 4)


def _refused(
    ctx: accel.DistContext, factors: list[float], *, way: type[ByState] | None = ByState, **options: Any
) -> str:
    """The error of a step whose micro-batches multiply their losses by factors; without a way, of one by its scale."""
    model = accel.prepare_model(ctx, nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if way is None:
        [factor] = factors
        state = accel.backward(ctx, model(X).square().mean() * factor, begin_batch(ctx))
        with pytest.raises(NonFiniteError) as caught:
            accel.optimizer_step(ctx, optimizer, state, **options)
        return str(caught.value)
    run = way(ctx, len(factors))
    for factor in factors:
        run.begin()
        with run.accumulate(model):
            run.backward(model(X).square().mean() * factor)
    with pytest.raises(NonFiniteError) as caught:
        run.step(optimizer, **options)
    return str(caught.value)


@pytest.mark.parametrize("way", [*WAYS, None], ids=["state", "parts", "scale"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_ranks_whose_loss_was_not_finite_are_named_on_all(
    ranks: Simulator, strategy: Any, bad: float, way: type[ByState] | None
):
    def rank(ctx: accel.DistContext, guilty: set[int]) -> str:
        ctx = accel.replace(ctx, strategy=strategy)
        return _refused(ctx, [bad if ctx.rank in guilty else 1.0], way=way)

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
        optimizer, run = torch.optim.SGD(model.parameters(), lr=0.1), ByState(ctx)
        for factor in (math.nan, 1.0):
            run.state = accel.training.discard(run.state, model)
            run.begin()
            with run.accumulate(model):
                run.backward(model(X).abs().sum().sqrt() * factor)
        with pytest.raises(NonFiniteError) as caught:
            run.step(optimizer)
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
        optimizer, run = torch.optim.SGD(model.parameters(), lr=0.1), ByState(ctx)
        run.begin()
        run.forward_backward(model, X, loss_fn=lambda out: out.square().sum() * math.nan, weight=3.0)
        with pytest.raises(NonFiniteError) as caught:
            run.step(optimizer)
        return str(caught.value)

    assert all("; the loss of ranks 0, 1 was not finite" in told for told in ranks.run(rank, 2, default_group=True))


def test_a_rank_that_refuses_alone_under_local_sgd_asks_nobody(ranks: Simulator):
    def rank(ctx: accel.DistContext) -> str:
        model = accel.parallel.prepare_local_model(ctx, nn.Linear(4, 2))
        optimizer, run = torch.optim.SGD(model.parameters(), lr=0.1), ByState(ctx)
        run.begin()
        with run.accumulate(model):
            run.backward(model(X).sum() * (math.nan if ctx.rank else 1))
        try:
            run.step(optimizer)
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
    run = ByState(ctx)
    run.begin()
    run.backward(model(X.to(device)).sum())
    assert run.step(optimizer, nonfinite="ignore")


def test_processes_tell_each_other_through_the_store_and_wait_for_nobody_long():
    """Without a collective, as a rank may refuse a step alone."""
    store = HashStore()
    calls = [RollCall(store, rank, 2) for rank in range(2)]
    told: list[dict[int, str]] = []
    threads = [
        threading.Thread(target=lambda call=call: told.append(call.exchange_notes("losses", "finite")))
        for call in calls
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert told == [{0: "finite", 1: "finite"}] * 2
    assert calls[1].exchange_notes("losses", "bad") == {1: "bad"}
