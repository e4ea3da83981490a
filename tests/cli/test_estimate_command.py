# SPDX-License-Identifier: Apache-2.0
"""`accel estimate`: what SOURCE may be, what the table and its JSON say, and words that it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from estimates import PARTS
from processes import patience
from torch import nn

import accel
from accel.cli import main
from accel.storage import write_tensors

NETS = """
from torch import nn

def net():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

def values():
    return nn.Linear(int(nn.Linear(1, 1).weight.item()), 2)

number = 3
def none():
    return number
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "estimated_nets", raising=False)
    (tmp_path / "estimated_nets.py").write_text(NETS)
    return tmp_path


def test_weights_of_a_folder_are_told_from_their_headers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 10))
    accel.save_model(accel.single(), model, folder / "whole")
    accel.save_model(accel.single(), model, folder / "sharded", max_shard_size="1MB")
    answers = []
    for source in ("whole", "whole/model.safetensors", "sharded", "sharded/model.safetensors.index.json"):
        assert main(["estimate", source, "--nproc", "4"]) == 0
        answers.append(capsys.readouterr().out.splitlines())
        assert "1.01 million parameters in 4 tensors" in answers[-1][1]
    assert all(answer[1:] == answers[0][1:] for answer in answers)
    fsdp = next(line for line in answers[0] if line.startswith("fp32       fsdp "))
    assert fsdp.split()[2:7] == ["1.0", "MB", "1.0", "MB", "2.0"]
    assert "Activations are not known" in answers[0][-1]


def test_headers_need_no_torch(folder: Path) -> None:
    write_tensors(folder, "model.safetensors", {"w": torch.zeros(3, 3)})
    words = "['estimate', 'model.safetensors']"
    code = f"import sys; from accel.cli import main; main({words}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patience(60), stdout=subprocess.DEVNULL)


def test_a_function_tells_activations_and_programs_can_read_the_answer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", "estimated_nets:net", "--input", "32x8", "--json", "--precision", "fp32"]) == 0
    told = msgspec.json.decode(capsys.readouterr().out)
    assert told["parameters"] == 8 * 16 + 16 + 16 * 4 + 4
    (row,) = told["rows"]
    assert row["memory"]["activations"] == 4 * (32 * 8 + 32 * 16)  # the input, and what ReLU gives
    assert row["total"] == sum(row["memory"][part] for part in PARTS)
    assert all(row["memory"][part] <= row["largest"][part] for part in PARTS)


def test_what_fits_is_told_and_the_status_says_whether_anything_does(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", "estimated_nets:net", "--memory", "4GB"]) == 0
    assert "  yes" in capsys.readouterr().out
    assert main(["estimate", "estimated_nets:net", "--memory", "10KB", "--reserve", "6KB", "--precision", "fp32"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("fp32")).endswith("  no")
    assert any("from 2 ranks" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nosuch"], "there is no such source"),
        (["nosuch:net"], "there is no such function"),
        (["estimated_nets:nett"], "there is no such function"),
        (["estimated_nets:none"], "the object is not a model: expected an nn.Module, got int"),
        (["estimated_nets:values"], "cannot be built and run without values"),
        (["estimated_nets:net", "--input", "3x9"], "cannot be built and run without values"),
        (["estimated_nets:net", "--input", "3*9"], "the shape is not valid"),
        (["estimated_nets:net", "--input", "3x9:float31"], "Did you mean `float32`?"),
        (["estimated_nets:net", "--strategy", "fsdp2"], "Did you mean `fsdp`?"),
        (["estimated_nets:net", "--precision", "bf32"], "unknown precision"),
        (["estimated_nets:net", "--nproc", "0"], "the number of ranks is not valid"),
        (["estimated_nets:net", "--memory", "lots"], "the size is not valid"),
        (["estimated_nets:net", "--memory", "1GB", "--reserve", "2GB"], "the reserve takes all of the memory"),
        (["empty"], "no weights in the folder"),
        (["broken.safetensors"], "does not fit the file"),
        (["broken.safetensors", "--input", "3"], "headers lack the activations"),
        (["config.json"], "the file is not a configuration of a model"),
        (["broken.json"], "the file cannot be read"),
    ],
)
def test_bad_words_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "empty").mkdir()
    (folder / "broken.safetensors").write_bytes(b"\x00" * 7)
    (folder / "broken.json").write_text("{")
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr("accel.estimate._build.find_spec", lambda _: True)
    monkeypatch.setitem(sys.modules, "transformers", sys)
    assert main(["estimate", *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_a_config_without_transformers_names_the_extra(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr("accel.estimate._build.find_spec", lambda _: None)
    assert main(["estimate", "config.json"]) == 2
    assert "pip install accel-torch[transformers]" in capsys.readouterr().err


CONFIGS = {
    "LlamaForCausalLM": """{"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "torch_dtype": "bfloat16"}""",
    "GPT2LMHeadModel": """{"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100}""",
    "BertModel": """{"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64, "vocab_size": 100}""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_the_model_of_transformers(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    transformers = pytest.importorskip("transformers")
    fields = msgspec.json.decode(CONFIGS[name])
    (folder / "config.json").write_bytes(msgspec.json.encode(fields | {"architectures": [name]}))
    model = getattr(transformers, name)(transformers.AutoConfig.for_model(**fields))
    count = sum(parameter.numel() for parameter in model.parameters())
    for words in ([], ["--input", "2x16"]):
        assert main(["estimate", ".", "--json", *words]) == 0
        told = msgspec.json.decode(capsys.readouterr().out)
        assert told["parameters"] == count
        assert told["rows"][0]["memory"]["parameters"] >= 4 * count  # fp32, whatever is stored
    assert all(row["largest"]["activations"] > 0 for row in told["rows"])
