# SPDX-License-Identifier: Apache-2.0
"""Sources of an estimate by name: files of torch.save, models in the Hub's local cache, models of timm."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from hypothesis.strategies import DataObject
from model_configs import transformer_of
from profiles import share
from safetensors.torch import save
from torch import nn

from accel.cli._estimate import run
from accel.errors import AccelError, CheckpointError, ConfigError, MissingExtraError
from accel.estimate import _build, find_source, read_source
from accel.estimate._sources import cached_model
from accel.storage import parse_size


def _estimate(capsys: pytest.CaptureFixture[str], *words: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
    assert run([*words, "--json"], environ or {}) == 0
    return json.loads(capsys.readouterr().out)


def _read(path: Path) -> Any:
    return read_source(find_source(str(path), by_config=False))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The Hub's cache with one model, whose weights are in two files of torch.save."""
    folder = tmp_path / "hub" / "models--org--tiny"
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    whole = torch.arange(12.0)
    torch.save({"a": whole[:8].view(4, 2), "b": torch.ones(3, dtype=torch.bfloat16)}, snapshot / names[0])
    torch.save({"c": torch.ones(5, dtype=torch.int64)}, snapshot / names[1])
    index = {"metadata": {}, "weight_map": {"a": names[0], "b": names[0], "c": names[1]}}
    (snapshot / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return tmp_path / "hub"


def test_files_of_torch_save_are_read_by_their_shapes(cache: Path, tmp_path: Path) -> None:
    model = _read(cached_model("org/tiny", {"HF_HUB_CACHE": str(cache)}))
    assert {each.name: (each.shape, each.item_bytes, each.trained) for each in model.parameters} == {
        "a": ((4, 2), 4, True),
        "b": ((3,), 4, True),
        "c": ((5,), 8, False),
    }
    torch.save(nn.Linear(2, 3).state_dict(), tmp_path / "pytorch_model.bin")
    assert _read(tmp_path).count == _read(tmp_path / "pytorch_model.bin").count == 9


class _Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("harm", "w"))


@pytest.mark.parametrize("content", [{"a": _Harmful()}, {"a": 1}, [torch.ones(1)], None])
def test_files_with_other_things_than_tensors_are_refused_and_run_nothing(
    content: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"nothing") if content is None else torch.save(content, path, pickle_module=pickle)
    with assert_raises(CheckpointError, where=r"pytorch_model\.bin"):
        _read(path)
    assert not Path("harm").exists()


def test_a_model_of_the_local_cache_is_found_by_name(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for environ in ({"HF_HUB_CACHE": str(cache)}, {"HF_HOME": str(cache.parent)}):
        assert _estimate(capsys, "org/tiny", environ=environ)["parameters"] == 16
    assert _estimate(capsys, "org/tiny@abc", environ={"HF_HOME": str(cache.parent)})["parameters"] == 16
    with assert_raises(ConfigError, problem="nor such a model", fix="Did you mean `org/tiny`"):
        run(["org/tinny"], {"HF_HUB_CACHE": str(cache)})
    with assert_raises(ConfigError, fix=r"hf download else/where config\.json"):
        run(["else/where"], {"HOME": str(cache)})
    with assert_raises(ConfigError, problem="no such revision", expected="main", got="'v2'"):
        run(["org/tiny@v2"], {"HF_HUB_CACHE": str(cache)})


def test_a_model_of_timm_is_built_by_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    timm: Any = ModuleType("timm")  # a stand-in with timm's own function
    asked: list[tuple[str, bool]] = []

    def create_model(name: str, *, pretrained: bool) -> nn.Module:
        asked.append((name, pretrained))
        if name != "resnet8.tiny":
            raise RuntimeError("Unknown model (resnet9)")
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(2) if False else nn.Linear(144, 2))

    timm.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", timm)
    found = _estimate(capsys, "timm/resnet8.tiny", "--input", "2x3x8x8")
    assert found["parameters"] == 4 * 3 * 9 + 4 + 144 * 2 + 2
    assert found["rows"][0]["largest"]["activations"] > 0
    assert asked == [("resnet8.tiny", False)]
    with assert_raises(AccelError, got="Unknown model"):
        run(["timm/resnet9"], {})
    monkeypatch.setitem(sys.modules, "timm", None)
    with assert_raises(MissingExtraError, fix=r"accel-torch\[timm\]"):
        run(["timm/resnet8.tiny"], {})


def test_sizes_may_have_decimals(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_size("1.5GB", "--memory") == 1_500_000_000
    assert parse_size("0.5 GiB", "--memory") == 2**29


FILE = save({"a.0.weight": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, {"format": "pt"})
HEADER = len(FILE) - 32


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(FILE)
    assert _read(path).count == 10
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "model.safetensors").symlink_to(path)  # as in the Hub's cache
    assert _read(tmp_path / "linked").count == 10


def test_a_file_that_is_cut_anywhere_is_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for end in range(len(FILE)):
        path.write_bytes(FILE[:end])
        with pytest.raises(CheckpointError):
            _read(path)


@settings(max_examples=share(4))
@given(data=st.data())
def test_a_header_with_other_bytes_is_read_or_a_typed_error(tmp_path_factory: Any, data: DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    changed = bytearray(FILE)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, HEADER - 1))
        changed[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    path.write_bytes(changed)
    with suppress(CheckpointError):
        assert _read(path).count >= 0


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "config.json"]
)
def test_a_source_that_is_no_file_is_a_typed_error(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(AccelError):
        _read(tmp_path / name)


_DECODER = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100,
}  # fmt: skip
_ENCODER = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 64,
    "patch_size": 16, "depth": 2, "num_heads": 2, "embed_dim": 32, "mlp_ratio": 4, "hidden_act": "gelu",
}  # fmt: skip
_CONFIGURATIONS: list[dict[str, Any]] = [
    {"model_type": "llama", **_DECODER},
    {"model_type": "mistral", "sliding_window": 5, "layer_types": ["sliding_attention"], **_DECODER},
    {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 10, "n_positions": 4},
    {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1, **_DECODER},
    {
        "model_type": "deepseek_v3", "moe_intermediate_size": 4, "n_routed_experts": 2, "q_lora_rank": 3,
        "kv_lora_rank": 4, "first_k_dense_replace": 1, "n_shared_experts": 1, "num_experts_per_tok": 1, **_DECODER,
    },
    {"model_type": "llava", "text_config": {"model_type": "llama", **_DECODER}, "vision_config": _ENCODER},
    {"model_type": "qwen2_vl", "text_config": {"model_type": "qwen2", **_DECODER}, "vision_config": _ENCODER},
    {"model_type": "clip", "text_config": _DECODER, "vision_config": _ENCODER, "projection_dim": 4},
]  # fmt: skip
_ABSURD = [-5, 0, 10**6, 10**20, 1.5, "x", [1], [], True, None, {}, {"a": [{}]}]


@settings(max_examples=share(3))
@given(data=st.data())
def test_absurd_values_of_a_configuration_are_typed_errors_in_little_time(
    tmp_path_factory: pytest.TempPathFactory, data: DataObject
) -> None:
    fields = json.loads(json.dumps(data.draw(st.sampled_from(_CONFIGURATIONS))))
    part = data.draw(st.sampled_from([fields, *(each for each in fields.values() if isinstance(each, dict))]))
    name = data.draw(st.sampled_from([*part, "architectures", "torch_dtype", "head_dim"]))
    part[name] = data.draw(st.sampled_from(_ABSURD))
    path = tmp_path_factory.getbasetemp() / "config.json"
    path.write_text(json.dumps(fields))
    began = time.thread_time()
    with pytest.MonkeyPatch.context() as patched, suppress(AccelError):
        patched.setattr(_build, "find_spec", lambda _: None)  # no fallback to transformers
        assert _read(path).count > 0
    assert time.thread_time() - began < 5  # CPU seconds; a hundredth of them as measured


@pytest.mark.parametrize("value", [-5, 0, 10**6, 10**20, 2.0])
@pytest.mark.parametrize("name", ["num_hidden_layers", "vision_config"])
def test_layers_that_no_model_has_are_refused_by_name(value: float, name: str, tmp_path: Path) -> None:
    at = value if name == "num_hidden_layers" else {"num_hidden_layers": value}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt", name: at}))
    with assert_raises(ConfigError, expected="a whole number from 1 to 4096") as caught:
        _read(tmp_path / "config.json")
    assert "num_hidden_layers" in str(caught.value)


@pytest.mark.parametrize(
    "text", ['{"model_type": "llama", "vocab_size": NaN}', '{"hidden_size": 1e999}', "[" * 100_000]
)
def test_what_is_no_json_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError):
        _read(tmp_path / "config.json")


@pytest.mark.parametrize("fields", _CONFIGURATIONS, ids=lambda fields: fields["model_type"])
def test_equal_blocks_are_counted_once_and_as_often_as_they_are_there(fields: dict[str, Any]) -> None:
    sizes = transformer_of(fields)
    assert sizes.count == sum(each.count for each in sizes.parameters)
    for other in ({"pad_token_id": -1}, {"rope_theta": 1e40}, {"num_hidden_layers": 4096}):
        assert transformer_of({**fields, **other}).count >= sizes.count


def test_numbers_that_are_no_sizes_are_left_alone(tmp_path: Path) -> None:
    others = {
        "pad_token_id": -1,
        "rope_theta": 1e40,
        "vision_feature_layer": -2,
        "num_images": -1,
        "num_experts": 16384,
    }
    (tmp_path / "config.json").write_text(json.dumps({**_CONFIGURATIONS[0], **others}))
    assert _read(tmp_path / "config.json").count > 0
