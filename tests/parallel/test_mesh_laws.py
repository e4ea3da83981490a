# SPDX-License-Identifier: Apache-2.0
"""The law of meshes: one loop trains the same model, to the last digits, however it is spread."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from language_models import STYLES, Run, train

import accel
from accel.testing import Simulator, simulate


@functools.cache
def _alone(accumulation: int, **options: Any) -> Run:
    return simulate(lambda ctx: train(ctx, "dp=1", accumulation=accumulation, **options), 1, default_group=True)[0]


def _check(run: Run, expected: Run) -> None:
    for name, parameter in run.parameters.items():
        torch.testing.assert_close(parameter, expected.parameters[name], rtol=0, atol=1e-10, msg=name)
    assert run.norms == pytest.approx(expected.norms, rel=1e-12, abs=1e-12)


def _law(
    ranks: Simulator, axes: accel.Axes, *, strategy: str, accumulation: int, plan: accel.Plan, **options: Any
) -> None:
    expected = _alone(accumulation, **options)

    def rank(ctx: accel.DistContext) -> Run:
        return train(ctx, str(axes) or "dp=1", strategy=strategy, accumulation=accumulation, plan=plan, **options)

    runs = ranks.run(rank, axes.world_size, default_group=True, timeout_s=300)
    for run in runs:
        _check(run, expected)
    assert {name for run in runs for name in run.parameters} == expected.parameters.keys()  # of all stages


@st.composite
def meshes(draw: st.DrawFn, most: int) -> accel.Axes:
    """Meshes of up to so many ranks."""
    sizes: dict[str, int] = {}
    left = most
    data = draw(st.sampled_from([["dp"], ["dp_replicate", "dp_shard"]]))
    for name in draw(st.permutations(["pp", "cp", "tp", *data])):
        sizes[name] = draw(st.sampled_from([each for each in (2, 1) if each <= left]))
        left //= sizes[name]
    return accel.Axes(**sizes)


plans = st.builds(
    accel.Plan,
    tensor=st.just(STYLES),
    context=st.sampled_from(["gather", "ring", "heads"]),
    schedule=st.sampled_from(["GPipe", "1F1B"]),
    reshard_after_forward=st.sampled_from([None, True, False]),
)
LAW = {
    "strategy": st.sampled_from(["ddp", "fsdp"]),
    "accumulation": st.integers(1, 3),
    "plan": plans,
    "tied": st.booleans(),
    "frozen": st.booleans(),
    "kv_heads": st.sampled_from([2, 4]),
}


@settings(deadline=None, max_examples=3)
@given(axes=meshes(4), **LAW)
def test_training_on_any_mesh_is_training_on_one_process(ranks: Simulator, axes: accel.Axes, **case: Any) -> None:
    _law(ranks, axes, **case)


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(axes=meshes(8), **LAW)
def test_training_on_any_larger_mesh(ranks: Simulator, axes: accel.Axes, **case: Any) -> None:
    _law(ranks, axes, **case)


@pytest.mark.slow
def test_four_dimensions_at_once(ranks: Simulator) -> None:
    axes = accel.Axes(pp=2, dp=2, cp=2, tp=2)
    plan = accel.Plan(tensor=STYLES, context="ring")
    _law(ranks, axes, strategy="fsdp", accumulation=2, plan=plan, tied=True, frozen=False, kv_heads=2)
