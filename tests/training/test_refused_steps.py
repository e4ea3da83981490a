# SPDX-License-Identifier: Apache-2.0
"""Weights, limits and schedulers that no step can be taken with: typed errors, before anything has changed."""

from __future__ import annotations

import copy
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from catching import assert_raises
from steps import ByState, begin_batch, both_ways
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, OneCycleLR, SequentialLR

import accel
from accel.errors import ConfigError, StepError

HUGE = 10**400  # no float holds it


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(2, 1)


def _loss(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(3, 2)).square().mean()


@pytest.mark.parametrize(
    "weight",
    [
        *(-1, -0.5, math.nan, math.inf, HUGE, -HUGE, "3", Fraction(HUGE), 1j, [2.0]),
        *(torch.tensor(-1), torch.tensor(-1.0), torch.tensor([-2.0]), torch.tensor(math.nan), torch.tensor(math.inf)),
        *(torch.tensor([1.0, 2.0]), torch.tensor(1j)),
    ],
    ids=lambda weight: str(weight)[:24],
)
def test_a_weight_that_is_no_count_is_refused_before_the_backward(weight):
    ctx, model = accel.single(), _model()
    run = ByState(ctx, 2)
    run.begin()
    with assert_raises(ConfigError, problem="the weight is not valid"):
        run.backward(_loss(model), weight=weight)
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize("weight", [0, 2, 1.5, True, Fraction(1, 3), torch.tensor(0), torch.tensor([2.5])])
@both_ways
def test_counts_of_any_kind_are_weights(weight, way):
    ctx, model = accel.single(), _model()
    run = way(ctx, 2)
    run.begin()
    run.backward(_loss(model), weight=weight)
    assert run.accum.world_weight == pytest.approx(float(weight))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_a_bad_weight_on_a_device_is_refused_where_it_is_read(bad):
    ctx = accel.single("cuda")
    model = accel.prepare_model(ctx, _model())
    run, before = ByState(ctx, 2), copy.deepcopy(model.state_dict())
    for weight in (torch.tensor(bad, device=ctx.device), torch.tensor(5.0, device=ctx.device)):
        run.begin()
        run.backward(model(torch.ones(3, 2, device=ctx.device)).square().mean(), weight=weight)
    with assert_raises(ConfigError, problem="a weight is not a finite number from 0"):
        run.step(SGD(model.parameters(), lr=0.1))
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


@pytest.mark.parametrize("first", [None, 3, 2.5, torch.tensor(2.0)])
@pytest.mark.parametrize("second", [None, 3, 2.5, torch.tensor(2.0)])
@pytest.mark.parametrize("same_batch", [False, True])
def test_a_window_has_weights_in_all_backward_passes_or_in_none(ranks, first, second, same_batch):
    def rank(ctx):
        model = accel.prepare_model(ctx, _model())
        accum = accel.Accumulation(steps=2).next()
        with accel.training.parts.accumulate(ctx, accum, model):
            accum = accel.training.parts.backward(ctx, _loss(model), accel.LossScale(), accum, weight=first)
        before = [each.grad.clone() for each in model.parameters()]
        accum = accum if same_batch else accum.next()
        mixed = (first is None) != (second is None)
        with accel.training.parts.accumulate(ctx, accum, model):
            loss = _loss(model)
            if mixed:
                with assert_raises(StepError, problem="some backward passes of this window have a weight"):
                    accel.training.parts.backward(
                        ctx, loss, accel.LossScale(), accum, weight=second, same_units=same_batch
                    )
                assert all(map(torch.equal, before, [each.grad for each in model.parameters()]))
                loss.backward()  # the block ends as it should
            else:
                accum = accel.training.parts.backward(
                    ctx, loss, accel.LossScale(), accum, weight=second, same_units=same_batch
                )
        return mixed or accum.backwards == (1 if same_batch else 2)

    assert ranks.run(rank, 2) == [True, True]


def test_the_next_window_may_be_of_the_other_kind():
    ctx, model = accel.single(), _model()
    optimizer, accum = SGD(model.parameters(), lr=0.1), accel.Accumulation()
    for weight in (None, 2.0, None):
        accum = accel.training.parts.backward(ctx, _loss(model), accel.LossScale(), accum.next(), weight=weight)
        accum = accel.training.parts.optimizer_step(ctx, optimizer, accel.LossScale(), accum).accum
    assert accum.updates == 3


@pytest.mark.parametrize("limit", [-HUGE, HUGE, 0, -1.0, math.nan, "1", 1j], ids=lambda limit: str(limit)[:8])
def test_a_limit_that_is_none_is_refused(limit):
    ctx, model = accel.single(), _model()
    optimizer, run = SGD(model.parameters(), lr=0.1), ByState(ctx)
    run.begin()
    run.backward(_loss(model))
    for call in (
        lambda: run.step(optimizer, max_norm=limit),
        lambda: run.step(optimizer, max_value=limit),
        lambda: run.clip_norm(model.parameters(), limit),
        lambda: run.clip_value(model.parameters(), limit),
        lambda: run.step(optimizer, max_norm=1.0, norm_type=limit),
    ):
        with pytest.raises(ConfigError):
            call()
    assert run.step(optimizer, max_norm=math.inf)


class Mixed(nn.Module):
    """A complex parameter beside others."""

    def __init__(self, other: torch.dtype) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.full((3,), 2.0, dtype=other))
        self.complex = nn.Parameter(torch.tensor([3 + 4j, 1j], dtype=torch.complex64))

    def forward(self) -> torch.Tensor:
        return self.other.float().square().sum() + self.complex.abs().square().sum()


def test_complex_gradients_have_no_order_to_be_cut_in():
    ctx, model = accel.single(), Mixed(torch.float32)
    optimizer, run = SGD(model.parameters(), lr=0.1), ByState(ctx)
    run.begin()
    run.backward(model())
    before = [each.grad.clone() for each in model.parameters()]
    for call in (
        lambda: run.step(optimizer, max_value=1.0),
        lambda: run.clip_value(model.parameters(), 1.0),
    ):
        with assert_raises(ConfigError, problem="complex gradients cannot be cut to a value", fix="max_norm="):
            call()
        assert all(map(torch.equal, before, [each.grad for each in model.parameters()]))
    run.clip_value([model.other], 1.0)
    assert run.step(optimizer, max_norm=1.0)


@pytest.mark.parametrize("other", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_complex_parameters_step_beside_those_of_any_precision(other, norm_type):
    ctx, model = accel.single(), Mixed(other)
    twin = copy.deepcopy(model)
    state = accel.backward(ctx, model(), begin_batch(ctx))
    state = accel.optimizer_step(ctx, SGD(model.parameters(), lr=0.25), state, max_norm=1e6, norm_type=norm_type)
    twin().backward()
    wide = [each.grad.to(torch.complex128).flatten() for each in twin.parameters()]
    assert float(state.grad_norm) == pytest.approx(
        float(torch.linalg.vector_norm(torch.cat(wide), norm_type)), rel=1e-5
    )
    SGD(twin.parameters(), lr=0.25).step()
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))


def _one_cycle(optimizer: SGD, steps: int) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)


SCHEDULES: dict[str, Any] = {
    "alone": lambda optimizer: _one_cycle(optimizer, 3),
    "in a chain": lambda optimizer: ChainedScheduler([ConstantLR(optimizer), _one_cycle(optimizer, 3)]),
    "after another": lambda optimizer: SequentialLR(optimizer, [ConstantLR(optimizer), _one_cycle(optimizer, 2)], [1]),
    "beside another": lambda optimizer: [ConstantLR(optimizer), _one_cycle(optimizer, 3)],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_that_is_over_is_refused_while_no_parameter_has_moved(schedule):
    ctx, model = accel.single(), _model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = SCHEDULES[schedule](optimizer)
    run = ByState(ctx)
    for _ in range(3):
        run.begin()
        run.backward(_loss(model))
        run.step(optimizer, scheduler=scheduler)
    run.begin()
    run.backward(_loss(model))
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    with assert_raises(ConfigError, problem="the learning rate's cycle is over"):
        run.step(optimizer, scheduler=scheduler)
    after = [model.state_dict(), optimizer.state_dict()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    run.step(optimizer)
    assert run.updates == 4
