# SPDX-License-Identifier: Apache-2.0
"""Figures of cases in which a training step is easily wrong: what comes out, as a number.

The last window that is not full (1, not one half) and micro-batches of one and three tokens (6.5, not 5) are in
test_step.py; clipping of shards by their global norm is in test_sharded_step.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

import accel
from accel import ConfigError, StepError
from accel.data import SampleCount


def _one_weight(ctx: accel.DistContext, value: float = 1.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return accel.prepare_model(ctx, model), torch.optim.SGD(model.parameters(), lr=1.0)


def _output(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(1, 1)).squeeze()


def _weight(model: nn.Module) -> float:
    return next(model.parameters()).item()


def test_a_second_context_and_accumulation_leave_the_first_alone():
    """A library that makes its own for an evaluation changes nothing of the run's."""
    ctx = accel.single()
    model, optimizer = _one_weight(ctx)
    accum, scaler, syncs = accel.Accumulation(steps=2), accel.loss_scale(ctx), []
    for _ in range(4):
        other = accel.single()
        accel.backward(other, _output(_one_weight(other)[0]), accel.loss_scale(other), accel.Accumulation().next())
        accum = accum.next()
        accum = accel.backward(ctx, _output(model), scaler, accum)
        syncs.append(accum.sync)
        if accum.sync:
            accum = accel.optimizer_step(ctx, optimizer, scaler, accum).accum
    assert syncs == [False, True, False, True]
    assert (accum.steps, accum.updates, _weight(model)) == (2, 2, -1.0)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_schedule_goes_one_step_for_each_step_of_the_optimizer(ranks, world_size, steps):
    """Neither held micro-batches nor other ranks nor skipped steps move it, and nothing has to be said for that."""

    def rank(ctx):
        model, optimizer = _one_weight(ctx)
        scheduler = LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
        accum, scaler, rates = accel.Accumulation(steps=steps), accel.LossScale(dynamic=True), []
        for micro in range(3 * steps):
            accum = accum.next()
            with accel.accumulate(ctx, accum, model):
                loss = _output(model) * (math.inf if micro // steps == 1 and ctx.rank == 0 else 1.0)
                accum = accel.backward(ctx, loss, scaler, accum)
            if accum.sync:
                rates.append(optimizer.param_groups[0]["lr"])
                step = accel.optimizer_step(ctx, optimizer, scaler, accum, scheduler=scheduler)
                accum, scaler = step.accum, step.scaler
        return rates, scheduler.last_epoch

    assert ranks.run(rank, world_size) == [([1.0, 0.5, 0.5], 2)] * world_size


@pytest.mark.parametrize("clips", [0, 1, 2])
def test_two_optimizers_under_a_loss_scale_both_move_by_their_gradient(clips):
    """Both weights go from 1 to 0, however often they are clipped to more than their norm before."""
    ctx = accel.single()
    (first, one), (second, two) = _one_weight(ctx), _one_weight(ctx)
    scaler = accel.LossScale(scale=1024.0, dynamic=True)
    accum = accel.backward(ctx, _output(first) + _output(second), scaler, accel.Accumulation().next())
    norms = [
        accel.clip_grad_norm_(ctx, model.parameters(), 10.0, scaler, accum).item()
        for _ in range(clips)
        for model in (first, second)
    ]
    step = accel.optimizer_step(ctx, [one, two], scaler, accum)
    assert norms == [1.0] * 2 * clips
    assert (step.stepped, step.scaler.good_steps) == (True, 1)  # one step, though of two optimizers
    assert (_weight(first), _weight(second)) == (0.0, 0.0)


def test_dividing_for_one_of_two_optimizers_is_refused():
    """The other's gradients would keep the loss scale: its weight would go from 1 to -1023."""
    ctx = accel.single()
    (first, one), (second, two) = _one_weight(ctx), _one_weight(ctx)
    scaler = accel.LossScale(scale=1024.0, dynamic=True)
    accum = accel.backward(ctx, _output(first) + _output(second), scaler, accel.Accumulation().next())
    divided = accel.unscale_gradients(ctx, one, scaler, accum)
    with pytest.raises(StepError, match="got 1 gradients divided, 2 in the step"):
        accel.optimizer_step(ctx, [one, two], scaler, divided)
    assert (_weight(first), _weight(second)) == (1.0, 1.0)


@pytest.mark.parametrize("max_norm", [None, 1.0, [1.0, 1.0]])
def test_an_optimizer_whose_parameters_took_no_part_stays(max_norm):
    ctx = accel.single()
    (first, one), (second, two) = _one_weight(ctx), _one_weight(ctx)
    accel.backward(ctx, 2 * _output(first), accel.LossScale())
    step = accel.optimizer_step(ctx, [one, two], accel.LossScale(), max_norm=max_norm)
    assert step.grad_norm.tolist() == ([2.0, 0.0] if isinstance(max_norm, list) else 2.0)
    assert (_weight(first), _weight(second)) == (pytest.approx(-1.0 if max_norm is None else 0.0, abs=1e-6), 1.0)


def test_a_window_that_begins_with_a_batch_of_no_samples(ranks):
    """Of all ranks: it counts nothing, and what follows counts as it would without it."""

    def rank(ctx):
        model, optimizer = _one_weight(ctx)
        accum, scaler = accel.Accumulation(steps=2), accel.loss_scale(ctx)
        for samples in (0, 3):
            accum = accum.next()
            with accel.accumulate(ctx, accum, model):
                weight = SampleCount(samples, samples * ctx.world_size)
                accum = accel.backward(ctx, _output(model) * (ctx.rank + 1), scaler, accum, weight=weight)
        accel.optimizer_step(ctx, optimizer, scaler, accum)
        return _weight(model)

    assert ranks.run(rank, 2) == [-0.5, -0.5]


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature:UserWarning")
def test_the_norm_of_complex_gradients_is_real():
    ctx, model = accel.single(), nn.Linear(1, 1, bias=False, dtype=torch.complex64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    accel.backward(ctx, (model(torch.ones(1, 1, dtype=torch.complex64)) * (3 + 4j)).real.sum(), accel.LossScale())
    step = accel.optimizer_step(ctx, optimizer, accel.LossScale(), max_norm=1.0)
    assert (step.grad_norm.dtype, step.grad_norm.item()) == (torch.float32, 5.0)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_clipping_before_the_step_hides_no_overflow(value):
    ctx = accel.single()
    (first, one), (second, two) = _one_weight(ctx), _one_weight(ctx)
    parameters = [*first.parameters(), *second.parameters()]
    scaler = accel.LossScale(scale=1024.0, dynamic=True)
    loss = _output(first) * value + _output(second)
    accum = accel.backward(ctx, loss, scaler, accel.Accumulation().next())
    accel.clip_grad_value_(ctx, parameters, 0.5, scaler, accum)
    norm = accel.clip_grad_norm_(ctx, parameters, 0.5, scaler, accum)
    assert not math.isfinite(norm)
    assert parameters[1].grad.item() == 1024.0
    step = accel.optimizer_step(ctx, [one, two], scaler, accum)
    assert (step.stepped, step.scaler.scale, _weight(first), _weight(second)) == (False, 512.0, 1.0, 1.0)


def test_half_precision_on_the_cpu_is_half_precision():
    """It computes in fp16 under a dynamic scale, and not in fp32 under the name of fp16."""
    ctx = accel.single(precision="fp16")
    with accel.autocast(ctx):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float16
    assert accel.loss_scale(ctx).dynamic


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_plateau_counts_each_metric_once(ranks, world_size):
    """With a patience of two, the rate drops with the third bad metric after a good one: the fourth call."""

    def rank(ctx):
        model, optimizer = _one_weight(ctx)
        plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
        model, optimizer, plateau = accel.prepare(ctx, accel.unwrap_model(model), optimizer, plateau)
        rates = []
        for _ in range(5):
            accum, scaler = accel.Accumulation().next(), accel.loss_scale(ctx)
            accum = accel.backward(ctx, _output(model), scaler, accum)
            with pytest.raises(ConfigError, match=r"Call scheduler.step\(metric\) yourself, with a metric from"):
                accel.optimizer_step(ctx, optimizer, scaler, accum, scheduler=plateau)
            accel.optimizer_step(ctx, optimizer, scaler, accum)
            metric = accel.reduce(ctx, torch.tensor(1.0 + ctx.rank))
            plateau.step(metric)
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    assert ranks.run(rank, world_size) == [[1.0, 1.0, 1.0, 0.5, 0.5]] * world_size


@pytest.mark.parametrize(
    ("zeros", "expected"),
    [("mean", None), ("clamped", 0.0), ("ignored labels", 1.0 + 1.0 / (1.0 + math.e))],
)
def test_a_mean_over_no_units(ranks, zeros, expected):
    """One rank of two has no unit. A mean whose own gradient is 0 / 0 is refused by name; the others count as none."""

    def rank(ctx):
        model, optimizer = _one_weight(ctx)
        accum, scaler, count = accel.Accumulation().next(), accel.loss_scale(ctx), torch.tensor(1 - ctx.rank)
        output = model(torch.ones(1, 1))
        if zeros == "ignored labels":
            logits = torch.cat([output, torch.zeros(1, 1)], 1)
            loss = nn.functional.cross_entropy(logits, torch.tensor([0 if count else -100]))
        else:
            loss = (output * count).sum() / (count if zeros == "mean" else count.clamp(min=1))
        accum = accel.backward(ctx, loss, scaler, accum, weight=count)
        if expected is None:
            with pytest.raises(accel.NonFiniteError, match=r"at weight.* divide means by a count of at least 1"):
                accel.optimizer_step(ctx, optimizer, scaler, accum)
        else:
            accel.optimizer_step(ctx, optimizer, scaler, accum)
        return _weight(model)

    assert ranks.run(rank, 2) == pytest.approx([1.0 if expected is None else expected] * 2)
