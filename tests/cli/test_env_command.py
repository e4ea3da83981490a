# SPDX-License-Identifier: Apache-2.0
"""`accel env`: what a bug report needs is there, whatever is broken, and what is secret is not."""

from __future__ import annotations

import string
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, strategies as st

from accel.cli import _setup, main

SECRET = "Zq7Vx9Lw3Kj"
prefixes = st.sampled_from(
    ["ACCEL_", "NCCL_", "TORCH_", "SLURM_", "CUDA_", "OMPI_COMM_WORLD_", "HF_", "WANDB_", "AWS_", ""]
)
words = st.text(string.ascii_uppercase + "_", max_size=6)
telling = st.sampled_from(["KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS", "AUTH"])
leaks = st.sampled_from(
    [
        "https://user:{}@host/path",
        "s3://{}@bucket",
        "tcp://10.0.0.1:29500?token={}",
        "a=1;api_key={}",
        "--password={} --verbose",
        "hf_{}",
        "ghp_{}",
        "x sk-{} y",
    ]
)


@given(prefixes, words, telling, words)
def test_variables_with_telling_names_are_hidden(prefix: str, before: str, name: str, after: str) -> None:
    shown = _setup.shown_variables({f"{prefix}{before}{name}{after}": SECRET})
    assert SECRET not in str(shown)


@given(prefixes, words, leaks)
def test_credentials_in_values_are_hidden(prefix: str, name: str, leak: str) -> None:
    shown = _setup.shown_variables({f"{prefix}{name}X": leak.format(SECRET)})
    assert SECRET not in str(shown)


def test_variables_of_launchers_are_shown_and_of_others_not() -> None:
    launcher = {"RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0", "ACCEL_PRECISION": "bf16"}
    cluster = {"SLURM_JOB_NODELIST": "n[1-2]", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0,1", "PMI_RANK": "0"}
    private = {"USER": "ada", "PWD": "/home/ada", "SLURM_JOB_USER": "ada", "SLURM_JOB_ACCOUNT": "lab", "MY_RANK": "3"}
    assert _setup.shown_variables(launcher | cluster | private) == launcher | cluster


def test_the_report_is_whole_and_readable_by_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ACCEL_PRECISION", "bf16")
    Path("accel.toml").write_text(f'nproc_per_node = 2\nlog_dir = "s3://me:{SECRET}@logs"\n')
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert "nproc_per_node       2 (file accel.toml)" in text
    assert "precision            bf16 (environment ACCEL_PRECISION)" in text
    assert SECRET not in text
    assert main(["env", "--json"]) == 0
    told = msgspec.json.decode(capsys.readouterr().out, type=dict[str, dict[str, object]])
    assert list(told) == ["versions", "machine", "torch", "configuration", "environment"]
    assert {"python", "accel-torch", "torch", "safetensors", "msgspec"} <= told["versions"].keys()
    assert "gloo" in str(told["torch"]["backends"])


def test_what_is_broken_is_reported_instead_of_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)
    Path("broken.toml").write_text("nproc_per_node = ")
    assert main(["env", "--config", "broken.toml"]) == 0
    text = capsys.readouterr().out
    assert "ModuleNotFoundError: import of torch halted" in text
    assert "line 1" in text[text.index("configuration") :]


def test_home_is_not_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("PYTHONPATH", "/home/ada/src")
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert "/home/ada" not in text
    assert "PYTHONPATH" in text
    assert "~/src" in text
