# SPDX-License-Identifier: Apache-2.0
"""Meshes of a number of ranks: all of them, each once, and those that a model can be spread over."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import given, strategies as st

from accel.errors import ConfigError
from accel.estimate import Transformer, list_meshes, mesh_problem
from accel.topology import Axes, Plan, coordinates

LLAMA = Transformer(layers=6, width=48, heads=12, kv_heads=4, head_width=4, inner=36, vocabulary=144)
MIXTRAL = msgspec.structs.replace(LLAMA, experts=6, experts_per_token=2)
plans = st.builds(
    Plan,
    sequence=st.booleans(),
    context=st.sampled_from(["gather", "ring", "heads"]),
    stages_per_rank=st.integers(1, 2),
)


@given(st.integers(1, 200), st.sampled_from([0, 1, 6, 8]))
def test_each_mesh_has_all_ranks_and_stands_once(ranks: int, experts: int) -> None:
    found = list(list_meshes(ranks, experts=experts))
    assert all(axes.world_size == ranks for axes in found)
    assert len({str(axes) for axes in found}) == len(set(found)) == len(found)
    assert all(axes.ep == 1 or experts % axes.ep == 0 == axes.expert_ranks % axes.ep for axes in found)
    assert all(axes.dp == 1 or axes.dp_replicate == axes.dp_shard == 1 for axes in found)
    last = coordinates(found[-1], ranks - 1)
    assert all(last[name] == getattr(found[-1], name) - 1 for name in ("pp", "dp", "cp", "tp"))


@given(st.integers(1, 48))
def test_no_mesh_is_missing(ranks: int) -> None:
    sizes = range(1, ranks + 1)
    whole = [each for each in itertools.product(sizes, repeat=4) if math.prod(each) == ranks] if ranks <= 12 else []
    found = {(axes.pp, axes.dp, axes.cp, axes.tp) for axes in list_meshes(ranks) if axes.dp_shard == 1}
    assert found >= set(whole)
    both = [axes for axes in list_meshes(ranks) if axes.dp_shard > 1]
    splits = [(r, ranks // r) for r in range(2, ranks) if ranks % r == 0 and ranks // r > 1]
    assert [(a.dp_replicate, a.dp_shard) for a in both if a.pp == a.cp == a.tp == 1] == splits


@pytest.mark.parametrize("ranks", [7, 1021])
def test_a_prime_number_of_ranks_has_one_axis(ranks: int) -> None:
    assert {str(axes) for axes in list_meshes(ranks)} == {f"{name}={ranks}" for name in ("pp", "dp", "cp", "tp")}


@given(st.integers(1, 64), plans, st.sampled_from([24, 64, 100]), st.sampled_from([LLAMA, MIXTRAL]))
def test_a_mesh_without_a_problem_divides_the_model(ranks: int, plan: Plan, tokens: int, model: Transformer) -> None:
    for axes in list_meshes(ranks, experts=MIXTRAL.experts):
        if mesh_problem(axes, model, plan, tokens=tokens) is not None:
            continue
        assert model.heads % axes.tp == 0
        assert model.layers >= axes.pp * plan.stages_per_rank
        assert model.experts % axes.ep == 0
        assert axes.ep == 1 or model.experts
        assert axes.tp == 1 or axes.ep > 1 or not model.experts
        assert axes.cp == 1 or tokens % (2 * axes.cp) == 0
        assert axes.cp == 1 or plan.context != "heads" or model.heads % (axes.cp * axes.tp) == 0
        assert not plan.sequence or tokens // axes.cp % axes.tp == 0


@pytest.mark.parametrize(
    ("axes", "plan", "expected"),
    [
        (Axes(tp=5), Plan(), "heads cannot be divided along tp: expected tp that divides 12, got tp=5"),
        (Axes(tp=6), Plan(), "heads of keys cannot be divided along tp"),
        (Axes(pp=4), Plan(stages_per_rank=2), "a stage would have no layer"),
        (Axes(cp=8), Plan(), "the tokens of a sequence cannot be divided along cp: expected a multiple of 16"),
        (Axes(cp=4), Plan(context="heads"), None),
        (Axes(cp=3), Plan(context="heads"), "heads of keys cannot be divided along cp"),
        (Axes(dp=2, ep=2), Plan(), "the model has no experts"),
        (Axes(dp=2, cp=3, tp=4, pp=6), Plan(), None),
    ],
)
def test_what_a_model_demands_is_named(axes: Axes, plan: Plan, expected: str | None) -> None:
    problem = mesh_problem(axes, LLAMA, plan, tokens=24)
    assert (problem is None) == (expected is None)
    assert expected is None or expected in str(problem)


@pytest.mark.parametrize(
    ("axes", "plan", "expected"),
    [
        (Axes(dp=4, ep=4), Plan(), "experts cannot be divided along ep: expected ep that divides 6, got ep=4"),
        (Axes(dp=3, tp=2), Plan(), "each rank along tp would compute all experts: expected ep beside tp"),
        (Axes(dp=3, tp=2, ep=6), Plan(sequence=True), "estimates of shared tokens do not know experts"),
        (Axes(dp=3, tp=2, ep=6), Plan(), None),
        (Axes(dp=6, ep=6), Plan(), None),
    ],
)
def test_what_a_mixture_demands_is_named(axes: Axes, plan: Plan, expected: str | None) -> None:
    problem = mesh_problem(axes, MIXTRAL, plan, tokens=24)
    assert (problem is None) == (expected is None)
    assert expected is None or expected in str(problem)


def test_no_ranks_have_no_mesh() -> None:
    with pytest.raises(ConfigError, match="not a number of ranks"):
        _ = list(list_meshes(0))
