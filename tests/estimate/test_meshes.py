# SPDX-License-Identifier: Apache-2.0
"""Meshes of a number of ranks: all of them, each once, and those that a model can be spread over."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import msgspec
import pytest
import torch
from catching import assert_raises
from estimates import Choice, largest_parts, read_config, with_recorded_calls
from hypothesis import given, strategies as st
from planned_parts import stage_modules

import accel
from accel.errors import ConfigError
from accel.estimate import (
    EstimatedStep,
    Hosts,
    Latent,
    Transformer,
    list_meshes,
    mesh_problem,
    rank_memory,
    read_transformer,
    step_time,
)
from accel.estimate._choices import stages_of
from accel.estimate._step import stage_layers
from accel.parallel.axes.pipeline import ReplayedModule
from accel.testing import Simulator
from accel.topology import Axes, Balance, Plan, coordinates

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


def test_latents_that_stay_whole_let_any_number_of_ranks_share_the_rest() -> None:
    latent = Latent(queries=8, keys=8, rotated=2, values=4, divided=False)
    whole = msgspec.structs.replace(MIXTRAL, latent=latent, kv_heads=12, shared_inner=36)
    divided = msgspec.structs.replace(whole, latent=msgspec.structs.replace(latent, divided=True))
    axes = Axes(dp=6, tp=5, ep=6)
    assert mesh_problem(axes, whole, Plan(), tokens=20) is None
    assert "heads cannot be divided" in str(mesh_problem(axes, divided, Plan(), tokens=20))
    step = EstimatedStep(tokens=20)
    few, many = (step_time(whole, Axes(dp=60 // tp, tp=tp, ep=2), step, Plan(), Hosts(flops=1.0)) for tp in (2, 6))
    assert many.attention == few.attention
    assert many.products < few.products


@pytest.mark.parametrize("experts", [0, 6])
def test_what_products_give_is_kept_where_that_is_faster(experts: int) -> None:
    sizes = msgspec.structs.replace(LLAMA, experts=experts, experts_per_token=min(2, experts), width=4800)
    step = EstimatedStep(tokens=20, recompute=True)
    keeps = msgspec.structs.replace(step, keep="products")
    axes = Axes(dp=6, ep=6 if experts else 1)
    times = [step_time(sizes, axes, each, Plan(), Hosts(flops=1.0)).compute for each in (step, keeps)]
    kept = [largest_parts(sizes, axes, each)["activations"] or 0 for each in (step, keeps)]
    assert times[1] < times[0]
    assert kept[1] > kept[0]


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
        (Axes(dp=3, tp=2), Plan(), "each rank along tp would compute all experts: expected ep together with tp"),
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
    with assert_raises(ConfigError, problem="the number of ranks is not valid"):
        _ = list(list_meshes(0))


SLOW = (pytest.mark.slow,)
TINY: Mapping[str, Any] = {
    "num_hidden_layers": 6, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 300,
}  # fmt: skip
EXPERTS = TINY | {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "llama": TINY,
    "qwen2": TINY | {"tie_word_embeddings": True},
    "qwen3": TINY | {"head_dim": 8},
    "mistral": TINY | {"sliding_window": None},
    "mixtral": EXPERTS | {"num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": EXPERTS | {"num_experts": 4, "head_dim": 8},
    "deepseek_v3": EXPERTS | {
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 2, "num_key_value_heads": 4,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    },
    "gpt2": {"n_layer": 6, "n_embd": 32, "n_head": 4, "vocab_size": 300, "n_positions": 64},
}  # fmt: skip


def _blocks(stages: Sequence[Sequence[str]]) -> list[int]:
    """The number of blocks among the modules of each stage."""
    return [len({found[0] for path in stage if (found := re.search(r"\.(layers|h)\.\d+", path))}) for stage in stages]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("kind", [pytest.param(each, marks=() if each == "llama" else SLOW) for each in KINDS])
def test_a_plan_has_the_stages_that_prepare_makes(ranks: Simulator, tmp_path: Path, kind: str, stages: int) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    file = tmp_path / "config.json"
    _ = file.write_text(json.dumps({"model_type": kind, **KINDS[kind]}))
    sizes = read_transformer(file)
    planned = with_recorded_calls(sizes, file)
    assert planned.calls

    def prepared(ctx: accel.DistContext) -> Sequence[str]:
        model = accel.prepare_model(accel.replace(ctx, mesh=f"pp={stages}"), read_config(file).make())
        return cast(ReplayedModule, stage_modules(model)[0]).own

    counts = _blocks(ranks.run(prepared, stages, default_group=True))
    assert list(stage_layers(planned, stages, EstimatedStep().balance)) == counts
    with torch.device("meta"):
        model = read_config(file).make()
    for balance in get_args(Balance):
        counts = _blocks(accel.parallel.stage_plan(model, stages, balance=balance))
        assert list(stage_layers(planned, stages, balance)) == counts
        assert list(stage_layers(sizes, stages, balance)) == counts  # without transformers


@given(st.sampled_from(get_args(Balance)), st.sampled_from([(2, 1), (3, 1), (3, 2)]), st.booleans())
def test_the_slowest_and_the_fullest_rank_are_among_the_stages(
    balance: Balance, stages: tuple[int, int], large: bool
) -> None:
    pp, each = stages
    sizes = msgspec.structs.replace(LLAMA, layers=9, vocabulary=2000 if large else 20)
    plan = Plan(stages_per_rank=each, schedule="1F1B" if each == 1 else "Interleaved1F1B")
    step = EstimatedStep(tokens=24, micro_batches=12, balance=balance)
    axes = Axes(pp=pp, dp=2)
    memory, time = rank_memory(sizes, axes, step, plan), step_time(sizes, axes, step, plan, Hosts())
    found = stages_of(sizes, Choice(axes=axes, step=step, plan=plan, memory=memory, time=time), Hosts())
    assert max(one.memory.total for one in found) == memory.total
    assert max(one.time.total for one in found) == time.total
    blocks = [at for one in found for first, last in one.blocks for at in range(first, last + 1)]
    assert sorted(blocks) == list(range(9))
    assert sorted(at for one in found for at in one.stages) == list(range(pp * each))


def test_balance_by_time_moves_blocks_away_from_the_head() -> None:
    sizes = msgspec.structs.replace(LLAMA, layers=9, vocabulary=900)
    step = EstimatedStep(tokens=24, micro_batches=12)
    links = Hosts(inside=1e18, between=1e18, latency_s=1e-18)
    times = [
        step_time(sizes, Axes(pp=3), msgspec.structs.replace(step, balance=each), Plan(), links)
        for each in get_args(Balance)
    ]
    assert times[2].total < times[0].total
