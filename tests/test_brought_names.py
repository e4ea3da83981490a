# SPDX-License-Identifier: Apache-2.0
"""Flags, precisions and names that people bring from elsewhere are answered with the one to use."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from catching import assert_raises
from launches import parser
from tables import rows

import accel
from accel.brought import _FIXES
from accel.cli import main
from accel.cli._parser import _OTHERS
from accel.errors import ConfigError, EnvError
from accel.formats import PrecisionName, precision, precision_fix

SAME = {
    "--num_processes": "--nproc-per-node",
    "--num_processes=4": "--nproc-per-node 4",
    "--num-processes=4": "--nproc-per-node 4",
    "--nproc_per_node=2": "--nproc-per-node 2",
    "-n": "--nproc-per-node",
    "-n4": "--nproc-per-node 4",
    "-np": "--nproc-per-node",
    "--multi_gpu": "--nproc-per-node auto",
    "--fp16": "--precision fp16",
    "--bf16": "--precision bf16",
    "--mixed_precision": "--precision",
    "--mixed_precision=no": "--precision fp32",
    "--mixed_precision=bf16": "--precision bf16",
    "--main_process_port": "--rdzv-endpoint HOST:PORT",
    "--main_process_port=29501": "--rdzv-endpoint HOST:PORT",
    "--use_fsdp": "--strategy fsdp",
    "--fsdp_sharding_strategy=1": "--strategy fsdp",
    "--num_machines=2": "--nnodes 2",
    "--machine_rank=1": "--node-rank 1",
    "--gpu_ids=0,1": "--gpu-ids 0,1",
    "--max_restarts=3": "--max-restarts 3",
    "--config_file=a.yaml": "--config a.yaml",
}


@rows("word", SAME)
def test_a_flag_of_another_launcher_is_answered_by_ours(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", word, "train.py"]) == 2
    said = capsys.readouterr().err
    assert f"Use `{SAME[word]}`." in said
    assert "Choose one of" not in said


def test_each_answer_is_a_flag_of_the_launcher() -> None:
    assert {each.flag for each in _OTHERS.values() if each.flag} <= {*parser().flags()}


BROUGHT = {
    "none": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "16-mixed": "fp16",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}


@pytest.mark.parametrize("name", BROUGHT)
def test_a_precision_by_another_name_is_answered_by_ours(name: object, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = f'Use "{BROUGHT[name]}".'
    with pytest.raises(ConfigError) as caught:
        accel.single("cpu", precision=name)  # type: ignore[arg-type]
    assert caught.value.fix == wanted
    if isinstance(name, str):
        with pytest.raises(EnvError) as in_environment:
            accel.read_env({"ACCEL_PRECISION": name})
        assert in_environment.value.fix == wanted
        assert main(["launch", f"--precision={name}", "train.py"]) == 2
        assert wanted in capsys.readouterr().err
    assert precision(BROUGHT[name]).name == BROUGHT[name]


def test_the_precision_no_is_fp32_shown_and_kept_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = accel.single(precision="fp32")
    for ctx in (accel.single(precision="no"), accel.replace(accel.single(precision="bf16"), precision="no")):
        assert ctx == plain
        assert ctx.precision.name == "fp32"
    assert accel.from_env({"ACCEL_PRECISION": "no", "ACCEL_DEVICE": "cpu"}) == plain
    assert accel.read_env({"ACCEL_PRECISION": "no"}).precision == "fp32"
    script = tmp_path / "train.py"
    script.touch()
    for name, text in {"a.toml": 'precision = "no"\n', "a.json": '{"precision": "no"}'}.items():
        _ = (tmp_path / name).write_text(text)
        assert main(["launch", "--dry-run", "--config", str(tmp_path / name), str(script)]) == 0
        assert "ACCEL_PRECISION=fp32" in capsys.readouterr().out
    assert main(["launch", "--dry-run", "--precision", "no", str(script)]) == 0
    assert "ACCEL_PRECISION=fp32" in capsys.readouterr().out


def test_a_precision_of_none_is_as_launched() -> None:
    environ = {"ACCEL_PRECISION": "bf16", "ACCEL_DEVICE": "cpu"}
    assert accel.from_env(environ, precision=None).precision.name == "bf16"
    assert accel.from_env(environ, precision="no").precision.name == "fp32"


KEYWORDS: dict[str, tuple[str, Any]] = {
    "mixed_precision": ("Use precision=", lambda: accel.from_env({}, mixed_precision="bf16")),
    "gradient_accumulation_steps": ("Use accumulation=", lambda: accel.single(gradient_accumulation_steps=2)),
    "cpu": ('Use device="cpu"', lambda: accel.session({}, cpu=True).__enter__()),
    "mesg": ("Did you mean `mesh`", lambda: accel.from_env({}, mesg="dp=2")),
    "safe_serialization": (
        "files of weights are safetensors",
        lambda: accel.save_model(accel.single(), torch.nn.Linear(1, 1), "out", safe_serialization=True),
    ),
    "device_placement": ("out of accel.prepare", lambda: accel.prepare(accel.single(), device_placement=[True])),
    "acumulation": ("Did you mean `accumulation`", lambda: accel.train_state(accel.single(), acumulation=2)),
    "num_nodes": ("accel launch --nnodes", lambda: accel.notebook_launcher(print, num_nodes=2)),
    "num_processes": ("Use nproc=", lambda: accel.debug_launcher(print, num_processes=2)),
}


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_keyword_of_another_library_is_answered_by_ours(keyword: str) -> None:
    fix, call = KEYWORDS[keyword]
    with pytest.raises(TypeError, match=f"unexpected keyword argument {keyword!r}.*{fix}"):
        call()


def test_other_errors_of_a_call_stay_as_they_are() -> None:
    ctx = accel.single()
    with assert_raises(
        TypeError, got="missing 1 required positional argument: 'tree'", fix=r"accel.gather\(ctx, tree\)$"
    ):
        accel.gather(ctx)  # type: ignore[call-arg]

    def function(count: int, **options: int) -> None:
        raise TypeError("of the user's own")

    with pytest.raises(TypeError, match=r"of the user's own$"):
        accel.find_executable_batch_size(ctx, function, 8)


def assert_names(text: str) -> None:
    """Raise where a text names what is no public name, in its place."""
    for path in re.findall(r"accel\.([A-Za-z]\w*(?:\.[A-Za-z]\w*)*)", text):
        module, _, name = f"accel.{path}".rpartition(".")
        assert path in accel._MODULES or name in importlib.import_module(module).__all__, path


def test_each_answer_to_a_keyword_names_functions_that_are_there() -> None:
    for fix in _FIXES.values():
        assert_names(fix)


def test_no_name_of_ours_is_taken_for_another() -> None:
    assert not any(map(precision_fix, get_args(PrecisionName)))


@rows("name", accel._OTHERS)
def test_a_name_of_another_library_is_answered_by_ours(name: str) -> None:
    assert_names(accel._OTHERS[name])
    with pytest.raises(AttributeError, match=rf"{name}'\. Use"):
        getattr(accel, name)
    assert not hasattr(accel, name)
    with pytest.raises(ImportError, match=rf"{name}' from 'accel'\. Use"):
        exec(f"from accel import {name}", {})
    assert name not in accel.__all__


def test_a_misspelt_name_is_answered_by_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"'prepare_lodaer'\. Did you mean `prepare_loader`\?$"):
        _ = accel.prepare_lodaer  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match=r"Did you mean `gather`\?$"):
        exec("from accel import gathr", {})
    assert not hasattr(accel, "__gather__")


def test_an_unknown_name_stays_unknown() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        _ = accel.nonsense  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        exec("from accel import nonsense", {})
