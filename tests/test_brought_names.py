# SPDX-License-Identifier: Apache-2.0
"""Flags, precisions and names that people bring from elsewhere are answered with the one to use."""

from __future__ import annotations

import re
from typing import get_args

import pytest
import torch

import accel
import accel.items
import accel.training
from accel import ConfigError, EnvError
from accel.cli import main
from accel.cli._launch import parser
from accel.cli._other_flags import _OTHERS
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


@pytest.mark.parametrize("word", SAME)
def test_a_flag_of_another_launcher_is_answered_by_ours(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", word, "train.py"]) == 2
    said = capsys.readouterr().err
    assert f"Use `{SAME[word]}`." in said
    assert "Choose one of" not in said


def test_each_answer_is_a_flag_of_the_launcher() -> None:
    assert {each.flag for each in _OTHERS.values() if each.flag} <= {*parser().flags()}


BROUGHT = {
    "no": "fp32",
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


def test_no_name_of_ours_is_taken_for_another() -> None:
    assert not any(map(precision_fix, get_args(PrecisionName)))


@pytest.mark.parametrize("name", accel._OTHERS)
def test_a_name_of_another_library_is_answered_by_ours(name: str) -> None:
    for function in re.findall(r"accel\.(\w+)", accel._OTHERS[name]):
        assert function in accel.__all__, function
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


def test_a_name_that_moved_to_another_room_is_answered_by_that_room() -> None:
    with pytest.raises(ImportError, match=r"It is imported from accel\.items"):
        exec("from accel.training import save_state")
    moved = set(accel.items.__dict__) - {"foreign"}
    assert {name for name in accel.training._MOVED if name not in moved} == set()
