# SPDX-License-Identifier: Apache-2.0
"""Laws of messages and times on a mesh, for axes that no run of fake ranks is held against, and for all of them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given, strategies as st

from accel.estimate import (
    EstimatedStep,
    Hosts,
    Transformer,
    list_meshes,
    mesh_problem,
    rank_memory,
    step_time,
    step_traffic,
)
from accel.estimate._cost import axis_bandwidth
from accel.topology import Axes, Plan

LLAMA = Transformer(layers=8, width=64, heads=8, kv_heads=4, head_width=8, inner=96, vocabulary=160)
MIXTRAL = msgspec.structs.replace(LLAMA, experts=8, experts_per_token=2)
STEP = EstimatedStep(tokens=64, micro_batches=8)
fitting = [axes for axes in list_meshes(16) if mesh_problem(axes, LLAMA, Plan(), tokens=64) is None]
meshes = st.sampled_from([axes for axes in fitting if axes.cp == 1 or axes.dp * axes.dp_shard > 1])  # shards beside cp


def sent(
    model: Transformer, axes: Axes, step: EstimatedStep, plan: Plan | None = None, stage: int = 0
) -> Mapping[str, int]:
    """Bytes by axis and operation."""
    return {f"{each.axis} {each.operation}": each.bytes for each in step_traffic(model, axes, step, plan, stage=stage)}


@given(meshes, st.booleans())
def test_twice_the_micro_batches_send_twice_as_many_tokens_and_no_more_gradients(axes: Axes, recompute: bool) -> None:
    step = msgspec.structs.replace(STEP, recompute=recompute)
    once, twice = (sent(LLAMA, axes, msgspec.structs.replace(step, micro_batches=count)) for count in (8, 16))
    assert once.keys() == twice.keys()
    for name, size in once.items():
        axis, operation = name.split()
        is_gradient = axis not in ("tp", "cp", "pp") and operation != "all-gather"
        kept = is_gradient or (axis not in ("tp", "cp", "pp") and axes.pp > 1)
        assert twice[name] == size * (1 if kept else 2)


@given(meshes)
def test_what_computes_again_sends_no_less_and_holds_no_more(axes: Axes) -> None:
    again = msgspec.structs.replace(STEP, recompute=True)
    plain = sent(LLAMA, axes, STEP)
    assert all(sent(LLAMA, axes, again)[name] >= size for name, size in plain.items())
    assert rank_memory(LLAMA, axes, again).activations <= rank_memory(LLAMA, axes, STEP).activations
    hosts = Hosts()
    assert step_time(LLAMA, axes, again, Plan(), hosts).compute > step_time(LLAMA, axes, STEP, Plan(), hosts).compute


@given(meshes, st.sampled_from([1, 8]))
def test_what_is_offloaded_leaves_the_device(axes: Axes, micro_batches: int) -> None:
    step = msgspec.structs.replace(STEP, micro_batches=micro_batches)
    stays, leaves = (rank_memory(LLAMA, axes, step, Plan(offload=offload)) for offload in (False, True))
    if axes.dp * axes.dp_shard == 1:  # no shards
        assert leaves == stays
        return
    assert (leaves.parameters, leaves.optimizer) == (0, 0)
    assert stays.parameters + stays.optimizer <= leaves.host <= stays.parameters * 2 + stays.optimizer
    assert leaves.total + stays.parameters + stays.optimizer <= stays.total


@pytest.mark.parametrize("reshard", [None, True, False])
def test_a_pipeline_gathers_its_stage_once_a_step(reshard: bool | None) -> None:
    axes = Axes(pp=2, dp=4)
    found = sent(LLAMA, axes, STEP, Plan(reshard_after_forward=reshard))
    half = LLAMA.layers // 2 * sum(each.count for each in LLAMA.block()) + sum(each.count for each in LLAMA.embedding())
    assert found["dp all-gather"] == 2 * half
    assert found["dp reduce-scatter"] == 4 * half
    assert found["pp send"] == STEP.micro_batches * STEP.tokens * LLAMA.width * 2


def test_a_stage_between_sends_both_ways() -> None:
    axes = Axes(pp=4)
    ends = [sent(LLAMA, axes, STEP, stage=stage)["pp send"] for stage in range(4)]
    assert ends == [ends[0], 2 * ends[0], 2 * ends[0], ends[0]]


def test_tokens_go_to_their_experts_and_back_in_both_directions() -> None:
    found = sent(MIXTRAL, Axes(dp=8, ep=4), STEP)
    rows = STEP.tokens * MIXTRAL.experts_per_token * MIXTRAL.width * 2
    counts = MIXTRAL.experts * 8
    assert found["ep all-to-all"] == MIXTRAL.layers * STEP.micro_batches * (4 * rows + counts)


def test_an_axis_sends_by_the_links_of_its_ranks() -> None:
    hosts = Hosts(ranks=8, inside=400.0, between=50.0)
    axes = Axes(pp=2, dp=4, cp=2, tp=4)
    assert axis_bandwidth(axes, "tp", hosts) == 400
    assert axis_bandwidth(axes, "cp", hosts) == 400
    assert axis_bandwidth(axes, "dp", hosts) == 50  # one rank of each on a host
    assert axis_bandwidth(axes, "dp+cp", hosts) == 100  # two of them
    assert axis_bandwidth(Axes(dp=64), "dp", hosts) == 400  # eight links of a host together
    assert axis_bandwidth(axes, "pp", hosts) == 50


@given(meshes, st.integers(1, 63))
def test_a_window_makes_attention_faster_and_nothing_else(axes: Axes, window: int) -> None:
    narrow = msgspec.structs.replace(LLAMA, window=window, windowed=LLAMA.layers)
    hosts = Hosts(flops=400e12)
    whole, part = (step_time(each, axes, STEP, Plan(), hosts) for each in (LLAMA, narrow))
    assert part.products == whole.products
    assert part.attention < whole.attention
    assert rank_memory(narrow, axes, STEP) == rank_memory(LLAMA, axes, STEP)
    wide = msgspec.structs.replace(narrow, window=STEP.tokens)
    assert step_time(wide, axes, STEP, Plan(), hosts) == whole
