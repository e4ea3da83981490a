# SPDX-License-Identifier: Apache-2.0
"""Loops in which every rank would step by its own gradient: refused on every rank, and nothing has changed."""

from __future__ import annotations

import pytest
import torch
from catching import assert_raises
from steps import begin_batch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accel
from accel.errors import PrepareError, StepError


def _model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def _prepare_in_vain(ctx, model):
    accel.prepare(ctx, model, torch.optim.SGD(model.parameters()))
    return model


def _call_the_plain_one(ctx, model):
    return accel.unwrap_model(accel.prepare_model(ctx, model, find_unused_parameters=True))


def _unfreeze_later(ctx, model):
    model[0].requires_grad_(False)
    prepared = accel.prepare_model(ctx, model)
    model[0].requires_grad_(True)
    return prepared


def _prepare_frozen(ctx, model):
    accel.prepare_model(ctx, model.requires_grad_(False))
    return model.requires_grad_(True)


def _prepare_nothing(ctx, model):
    return model


def _hold_back(ctx, model):
    prepared = accel.prepare_model(ctx, model)

    def forward(inputs):
        with accel.no_sync(ctx, prepared):
            return prepared(inputs)

    return forward


MISTAKES = {
    _prepare_in_vain: (
        StepError,
        {"got": r"others for 0\.weight, 0\.bias, 1\.weight, 1\.bias", "fix": "the model that prepare returned"},
    ),
    _call_the_plain_one: (StepError, {"got": r"others for 0\.weight"}),
    _unfreeze_later: (
        StepError,
        {"got": r"others for 0\.weight, 0\.bias", "fix": "set requires_grad before preparing"},
    ),
    _prepare_frozen: (StepError, {"got": r"others for 0\.weight"}),
    _hold_back: (StepError, {"got": r"others for 0\.weight", "fix": "outside of no_sync"}),
    _prepare_nothing: (PrepareError, {"got": r"a plain one of shape \[3, 2\]", "fix": r"model = accel\.prepare_model"}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("call", ["step", "clip", "unscale"])
def test_a_gradient_that_stayed_on_its_rank_is_refused(ranks, mistake, call):
    kind, fields = MISTAKES[mistake]

    def rank(ctx):
        plain = _model()
        forward = mistake(ctx, plain)
        state = begin_batch(ctx)
        optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
        state = accel.backward(ctx, forward(torch.full((1, 2), ctx.rank + 1.0)).sum(), state)
        calls = {
            "step": lambda: accel.optimizer_step(ctx, optimizer, state),
            "clip": lambda: accel.clip_grad_norm_(ctx, plain.parameters(), 1.0, state),
            "unscale": lambda: accel.unscale_gradients(ctx, optimizer, state),
        }
        with assert_raises(kind, **fields):
            calls[call]()
        torch.testing.assert_close(list(plain.parameters()), list(_model().parameters()), rtol=0, atol=0)
        return True

    assert ranks.run(rank, 2) == [True] * 2


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": False},
        {"comm_hook": "bf16"},
    ],
)
def test_gradients_that_travelled_are_taken_with_any_option(ranks, options):
    def rank(ctx):
        model = accel.prepare_model(ctx, _model(), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = accel.train_state(ctx)
        for _ in range(3):
            state = accel.backward(ctx, model(torch.full((1, 2), ctx.rank + 1.0)).sum(), begin_batch(ctx, state))
            state = accel.optimizer_step(ctx, optimizer, state)
        return accel.unwrap_model(model)[0].weight.detach()

    first, other = ranks.run(rank, 2)
    assert torch.equal(first, other)


def test_a_gradient_of_ones_own_is_put_into_ddps(ranks):
    """As methods do that change gradients before the step."""

    def rank(ctx):
        model = accel.prepare_model(ctx, nn.Linear(2, 1, bias=False))
        state = accel.train_state(ctx)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        weight = accel.unwrap_model(model).weight
        nn.init.zeros_(weight)
        state = accel.backward(ctx, model(torch.ones(1, 2)).sum(), begin_batch(ctx, state))
        own, weight.grad = weight.grad, torch.full((1, 2), 7.0)
        with assert_raises(StepError, fix=r"parameter\.grad\.copy_"):
            state = accel.optimizer_step(ctx, optimizer, state)
        weight.grad = own.copy_(weight.grad)
        state = accel.optimizer_step(ctx, optimizer, state)
        return weight.detach().tolist()

    assert ranks.run(rank, 2) == [[[-7.0, -7.0]]] * 2


def test_what_somebody_else_has_wrapped_is_adopted_by_preparing_it(ranks):
    def rank(ctx):
        wrapped = DistributedDataParallel(_model(), process_group=ctx.comm.group)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        state = accel.train_state(ctx)
        state = accel.backward(ctx, wrapped(torch.full((1, 2), ctx.rank + 1.0)).sum(), begin_batch(ctx, state))
        with assert_raises(PrepareError, problem="not prepared"):
            state = accel.optimizer_step(ctx, optimizer, state)
        assert accel.prepare_model(ctx, wrapped) is wrapped
        state = accel.optimizer_step(ctx, optimizer, state)
        assert state.stepped
        state = accel.backward(ctx, wrapped.module[0](torch.ones(1, 2)).sum(), begin_batch(ctx, state))
        with assert_raises(StepError, got=r"no gradient for 1\.weight, 1\.bias"):
            state = accel.optimizer_step(ctx, optimizer, state)
        return True

    assert ranks.run(rank, 2) == [True] * 2


def test_a_static_graph_may_leave_parameters_out(ranks):
    """DDP finds them once, in the first step."""

    def rank(ctx):
        plain = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
        plain.forward = plain["used"].forward
        model = accel.prepare_model(ctx, plain, static_graph=True)
        optimizer = torch.optim.SGD(model.parameters())
        state = accel.train_state(ctx)
        for _ in range(3):
            state = begin_batch(ctx, state)
            with accel.accumulate(ctx, state, model):
                state = accel.backward(ctx, model(torch.full((1, 2), ctx.rank + 1.0)).sum(), state)
            state = accel.optimizer_step(ctx, optimizer, state)
        return plain["used"].weight.detach()

    first, other = ranks.run(rank, 2)
    assert torch.equal(first, other)
