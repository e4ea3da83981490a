# SPDX-License-Identifier: Apache-2.0
"""The law of meshes: one loop trains the same model, to the last digits, however it is spread."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from language_models import STYLES, Run, plan_of, train
from profiles import share

import accel
from accel.testing import Simulator, simulate


@functools.cache
def _alone(accumulation: int, **options: Any) -> Run:
    return simulate(lambda ctx: train(ctx, "dp=1", accumulation=accumulation, **options), 1, default_group=True)[0]


def assert_law(run: Run, expected: Run) -> None:
    for name, parameter in run.parameters.items():
        torch.testing.assert_close(parameter, expected.parameters[name], rtol=0, atol=1e-10, msg=name)
    assert run.norms == pytest.approx(expected.norms, rel=1e-12, abs=1e-12)


def assert_trains_as_one_process(
    ranks: Simulator,
    axes: accel.parallel.Axes,
    *,
    strategy: str,
    accumulation: int,
    plan: accel.parallel.Plan,
    **options: Any,
) -> None:
    expected = _alone(accumulation, **options)
    if axes.world_size == axes.dp_replicate > 1:
        strategy = "ddp"  # replicas alone have nothing to shard: refused with fsdp

    def rank(ctx: accel.DistContext) -> Run:
        return train(ctx, str(axes) or "dp=1", strategy=strategy, accumulation=accumulation, plan=plan, **options)

    runs = ranks.run(rank, axes.world_size, default_group=True, timeout_s=300)
    for run in runs:
        assert_law(run, expected)
    assert {name for run in runs for name in run.parameters} == expected.parameters.keys()  # of all stages


@st.composite
def meshes(draw: st.DrawFn, most: int) -> accel.parallel.Axes:
    """Meshes of up to so many ranks."""
    sizes: dict[str, int] = {}
    left = most
    data = draw(st.sampled_from([["dp"], ["dp_replicate", "dp_shard"]]))
    for name in draw(st.permutations(["pp", "cp", "tp", *data])):
        sizes[name] = draw(st.sampled_from([each for each in (2, 1) if each <= left]))
        left //= sizes[name]
    return accel.parallel.Axes(**sizes)


@st.composite
def meshes_of_experts(draw: st.DrawFn, most: int) -> accel.parallel.Axes:
    """Meshes of up to so many ranks, some of which share four experts."""
    axes = draw(meshes(most))
    divisors = [each for each in (4, 2) if axes.expert_ranks % each == 0]
    return msgspec.structs.replace(axes, ep=draw(st.sampled_from(divisors))) if divisors else axes


plans = st.builds(
    accel.parallel.Plan,
    tensor=st.just(STYLES),
    context=st.sampled_from(["gather", "ring", "heads"]),
    schedule=st.sampled_from(["GPipe", "1F1B"]),
    reshard_after_forward=st.sampled_from([None, True, False]),
)
IN_A_V = ("ZBVZeroBubble", "DualPipeV")
SCHEDULES = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", *IN_A_V)
LAW = {
    "strategy": st.sampled_from(["ddp", "fsdp"]),
    "accumulation": st.integers(1, 3),
    "plan": plans,
    "tied": st.booleans(),
    "frozen": st.booleans(),
    "unused": st.booleans(),
    "kv_heads": st.sampled_from([2, 4]),
}


PLAIN: dict[str, Any] = {"strategy": "ddp", "accumulation": 1, "tied": False, "frozen": False, "unused": False}
GATHERS = accel.parallel.Plan(tensor=STYLES, context="gather")


@pytest.mark.kept("default")
@settings(deadline=None, max_examples=share(0.06))
@given(axes=meshes(4), **LAW)
@example(axes=accel.parallel.Axes(tp=2), plan=GATHERS, kv_heads=2, **PLAIN)  # as many key features as positions
@example(axes=accel.parallel.Axes(cp=2, tp=2), plan=GATHERS, kv_heads=4, **PLAIN)
def test_training_on_any_mesh_is_training_on_one_process(
    ranks: Simulator, axes: accel.parallel.Axes, **case: Any
) -> None:
    assert_trains_as_one_process(ranks, axes, **case)


@pytest.mark.slow
@settings(deadline=None, max_examples=share(0.04))
@given(axes=meshes(8), **LAW)
def test_training_on_any_larger_mesh(ranks: Simulator, axes: accel.parallel.Axes, **case: Any) -> None:
    assert_trains_as_one_process(ranks, axes, **case)


@pytest.mark.nightly
@settings(deadline=None, max_examples=share(0.06))
@given(
    others=st.sampled_from(
        [
            accel.parallel.Axes(dp=2),
            accel.parallel.Axes(cp=2),
            accel.parallel.Axes(tp=2),
            accel.parallel.Axes(cp=2, tp=2),
        ]
    ),
    schedule=st.sampled_from(SCHEDULES),
    **LAW,
)
def test_training_by_any_schedule_beside_other_axes(
    ranks: Simulator, others: accel.parallel.Axes, schedule: Any, tied: bool, **case: Any
) -> None:
    case["plan"] = msgspec.structs.replace(case["plan"], schedule=schedule, stages_per_rank=2)
    tied = tied and schedule not in IN_A_V  # two stages of one rank would share a sharded parameter, which is refused
    assert_trains_as_one_process(ranks, msgspec.structs.replace(others, pp=2), depth=4, tied=tied, **case)


@pytest.mark.nightly
@settings(deadline=None, max_examples=share(0.06))
@given(axes=meshes_of_experts(8), method=st.sampled_from(["gather", "ring", "heads"]), **LAW)
def test_training_with_experts_on_any_mesh(
    ranks: Simulator, axes: accel.parallel.Axes, method: Any, **case: Any
) -> None:
    case["plan"] = plan_of(4, context=method)
    assert_trains_as_one_process(ranks, axes, experts=4, **case)


@pytest.mark.nightly
def test_four_dimensions_at_once(ranks: Simulator) -> None:
    axes = accel.parallel.Axes(pp=2, dp=2, cp=2, tp=2)
    plan = accel.parallel.Plan(tensor=STYLES, context="ring")
    assert_trains_as_one_process(
        ranks, axes, strategy="fsdp", accumulation=2, plan=plan, tied=True, frozen=False, kv_heads=2
    )
