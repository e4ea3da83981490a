# SPDX-License-Identifier: Apache-2.0
"""`accel estimate --mesh`: kinds of memory and messages by axis, for people and for programs; refused words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from processes import patience

from accel.cli import main
from accel.estimate import EstimatedStep, rank_memory, read_transformer, step_traffic
from accel.topology import Axes, Plan

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 512, "vocab_size": 1000,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("_plan", "_estimate_tables"):  # a record takes long
        monkeypatch.setattr(f"accel.cli.{name}.with_recorded_calls", lambda model, _: model)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_a_step_and_a_plan_leave_equal_memory_of_a_gpu(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", ".", "--mesh", "dp=2", "--memory", "80GB"]) == 0
    step = capsys.readouterr().out
    assert main(["plan", ".", "--ranks", "2", "--memory", "80GB"]) == 0
    plan = capsys.readouterr().out
    assert "within 77.0 GB" in step
    assert "on 2 ranks of 77.0 GB" in plan
    assert step.splitlines()[0] == plan.splitlines()[0] == ".: 2.87 million parameters, 4 blocks"


def test_programs_read_what_the_formulas_give(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--mesh dp_replicate=2,dp_shard=4,cp=2,tp=4 --input 2x512 --context ring --sequence --recompute"
    assert main(["estimate", "config.json", *flags.split(), "--micro-batches", "3", "--json"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out)
    model = read_transformer(folder)
    axes = Axes(dp_replicate=2, dp_shard=4, cp=2, tp=4)
    step = EstimatedStep(tokens=512, rows=2, micro_batches=3, recompute=True)
    plan = Plan(context="ring", sequence=True)
    assert (found["mesh"], found["ranks"], found["parameters"]) == (str(axes), 64, model.count)
    assert found["memory"] == msgspec.to_builtins(rank_memory(model, axes, step, plan))
    assert found["total"] == rank_memory(model, axes, step, plan).total
    assert found["traffic"] == list(msgspec.to_builtins(step_traffic(model, axes, step, plan)))
    assert found["fits"] is None


def test_the_text_has_each_kind_and_axis_and_is_as_wide_as_a_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", ".", "--mesh", "pp=2,dp=-1,tp=2", "--nproc", "16", "--memory", "4GB"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    for kind in ("parameters", "gradients", "optimizer", "activations", "gathered", "buffers", "total"):
        assert any(line.startswith(f"{kind} ") for line in lines)
    assert "within 1.0 GB" in text
    assert {line.split()[0] for line in lines[lines.index("") + 1 :] if "all-" in line} == {"dp", "tp"}
    assert any(line.split()[:3] == ["pp", "2", "send"] for line in lines)
    assert all(len(line) <= 80 for line in lines)
    assert main(["estimate", ".", "--mesh", "dp=2", "--memory", "3.01GB", "--input", "4x4096"]) == 1
    assert "more than 10.0 MB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--mesh", "dp=3,tp=3"], "heads cannot be divided along tp: expected tp that divides 8, got tp=3"),
        (["--mesh", "pp=8"], "a stage would have no layer"),
        (["--mesh", "dp=2,ep=2"], "the model has no experts"),
        (["--mesh", "dp=2", "--nproc", "3"], "the mesh does not fit the ranks"),
        (["--mesh", "dq=2"], "unknown axis of a mesh"),
        (["--mesh", "dp"], "the mesh is not valid"),
        (["--mesh", "dp=2", "--input", "512"], "the input does not fit a step on a mesh"),
        (["--mesh", "dp=2", "--input", "1x512", "--input", "1x512"], "the input does not fit a step on a mesh"),
        (["--mesh", "cp=4", "--input", "1x500"], "the tokens of a sequence cannot be divided along cp"),
        (["--mesh", "cp=2", "--context", "rings"], "Did you mean `ring`?"),
        (["--mesh", "dp=2", "--strategy", "ddp-zero"], "the strategy does not fit a mesh"),
        (["--mesh", "dp=2", "--precision", "bf16", "--precision", "fp32"], "one answer for a mesh"),
        (["--mesh", "dp=2", "--micro-batches", "0"], "the number is not valid"),
        (["--recompute"], "have no effect without one"),
        (["--context", "ring"], "have no effect without one"),
    ],
)
def test_bad_words_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    assert main(["estimate", "config.json", *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_other_sources_have_no_sizes(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    Path("model.safetensors").touch()
    without = "a mesh needs the sizes of a model"
    sources = {"nets:net": without, "model.safetensors": without, "gone.safetensors": without}
    for source, told in (sources | {"nosuch": "there is no such source, nor such a model in the cache"}).items():
        assert main(["estimate", source, "--mesh", "dp=2"]) == 2
        assert told in capsys.readouterr().err, source


def test_no_torch_is_needed(folder: Path) -> None:
    words = "['estimate', '.', '--mesh', 'dp=4,tp=2']"
    code = f"import sys; from accel.cli import main; main({words}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patience(60), stdout=subprocess.DEVNULL)


SAVING = ["--logits", "deferred", "--offload", "optimizer", "--offload-activations", "--chunks", "4"]


def test_flags_of_what_saves_memory_are_those_of_plan_and_step(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", ".", "--mesh", "dp=2", *SAVING, "--json"]) == 0
    step = EstimatedStep(offload=True, chunks=4)
    plan = Plan(logits="deferred", offload="optimizer")
    expected = rank_memory(read_transformer(folder / "config.json"), Axes(dp=2), step, plan)
    found = json.loads(capsys.readouterr().out)
    assert found["memory"] == msgspec.to_builtins(expected)
    assert main(["estimate", ".", "--mesh", "dp=2", *SAVING]) == 0
    assert "In the host's memory then: " in capsys.readouterr().out
    assert main(["plan", ".", "--ranks", "2", "--memory", "80GB", *SAVING]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert 'accel.parallel.Plan(logits="deferred", offload="optimizer")' in shown
    assert "accel.offload_activations(model)" in shown
    assert "accel.chunk_sequence(model, Mlp, parts=4)" in shown


@pytest.mark.parametrize("words", [["--logits", "none"], ["--offload", "shards"], ["--chunks", "0"]])
def test_flags_of_what_saves_memory_refuse_other_words(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(["estimate", ".", "--mesh", "dp=2", *words]) == 2
    assert main(["plan", ".", "--ranks", "2", "--memory", "80GB", *words]) == 2
