# SPDX-License-Identifier: Apache-2.0
"""Sources of an estimate by name: files of torch.save, models in the Hub's local cache, models of timm."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from accel.cli._estimate import run
from accel.errors import AccelError, CheckpointError, ConfigError, MissingExtraError
from accel.estimate._sources import cached_model, from_headers
from accel.storage import parse_size


def _estimate(capsys: pytest.CaptureFixture[str], *words: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
    assert run([*words, "--json"], environ or {}) == 0
    return json.loads(capsys.readouterr().out)


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
    model = from_headers(cached_model("org/tiny", {"HF_HUB_CACHE": str(cache)}))
    assert {each.name: (each.shape, each.item_bytes, each.trained) for each in model.parameters} == {
        "a": ((4, 2), 4, True),
        "b": ((3,), 4, True),
        "c": ((5,), 8, False),
    }
    torch.save(nn.Linear(2, 3).state_dict(), tmp_path / "pytorch_model.bin")
    assert from_headers(tmp_path).count == from_headers(tmp_path / "pytorch_model.bin").count == 9


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
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        from_headers(path)
    assert not Path("harm").exists()


def test_a_model_of_the_local_cache_is_found_by_name(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for environ in ({"HF_HUB_CACHE": str(cache)}, {"HF_HOME": str(cache.parent)}):
        assert _estimate(capsys, "org/tiny", environ=environ)["parameters"] == 16
    assert _estimate(capsys, "org/tiny@abc", environ={"HF_HOME": str(cache.parent)})["parameters"] == 16
    with pytest.raises(ConfigError, match=r"nor such a model.*Did you mean `org/tiny`"):
        run(["org/tinny"], {"HF_HUB_CACHE": str(cache)})
    with pytest.raises(ConfigError, match=r"hf download else/where config\.json"):
        run(["else/where"], {"HOME": str(cache)})
    with pytest.raises(ConfigError, match=r"no such revision.*expected main, got 'v2'"):
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
    with pytest.raises(AccelError, match="Unknown model"):
        run(["timm/resnet9"], {})
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MissingExtraError, match=r"accel-torch\[timm\]"):
        run(["timm/resnet8.tiny"], {})


def test_sizes_may_have_decimals(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_size("1.5GB", "--memory") == 1_500_000_000
    assert parse_size("0.5 GiB", "--memory") == 2**29
