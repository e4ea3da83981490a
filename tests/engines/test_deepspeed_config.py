# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's configuration: values that are filled in, their sources, and all contradictions at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepspeed_keys
import pytest
import torch
from catching import assert_raises
from deepspeed_configs import COUNTS, FACTS, configs
from hypothesis import given, settings, strategies as st
from profiles import share

import accel
from accel.config import LaunchConfig, decode, encode
from accel.engines.deepspeed import DeepSpeed, Offload, RunFacts, _keys, config_of, read_deepspeed, resolve
from accel.engines.deepspeed._engine import read_facts
from accel.engines.deepspeed._options import from_section, from_setting
from accel.errors import ConfigError
from accel.formats import precision


def leaves_of(tree: dict[str, Any], above: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """The leaves of nested dicts by their paths."""
    found: dict[tuple[str, ...], Any] = {}
    for name, value in tree.items():
        found |= leaves_of(value, (*above, name)) if isinstance(value, dict) and value else {(*above, name): value}
    return found


@given(configs(), FACTS)
@settings(max_examples=share(1.2))
def test_nothing_is_left_open_each_value_has_a_source_and_the_table_fits_a_terminal(c: DeepSpeed, f: RunFacts) -> None:
    resolved = resolve(c, f)
    leaves = leaves_of(resolved.settings)
    assert "auto" not in map(str, leaves.values())
    assert leaves == {key: row.value for key, row in resolved.rows.items()}
    assert all(row.source for row in resolved.rows.values())
    assert leaves["train_batch_size",] == (
        leaves["train_micro_batch_size_per_gpu",] * leaves["gradient_accumulation_steps",] * f.ranks
    )
    table = resolved.table()
    assert all(len(line) <= 80 for line in table.splitlines())
    assert all(key[-1] in table for key in leaves)


@given(configs(), FACTS)
@settings(max_examples=share(1.2))
def test_settled_settings_settle_to_themselves(c: DeepSpeed, f: RunFacts) -> None:
    once = resolve(c, f).settings
    assert json.loads(json.dumps(once)) == once
    assert resolve(read_deepspeed(once), f).settings == once


@given(configs(), FACTS)
@settings(max_examples=share(0.6))
def test_a_context_carries_a_record_to_ranks_and_files(c: DeepSpeed, f: RunFacts) -> None:
    ctx = accel.single("cpu", deepspeed=c)
    assert isinstance(ctx.settings.deepspeed, str)
    assert resolve(config_of(ctx), f).settings == resolve(c, f).settings
    config = decode(encode(LaunchConfig(deepspeed=ctx.settings.deepspeed)))
    told = resolve(from_setting(config.deepspeed), f).settings
    assert told == resolve(c, f).settings


@given(COUNTS, COUNTS, COUNTS, st.sets(st.sampled_from(["train_batch_size", "rows", "steps"])))
def test_two_sizes_give_the_third_whoever_says_them(rows: int, steps: int, ranks: int, said: set[str]) -> None:
    sizes = {
        "train_batch_size": rows * steps * ranks,
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": steps,
    }
    short = {"rows": "train_micro_batch_size_per_gpu", "steps": "gradient_accumulation_steps"}
    names = {short.get(name, name) for name in said}
    known = RunFacts(
        ranks=ranks,
        rows=None if "rows" in said else rows,
        accumulation=None if "steps" in said or "train_batch_size" in said else steps,
    )
    assert (
        resolve(DeepSpeed(settings={name: sizes[name] for name in names}), known).settings
        == resolve(DeepSpeed(), RunFacts(ranks=ranks, rows=rows, accumulation=steps)).settings
    )


ALONE: list[tuple[dict[str, Any], str]] = [
    ({"fp16": {"enabled": True}}, "fp16.enabled: true"),
    ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps: 3"),
    ({"train_micro_batch_size_per_gpu": 7}, "train_micro_batch_size_per_gpu: 7"),
    ({"gradient_clipping": 0.5}, "gradient_clipping: 0.5"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 0.3}}}, "optimizer.params.lr: 0.3"),
    ({"scheduler": {"type": "WarmupLR"}}, "scheduler: WarmupLR"),
    ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel: has no effect"),
    ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "offload_param: moves parameters"),
    ({"wall_clock_brakdown": True}, "Did you mean `wall_clock_breakdown`?"),
    ({"checkpoint": {"load_universal": True}}, "checkpoint.load_universal"),
    ({"compile": {"deepcompile": "auto"}}, 'compile.deepcompile: "auto", which nothing'),
    ({"managed_gradient_accumulation": True}, "managed_gradient_accumulation: true"),
    ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled"),
    ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zenflow.topk_ratio: 0.1, but a second optimizer"),
    ({"zero_optimization": {"legacy_stage1": True}}, "legacy_stage1: true, but DeepSpeed has it no longer"),
    ({"zero_optimization": {"compute_grad_norm": False}}, "compute_grad_norm: false, but the step needs the norm"),
    ({"gradient_allreduce_op": "sum"}, 'gradient_allreduce_op: "sum", but optimizer_step divides'),
]


@given(st.sets(st.integers(0, len(ALONE) - 1), min_size=1))
def test_all_contradictions_are_told_at_once(chosen: set[int]) -> None:
    asked: dict[str, Any] = {"zero_optimization": {"stage": 2}}
    for at in chosen:
        asked |= {name: asked.get(name, {}) | value if name in asked else value for name, value in ALONE[at][0].items()}
    facts = RunFacts(
        ranks=2,
        precision=precision("bf16"),
        rows=4,
        accumulation=2,
        max_norm=1.0,
        optimizer="AdamW",
        optimizer_values={"lr": 0.1},
    )
    with assert_raises(ConfigError, problem="contradicts the run") as caught:
        _ = resolve(read_deepspeed(asked), facts, imposed={"managed_gradient_accumulation": False})
    assert caught.value.got.count("\n- ") == len(chosen)
    assert all(ALONE[at][1] in caught.value.got for at in chosen)


AT_STAGES: list[tuple[int, dict[str, Any], str]] = [  # a stage that refuses, with "bf16"
    (3, {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "ratio: 0.5"),
    (3, {"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}}, "super_offload: true"),
    (3, {"gradient_predivide_factor": 2.0}, "gradient_predivide_factor: 2.0"),
    (1, {"data_types": {"grad_accum_dtype": "fp32"}}, 'grad_accum_dtype: "fp32"'),
    (2, {"compile": {"deepcompile": True}}, "deepcompile: true"),
    (
        2,
        {"zero_optimization": {"reduce_scater": True}},
        "reduce_scater: no key of DeepSpeed. Did you",
    ),
    (3, {"zero_optimization": {"offload_param": {"device": "cpu", "pin_memry": True}}}, "Did you mean `pin_memory`?"),
    (2, {"zero_optimization": {"contiguous_gradients": "maybe"}}, "DeepSpeed takes bool there"),
    (3, {"zero_optimization": {"sub_group_size": 1.5}}, "DeepSpeed takes int there"),
    (2, {"zero_optimization": {"cpu_offload": True}}, "an older name. Write offload_optimizer instead"),
    (3, {"zero_optimization": {"mics_shard_size": 2}}, "has removed it"),
    (2, {"sparse_gradients": False}, "has removed it"),
    (2, {"bf16": {"imediate_grad_update": True}}, "Did you mean `immediate_grad_update`?"),
]
PASSES: list[tuple[int, dict[str, Any]]] = [
    (1, {"zero_optimization": {"round_robin_gradients": True, "parameter_alignment": True}}),
    (1, {"gradient_predivide_factor": 2.0, "prescale_gradients": True}),
    (2, {"gradient_predivide_factor": 2.0, "data_types": {"grad_accum_dtype": "fp32"}}),
    (3, {"gradient_predivide_factor": 2.0, "prescale_gradients": True, "data_types": {"grad_accum_dtype": "fp32"}}),
    (3, {"gradient_predivide_factor": 1.0, "gradient_allreduce_op": "MEAN", "compile": {"deepcompile": False}}),
    (1, {"data_types": {"grad_accum_dtype": "bf16"}}),
    (1, {"data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
    (3, {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 1.0, "super_offload": False}}}),
    (2, {"zero_optimization": {"compute_grad_norm": True, "legacy_stage1": False, "elastic_checkpoint": True}}),
    (3, {"zero_optimization": {"sub_group_size": 1e9, "param_persistence_threshold": 5, "reduce_scatter": "true"}}),
    (
        2,
        {"tensorboard": {"enabled": True, "job_name": "a"}, "aio": {"block_size": 1}, "elasticity": {"enabled": False}},
    ),
]


def at_stage(stage: int, asked: dict[str, Any]) -> DeepSpeed:
    """A JSON with a stage."""
    return read_deepspeed(asked | {"zero_optimization": {"stage": stage, **asked.get("zero_optimization", {})}})


@pytest.mark.parametrize(("stage", "asked", "said"), AT_STAGES)
def test_what_only_a_stage_gets_wrong_is_refused_there(stage: int, asked: dict[str, Any], said: str) -> None:
    with assert_raises(ConfigError, problem="contradicts the run") as caught:
        _ = resolve(at_stage(stage, asked), RunFacts(ranks=2, precision=precision("bf16")))
    assert said in caught.value.got


@pytest.mark.parametrize(("stage", "asked"), PASSES)
def test_keys_that_change_nothing_of_the_loop_pass(stage: int, asked: dict[str, Any]) -> None:
    _ = resolve(at_stage(stage, asked), RunFacts(ranks=2, precision=precision("bf16")))


def test_a_key_of_a_newer_version_passes_and_is_named() -> None:
    resolved = resolve(at_stage(2, {"zero_optimization": {"quantum_tunnels": 3}}), RunFacts())
    assert resolved.newer == ("zero_optimization.quantum_tunnels",)
    assert resolved.settings["zero_optimization"]["quantum_tunnels"] == 3


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_keys_on_record_are_those_of_deepspeed() -> None:
    _ = pytest.importorskip("deepspeed")
    kept: dict[str, Any] = {}
    exec(deepspeed_keys.recorded(), kept)
    for name in ("VERSION", "KINDS", "REMOVED", "RENAMED"):
        assert kept[name] == getattr(_keys, name), f"record them: python {deepspeed_keys.__file__}"


def test_an_optimizer_of_the_file_may_be_the_one_passed() -> None:
    section = {"type": "Adam", "params": {"lr": "auto", "betas": [0.9, 0.95], "torch_adam": True}}
    facts = RunFacts(optimizer="AdamW", optimizer_values={"lr": 0.1, "betas": (0.9, 0.95)})
    resolved = resolve(read_deepspeed({"optimizer": section}), facts)
    assert "optimizer" not in resolved.settings
    assert resolved.settings["zero_allow_untested_optimizer"] is True
    with assert_raises(ConfigError, got="AdamW, but prepare got SGD"):
        _ = resolve(read_deepspeed({"optimizer": section}), RunFacts(optimizer="SGD"))
    with assert_raises(ConfigError, got=r"torch.optim.AdamW\(model.parameters"):
        _ = resolve(read_deepspeed({"optimizer": section}), RunFacts())


def test_a_step_is_compared_with_what_the_file_says() -> None:
    resolved = resolve(read_deepspeed({"gradient_clipping": 1, "gradient_accumulation_steps": 2}), RunFacts())
    resolved.check_step(max_norm=1.0, accumulation=2)
    with assert_raises(ConfigError, got="(?s)max_norm=None here.*the state has 4"):
        resolved.check_step(max_norm=None, accumulation=4)
    resolve(DeepSpeed(), RunFacts()).check_step(max_norm=3.0, accumulation=7)  # which say nothing


def test_files_and_sections_name_themselves_in_errors(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    _ = path.write_text('{"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8}, "gradient_clipping": 2}')
    read = read_deepspeed(path)
    assert (read.stage, read.reduce_bucket, read.source) == (3, 500_000_000, str(path))
    assert resolve(read, RunFacts()).rows["gradient_clipping",].source == str(path)
    with assert_raises(ConfigError, where=r"ds\.json"):
        _ = resolve(read, RunFacts(max_norm=1.0))
    _ = path.write_text('{"zero_optimization": {"stage": 5}}')
    with assert_raises(ConfigError, got=r"invalid enum value 5.*`\$.stage`", where=r"ds\.json"):
        _ = read_deepspeed(path)
    _ = path.write_text("{")
    with assert_raises(ConfigError, problem="malformed JSON"):
        _ = read_deepspeed(path)
    with assert_raises(ConfigError, problem="cannot be read"):
        _ = read_deepspeed(tmp_path / "none.json")
    section = from_section({"stage": 3, "offload_optimizer": {"device": "cpu"}}, source="accel.toml")
    assert section == DeepSpeed(stage=3, offload_optimizer=Offload("cpu"), source="accel.toml")
    with assert_raises(ConfigError, got="'stages'", where="accel.toml", fix="Keys of .* Did you mean `stage`?"):
        _ = from_section({"stages": 3}, source="accel.toml")


def test_a_field_and_a_setting_do_not_say_one_thing_twice() -> None:
    with assert_raises(ConfigError, fix="Write it as stage= only"):
        _ = resolve(DeepSpeed(settings={"zero_optimization": {"stage": 2}}), RunFacts())
    with assert_raises(ConfigError, problem="options are not valid"):
        _ = DeepSpeed(stage=4)  # pyright: ignore[reportArgumentType]


def test_facts_are_read_from_what_prepare_gets() -> None:
    ctx = accel.single("cpu", precision="bf16", accumulation=4)
    model = torch.nn.Linear(2, 2)
    model.config = {"text_config": {"hidden_size": 12}}  # pyright: ignore[reportArgumentType]
    data = torch.utils.data.TensorDataset(torch.zeros(10, 2))
    loader = accel.prepare_loader(ctx, torch.utils.data.DataLoader(data, batch_size=5))
    facts = read_facts(ctx, [model, torch.optim.AdamW(model.parameters(), lr=0.5), None, loader])
    assert (facts.rows, facts.accumulation, facts.hidden_size, facts.optimizer) == (5, 4, 12, "AdamW")
    assert facts.optimizer_values["lr"] == 0.5
    settled = resolve(DeepSpeed(), facts).settings
    assert settled["train_batch_size"] == 20
    assert settled["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 144}


def test_a_configuration_is_settled_without_torch_and_without_deepspeed() -> None:
    script = (
        "import sys\nfrom accel.engines.deepspeed import DeepSpeed, RunFacts, resolve\n"
        "resolve(DeepSpeed(), RunFacts()); assert not {'torch', 'deepspeed'} & sys.modules.keys()"
    )
    _ = subprocess.run([sys.executable, "-c", script], check=True)
