# SPDX-License-Identifier: Apache-2.0
"""Figures of cases in which a training step is easily wrong: what comes out, as a number.

The last window that is not full (1, not one half) and micro-batches of one and three tokens (6.5, not 5) are in
test_step.py; clipping of shards by their global norm is in test_sharded_step.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from catching import assert_raises
from steps import ByState, begin_batch, both_ways
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

import accel
from accel.data import SampleCount
from accel.errors import ConfigError, StepError


def _one_weight(ctx: accel.DistContext, value: float = 1.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return accel.prepare_model(ctx, model), torch.optim.SGD(model.parameters(), lr=1.0)


def _output(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(1, 1)).squeeze()


def _weight(model: nn.Module) -> float:
    return next(model.parameters()).item()


@both_ways
def test_a_second_context_and_accumulation_leave_the_first_alone(way):
    """A library that makes its own for an evaluation changes nothing of the run's."""
    ctx = accel.single()
    model, optimizer = _one_weight(ctx)
    run = way(ctx, 2)
    syncs = []
    for _ in range(4):
        other = accel.single()
        accel.backward(other, _output(_one_weight(other)[0]), begin_batch(other))
        run.begin()
        run.backward(_output(model))
        syncs.append(run.sync)
        if run.sync:
            run.step(optimizer)
    assert syncs == [False, True, False, True]
    assert (run.accum.steps, run.updates, _weight(model)) == (2, 2, -1.0)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("steps", [1, 3])
@both_ways
def test_a_schedule_goes_one_step_for_each_step_of_the_optimizer(ranks, world_size, steps, way):
    """Neither held micro-batches nor other ranks nor skipped steps move it, and nothing has to be said for that."""

    def rank(ctx):
        model, optimizer = _one_weight(ctx)
        scheduler = LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
        run = way(ctx, steps, scaler=accel.LossScale(dynamic=True))
        rates = []
        for micro in range(3 * steps):
            run.begin()
            with run.accumulate(model):
                loss = _output(model) * (math.inf if micro // steps == 1 and ctx.rank == 0 else 1.0)
                run.backward(loss)
            if run.sync:
                rates.append(optimizer.param_groups[0]["lr"])
                run.step(optimizer, scheduler=scheduler)
        return rates, scheduler.last_epoch

    assert ranks.run(rank, world_size) == [([1.0, 0.5, 0.5], 2)] * world_size


@pytest.mark.parametrize("clips", [0, 1, 2])
@both_ways
def test_two_optimizers_under_a_loss_scale_both_move_by_their_gradient(clips, way):
    """Both weights go from 1 to 0, however often they are clipped to more than their norm before."""
    ctx = accel.single()
    (first, one), (second, two) = _one_weight(ctx), _one_weight(ctx)
    run = way(ctx, scaler=accel.LossScale(scale=1024.0, dynamic=True))
    run.begin()
    run.backward(_output(first) + _output(second))
    norms = [run.clip_norm(model.parameters(), 10.0).item() for _ in range(clips) for model in (first, second)]
    run.step([one, two])
    assert norms == [1.0] * 2 * clips
    assert (run.stepped, run.scaler.good_steps) == (True, 1)  # one step, though of two optimizers
    assert (_weight(first), _weight(second)) == (0.0, 0.0)


@both_ways
def test_dividing_for_one_of_two_optimizers_is_refused(way):
    """The other's gradients would keep the loss scale: its weight would go from 1 to -1023."""
    ctx = accel.single()
    (first, one), (second, two) = _one_weight(ctx), _one_weight(ctx)
    run = way(ctx, scaler=accel.LossScale(scale=1024.0, dynamic=True))
    run.begin()
    run.backward(_output(first) + _output(second))
    run.unscale(one)
    with assert_raises(StepError, got="1 gradients divided, 2 in the step"):
        run.step([one, two])
    assert (_weight(first), _weight(second)) == (1.0, 1.0)


@pytest.mark.parametrize("max_norm", [None, 1.0, [1.0, 1.0]])
@both_ways
def test_an_optimizer_whose_parameters_took_no_part_stays(max_norm, way):
    ctx = accel.single()
    (first, one), (second, two) = _one_weight(ctx), _one_weight(ctx)
    run = way(ctx)
    run.begin()
    run.backward(2 * _output(first))
    run.step([one, two], max_norm=max_norm)
    assert run.grad_norm.tolist() == ([2.0, 0.0] if isinstance(max_norm, list) else 2.0)
    assert (_weight(first), _weight(second)) == (pytest.approx(-1.0 if max_norm is None else 0.0, abs=1e-6), 1.0)


@both_ways
def test_a_window_that_begins_with_a_batch_of_no_samples(ranks, way):
    """Of all ranks: it counts nothing, and what follows counts as it would without it."""

    def rank(ctx):
        model, optimizer = _one_weight(ctx)
        run = way(ctx, 2)
        for samples in (0, 3):
            run.begin()
            with run.accumulate(model):
                weight = SampleCount(samples, samples * ctx.world_size)
                run.backward(_output(model) * (ctx.rank + 1), weight=weight)
        run.step(optimizer)
        return _weight(model)

    assert ranks.run(rank, 2) == [-0.5, -0.5]


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature:UserWarning")
def test_the_norm_of_complex_gradients_is_real():
    ctx, model = accel.single(), nn.Linear(1, 1, bias=False, dtype=torch.complex64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run = ByState(ctx)
    run.begin()
    run.backward((model(torch.ones(1, 1, dtype=torch.complex64)) * (3 + 4j)).real.sum())
    run.step(optimizer, max_norm=1.0)
    assert (run.grad_norm.dtype, run.grad_norm.item()) == (torch.float32, 5.0)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@both_ways
def test_clipping_before_the_step_hides_no_overflow(value, way):
    ctx = accel.single()
    (first, one), (second, two) = _one_weight(ctx), _one_weight(ctx)
    parameters = [*first.parameters(), *second.parameters()]
    run = way(ctx, scaler=accel.LossScale(scale=1024.0, dynamic=True))
    loss = _output(first) * value + _output(second)
    run.begin()
    run.backward(loss)
    run.clip_value(parameters, 0.5)
    norm = run.clip_norm(parameters, 0.5)
    assert not math.isfinite(norm)
    assert parameters[1].grad.item() == 1024.0
    run.step([one, two])
    assert (run.stepped, run.scaler.scale, _weight(first), _weight(second)) == (False, 512.0, 1.0, 1.0)


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
            run = ByState(ctx)
            run.begin()
            run.backward(_output(model))
            with assert_raises(ConfigError, fix=r"Call scheduler.step\(metric\) yourself, with a metric from"):
                run.step(optimizer, scheduler=plateau)
            run.step(optimizer)
            metric = accel.reduce(ctx, torch.tensor(1.0 + ctx.rank))
            plateau.step(metric)
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    assert ranks.run(rank, world_size) == [[1.0, 1.0, 1.0, 0.5, 0.5]] * world_size


@pytest.mark.parametrize(
    ("zeros", "expected"),
    [("mean", None), ("clamped", 0.0), ("ignored labels", 1.0 + 1.0 / (1.0 + math.e))],
)
@both_ways
def test_a_mean_over_no_units(ranks, zeros, expected, way):
    """One rank of two has no unit. A mean whose own gradient is 0 / 0 is refused by name; the others count as none."""

    def rank(ctx):
        model, optimizer = _one_weight(ctx)
        run = way(ctx)
        run.begin()
        count = torch.tensor(1 - ctx.rank)
        output = model(torch.ones(1, 1))
        if zeros == "ignored labels":
            logits = torch.cat([output, torch.zeros(1, 1)], 1)
            loss = nn.functional.cross_entropy(logits, torch.tensor([0 if count else -100]))
        else:
            loss = (output * count).sum() / (count if zeros == "mean" else count.clamp(min=1))
        run.backward(loss, weight=count)
        if expected is None:
            with assert_raises(
                accel.errors.NonFiniteError, where="weight", fix="divide means by a count of at least 1"
            ):
                run.step(optimizer)
        else:
            run.step(optimizer)
        return _weight(model)

    assert ranks.run(rank, 2) == pytest.approx([1.0 if expected is None else expected] * 2)
