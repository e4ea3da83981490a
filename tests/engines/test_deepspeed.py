# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed trains as ddp does at every stage, and they load each other's checkpoints, also those of killed runs."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from catching import assert_raises
from processes import patience, same_path
from safetensors.torch import load_file
from torch import nn

import accel
from accel.comm import replaced
from accel.engines.deepspeed import _package
from accel.engines.deepspeed._package import PRIVATE
from accel.engines.deepspeed._whole import _value
from accel.testing import simulate

HELPER = Path(__file__).parent.parent / "helpers" / "deepspeed_runs.py"
CLOSE = 1e-6  # of fp32, relative to the largest weight


def launch(processes: int, part: str, out: Path, status: int) -> dict[str, Any]:
    """Run a part, and return what it found."""
    command = [sys.executable, "-m", "accel.cli", "launch", "--device", "cpu", "--nproc-per-node", str(processes)]
    ended = subprocess.run(
        [*command, str(HELPER), part, str(out)],
        env=same_path(),
        capture_output=True,
        text=True,
        timeout=patience(180),
        check=False,
    )
    lines = [line for line in ended.stdout.splitlines() if "found:" in line]
    assert ended.returncode == status, ended.stdout[-3000:] + ended.stderr[-3000:]
    return json.loads(lines[0].partition("found:")[2])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Findings of two processes that are killed at the end, and the folder of their checkpoints."""
    pytest.importorskip("deepspeed")
    out = tmp_path_factory.mktemp("deepspeed")
    return launch(2, "killed", out, status=9), out


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.multiprocess
class TestRun:
    """One launch, of which each test looks at a part."""

    @pytest.mark.kept("slow")
    def test_every_stage_trains_as_ddp_over_ragged_windows(self, run: Any) -> None:
        for kind in ("zero1", "zero2", "zero3", "zero2-offload", "zero3-offload"):
            assert run[0][kind]["weights"] < CLOSE
            assert run[0][kind]["norms"] < CLOSE
            assert run[0][kind]["rate"] == 0

    def test_checkpoints_are_loaded_at_every_stage_and_by_ddp(self, run: Any) -> None:
        distances = {name: value for name, value in run[0].items() if " to " in name}
        assert len(distances) == 16
        assert max(distances.values()) < CLOSE

    def test_saved_models_are_whole(self, run: Any) -> None:
        models = [load_file(run[1] / f"zero{stage}-model" / "model.safetensors") for stage in (1, 2, 3)]
        assert models[0].keys() == models[1].keys() == models[2].keys()
        for name, tensor in models[0].items():
            for other in models[1:]:
                torch.testing.assert_close(tensor, other[name])

    def test_frozen_models_and_models_built_in_shards_compute_what_plain_ones_do(self, run: Any) -> None:
        found = run[0]
        assert found["teacher"] < CLOSE
        assert found["built"] < CLOSE
        assert found["held"] == 0
        assert found["whole"] == [8, 4]

    def test_an_average_of_weights_that_are_empty_between_passes_is_refused(self, run: Any) -> None:
        assert "stage below 3" in run[0]["averaged"]

    def test_a_layer_that_a_window_leaves_out_keeps_its_weights_and_no_gradient(self, run: Any) -> None:
        for kind in ("zero1", "zero2", "zero3", "zero2-offload", "zero3-offload"):
            assert run[0][f"left out of {kind}"] == {"untouched": True, "alike": True}, kind

    def test_micro_batches_of_a_json_are_those_of_the_loop_or_refused(self, run: Any) -> None:
        found = run[0]["micro-batches"]
        assert found["2"] < CLOSE
        assert found["4"].startswith("optimizer_step")
        assert "gradient_accumulation_steps: 4" in found["4"]
        assert "gradient_accumulation_steps: 4" in found["4 in a context of 2"]

    @pytest.mark.nightly
    def test_killed_runs_go_on_with_the_same_bits_and_on_one_process(self, run: Any) -> None:
        with ThreadPoolExecutor() as pool:
            pair, alone = pool.map(lambda processes: launch(processes, "resumed", run[1], status=0), (2, 1))
        for kind in ("ddp", "zero1", "zero2", "zero3", "zero2-offload"):
            assert pair[kind]["same bits"], kind
            assert alone[kind]["weights"] < CLOSE, kind
        assert pair["without"] == alone["without"] == "LOCAL_RANK"

    def test_bf16_stays_near_and_gradients_that_are_not_finite_change_nothing(self, run: Any) -> None:
        found = run[0]
        assert found["bf16"] < 0.05
        assert found["refused"] == "NonFiniteError"
        assert found["kept"] == 0
        assert found["after"] < CLOSE  # behind a window that was given up
        assert found["leftover"] == "StepError"


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_is_used_beside_documented_calls_is_there() -> None:
    pytest.importorskip("deepspeed")
    for path, names in PRIVATE.items():
        module, _, name = path.rpartition(".")
        source = Path(str(importlib.import_module(module).__file__)).read_text()
        assert f"class {name}" in source
        assert not [each for each in names if each not in source]


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.multiprocess
def test_the_trainable_part_alone_goes_on_at_every_stage(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    distances = launch(2, "trainable", tmp_path, status=0)
    assert len(distances) == 7
    assert max(distances.values()) < CLOSE, distances


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.multiprocess
def test_whole_weights_are_the_live_ones_however_deepspeed_arranges_them(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    found = launch(2, "arranged", tmp_path, status=0)
    assert len(found) > 40
    assert {name: each for name, each in found.items() if each["whole"] != 0 or each["ddp"] > CLOSE} == {}


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.multiprocess
def test_optimizers_of_several_groups_are_saved_and_go_on_at_every_stage(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    found = launch(2, "grouped", tmp_path, status=0)
    assert len(found) == 25
    assert {name: each for name, each in found.items() if each > CLOSE} == {}


def test_what_deepspeed_alone_finds_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def initialize(**arguments: Any) -> Any:
        raise arguments["model"]

    monkeypatch.setattr(_package, "connected", lambda: SimpleNamespace(initialize=initialize))
    with assert_raises(accel.errors.PrepareError, problem="DeepSpeed refuses ", got="ValueError: no such stage"):
        _ = _package.initialized(ValueError("no such stage"))
    with assert_raises(accel.errors.ConfigError, expected="LOCAL_RANK"):
        _ = _package.initialized(AssertionError("LOCAL_RANK is not set"))
    with pytest.raises(torch.OutOfMemoryError):
        _ = _package.initialized(torch.OutOfMemoryError("CUDA out of memory"))


@pytest.mark.engine
@pytest.mark.slow
def test_an_applied_average_is_what_is_saved_and_not_deepspeeds_copy() -> None:
    pytest.importorskip("deepspeed")
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    engine = SimpleNamespace(optimizer=SimpleNamespace(loss_scale=1.0))
    with replaced([weight], "applied_to", "ema.applied_to(model)"):
        assert torch.equal(_value(engine, weight), weight)
    with pytest.raises(AttributeError):  # as there is no copy of DeepSpeed's to read
        _ = _value(engine, weight)


def test_one_process_gets_the_group_that_deepspeed_communicates_by() -> None:
    with accel.session({}, device="cpu", strategy="deepspeed") as ctx:
        assert ctx.world_size == 1
        assert torch.distributed.is_initialized()
    assert not torch.distributed.is_initialized()


def _prepared(ctx: accel.DistContext, *objects: Any, **settings: Any) -> Any:
    return accel.prepare(accel.replace(ctx, **{"strategy": "deepspeed", **settings}), *objects)


def test_what_deepspeed_cannot_is_refused_before_it_is_needed() -> None:
    def refused(ctx: accel.DistContext) -> None:
        net = nn.Linear(2, 2)
        adam = torch.optim.AdamW(net.parameters())
        with assert_raises(accel.errors.ConfigError, problem="data-parallel ranks only"):
            _prepared(ctx, net, adam, mesh="tp=2")
        with assert_raises(accel.errors.PrepareError, problem="a model together with its optimizer"):
            _prepared(ctx, adam)
        with assert_raises(accel.errors.ConfigError, problem="stage 0 shards nothing", fix="strategy='ddp'"):
            _prepared(ctx, net, adam, deepspeed=accel.engines.deepspeed.DeepSpeed(stage=0))
        with assert_raises(accel.errors.ConfigError, problem="no fp16 on a CPU"):
            _prepared(ctx, net, adam, precision="fp16")
        net.scale = nn.Parameter(torch.tensor(1.0))
        with assert_raises(
            accel.errors.PrepareError, problem="without a dimension", got=r"scale of shape \[\]", fix=r"shape \[1\]"
        ):
            _prepared(ctx, net, torch.optim.AdamW(net.parameters()))
        frozen = nn.Linear(2, 2).requires_grad_(False)
        with assert_raises(accel.errors.PrepareError, problem="no parameter that trains", fix="without an optimizer"):
            _prepared(ctx, frozen, torch.optim.AdamW(frozen.parameters()))
        empty = accel.init_empty_weights(lambda: nn.Linear(2, 2))
        with assert_raises(accel.errors.PrepareError, fix=r"build_sharded\(ctx, make\)"):
            _prepared(ctx, empty, torch.optim.AdamW(empty.parameters()))

    _ = simulate(refused, 2, default_group=True)
