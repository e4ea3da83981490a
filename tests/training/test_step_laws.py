# SPDX-License-Identifier: Apache-2.0
"""The law of the step: any split of the same units into ranks and micro-batches is one process with one batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from profiles import share
from steps import WAYS, ByState
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import accel
from accel.optim import total_norm
from accel.testing import Simulator
from accel.training import _backward, _window

TOLERANCE = {"rtol": 0, "atol": 1e-10}
SCALE = 1024.0


class Case(NamedTuple):
    """A generated run.

    Attributes:
        units: by window, micro-batch and rank, how many units the rank has there.
        overflows: windows in which a gradient of one rank is not finite, and that rank.
        max_norm, norm_type, max_value: of `optimizer_step`.
        weights: how a rank passes its number of units.
        sync_each_batch: of the accumulation.
        divided: whether gradients are divided before the step.
        apart: whether they are clipped before it, by a call of its own.
        way: whether the loop carries the state or its parts.
    """

    units: list[list[list[int]]]
    overflows: dict[int, int]
    max_norm: float | list[float | None] | None
    norm_type: float
    max_value: float | None
    weights: str
    sync_each_batch: bool
    divided: bool
    apart: bool
    way: type[ByState]


class Outcome(NamedTuple):
    gradients: list[torch.Tensor]
    parameters: list[torch.Tensor]
    norms: list[torch.Tensor]
    rates: list[float]
    stepped: list[bool]
    scales: list[float]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world = draw(st.integers(1, 4))
    ranks = st.lists(st.integers(0, 3), min_size=world, max_size=world)
    windows = draw(st.lists(st.lists(ranks, min_size=1, max_size=3), min_size=1, max_size=4))
    clip = draw(st.sampled_from(["none", "joint", "each", "value"]))
    limit = draw(st.sampled_from([1e-3, 0.3, 1e3]))
    return Case(
        units=windows,
        overflows=draw(st.dictionaries(st.integers(0, 3), st.integers(0, world - 1), max_size=2)),
        max_norm={"joint": limit, "each": [limit, None]}.get(clip),
        norm_type=draw(st.sampled_from([2.0, 1.0, 3.0, math.inf])),
        max_value=limit if clip == "value" else None,
        weights=draw(st.sampled_from(["int", "tensor"])),
        sync_each_batch=draw(st.booleans()),
        divided=draw(st.booleans()),
        apart=clip in ("joint", "value") and draw(st.booleans()),
        way=draw(st.sampled_from(WAYS)),
    )


def _inputs(window: int, micro: int, rank: int, units: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed((window * 10 + micro) * 10 + rank)
    return torch.randn(units, 5, dtype=torch.float64, generator=generator)


def _models() -> list[nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return [nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, width)).double() for width in (2, 3)]


def _optimizers(models: list[nn.Module]) -> tuple[list[torch.optim.Optimizer], list[LambdaLR]]:
    adam = torch.optim.AdamW(models[0].parameters(), lr=1e-2)
    sgd = torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9)
    return [adam, sgd], [LambdaLR(each, lambda step: 0.7**step) for each in (adam, sgd)]


def _loss(models: list[nn.Module], inputs: torch.Tensor) -> torch.Tensor:
    """A sum over units, of both models."""
    return sum((model(inputs).square().sum() for model in models), torch.zeros((), dtype=torch.float64))


def _flat(models: list[nn.Module], of: str = "parameter") -> torch.Tensor:
    every = [each for model in models for each in model.parameters()]
    return torch.cat([(each if of == "parameter" else each.grad).detach().flatten().clone() for each in every])


def _train(ctx: accel.DistContext, case: Case) -> Outcome:
    models = [accel.prepare_model(ctx, model) for model in _models()]
    optimizers, schedulers = _optimizers(models)
    run = case.way(ctx, 3, sync_each_batch=case.sync_each_batch, scaler=accel.LossScale(scale=SCALE, dynamic=True))
    outcome = Outcome([], [], [], [], [], [])
    for at, window in enumerate(case.units):
        for micro, counts in enumerate(window):
            count = counts[ctx.rank]
            run.begin(last=micro == len(window) - 1)
            with run.accumulate(*models):
                loss = _loss(models, _inputs(at, micro, ctx.rank, count)) / max(count, 1)
                if case.overflows.get(at) == ctx.rank and micro == 0:
                    loss = loss * math.inf
                run.backward(loss, weight=torch.tensor(count) if case.weights == "tensor" else count)
        outcome.rates.extend(scheduler.get_last_lr()[0] for scheduler in schedulers)
        if case.divided:
            run.unscale(optimizers)
            outcome.gradients.append(_flat(models, "gradient"))
        limits = {"max_norm": case.max_norm, "norm_type": case.norm_type, "max_value": case.max_value}
        norm = _clip_apart(case, models, run) if case.apart else None
        if norm is not None:
            limits = {}
        stepped = run.step(optimizers, scheduler=schedulers, **limits)
        outcome.stepped.append(stepped)
        outcome.scales.append(run.scaler.scale)
        outcome.parameters.append(_flat(models))
        if stepped:
            outcome.norms.append(run.grad_norm if norm is None else norm)
    assert (run.updates, run.skipped) == (sum(outcome.stepped), len(_overflowing(case)))
    return outcome


def _clip_apart(case: Case, models: list[nn.Module], run: ByState) -> torch.Tensor:
    every = [each for model in models for each in model.parameters()]
    if case.max_value is None:
        return run.clip_norm(every, case.max_norm, norm_type=case.norm_type)
    norm = run.clip_norm(every, math.inf, norm_type=case.norm_type)
    run.clip_value(every, case.max_value)
    return norm


def _train_by_hand(case: Case) -> Outcome:
    """One process, one batch of all units to a step, torch alone."""
    models = _models()
    optimizers, schedulers = _optimizers(models)
    outcome, scale = Outcome([], [], [], [], [], []), SCALE
    for at, window in enumerate(case.units):
        parts = [
            _inputs(at, micro, rank, count) for micro, counts in enumerate(window) for rank, count in enumerate(counts)
        ]
        inputs = torch.cat(parts)
        (_loss(models, inputs) / max(len(inputs), 1)).backward()
        outcome.rates.extend(scheduler.get_last_lr()[0] for scheduler in schedulers)
        overflows = at in _overflowing(case)
        if case.divided:
            outcome.gradients.append(_flat(models, "gradient") * (math.nan if overflows else 1.0))
        stepped = len(inputs) > 0 and not overflows
        if stepped:
            outcome.norms.append(_clip_by_hand(models, case))
            for each in (*optimizers, *schedulers):
                each.step()
        scale *= 0.5 if overflows else 1.0
        outcome.stepped.append(stepped)
        outcome.scales.append(scale)
        outcome.parameters.append(_flat(models))
        for optimizer in optimizers:
            optimizer.zero_grad()
    return outcome


def _overflowing(case: Case) -> set[int]:
    """Windows with an inf or NaN in a gradient; a rank without a unit has none to spoil."""
    return {at for at, rank in case.overflows.items() if at < len(case.units) and case.units[at][0][rank]}


def _clip_by_hand(models: list[nn.Module], case: Case) -> torch.Tensor:
    every = [each for model in models for each in model.parameters()]
    if isinstance(case.max_norm, list):
        limits = [math.inf if limit is None else limit for limit in case.max_norm]
        pairs = zip(models, limits, strict=True)
        return torch.stack([nn.utils.clip_grad_norm_(m.parameters(), limit, case.norm_type) for m, limit in pairs])
    norm = nn.utils.clip_grad_norm_(every, case.max_norm or math.inf, case.norm_type)
    if case.max_value is not None:
        nn.utils.clip_grad_value_(every, case.max_value)
    return norm


def assert_law(ranks: Simulator, case: Case, seed: int) -> None:
    expected = _train_by_hand(case)
    for got in ranks.run(lambda ctx: _train(ctx, case), len(case.units[0][0]), seed=seed):
        assert got.stepped == expected.stepped
        assert got.scales == expected.scales
        assert got.rates == pytest.approx(expected.rates, abs=1e-10)
        torch.testing.assert_close(got.parameters, expected.parameters, **TOLERANCE)
        torch.testing.assert_close(got.norms, expected.norms, **TOLERANCE)
        for mine, theirs, stepped in zip(got.gradients, expected.gradients, expected.stepped, strict=False):
            if stepped:
                torch.testing.assert_close(mine, theirs, **TOLERANCE)


@pytest.mark.kept("default")
@settings(max_examples=share(0.8), deadline=None)
@given(case=cases(), seed=st.integers(0, 9))
def test_any_split_is_one_process_with_one_batch(ranks: Simulator, case: Case, seed: int) -> None:
    assert_law(ranks, case, seed)


@settings(max_examples=share(0.4), deadline=None)
@given(case=cases())
def test_so_it_is_where_numbers_stay_on_the_device(ranks: Simulator, case: Case) -> None:
    """The way of accelerators, where norms and weights are tensors that are not read."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("_window", "_clip"):
            patch.setattr(f"accel.training.{module}.total_norm", _on_device(total_norm))
        for module in ("_step", "_clip"):
            patch.setattr(f"accel.training.{module}.total_weight", _on_device(_window.total_weight))
        patch.setattr(_backward, "own_weight", _on_device(_backward.own_weight))
        assert_law(ranks, case, 0)


def _on_device(function: Callable[..., float | torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args: torch.as_tensor(function(*args), dtype=torch.float64)
