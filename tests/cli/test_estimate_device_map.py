# SPDX-License-Identifier: Apache-2.0
"""`accel estimate --device-map`: maps of configurations, functions and headers; refused words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import patience
from safetensors.torch import save_file
from torch import nn

import accel
from accel.bigmodel.plan import guess_skeleton
from accel.cli import main

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 6, "hidden_size": 256,
    "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512, "vocab_size": 4000,
    "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_programs_read_the_map_of_the_model_that_a_config_describes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    flags = "--device-map 0=5MB,cpu=4MB,disk --slots 1 --placement last --fill sequential --json"
    assert main(["estimate", ".", *flags.split()]) == 0
    found = accel.bigmodel.DeviceMap.decode(capsys.readouterr().out)
    config = transformers.AutoConfig.for_model(**{name: LLAMA[name] for name in LLAMA if name != "dtype"})
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    skeleton = accel.bigmodel.describe(model, dtype=torch.bfloat16)
    limits = {0: "5MB", "cpu": "4MB", "disk": None}
    assert found == accel.infer_device_map(skeleton, limits, slots=1, placement="last", fill="sequential")
    assert main(["estimate", "config.json", "--device-map", "0=5MB,disk", "--bandwidth", "1GB"]) == 0
    text = capsys.readouterr().out
    assert "of BF16" in text
    assert "The transfers of a pass take" in text
    assert "cuda:0  r" in text


def test_headers_do_without_torch(folder: Path) -> None:
    tensors = {f"h.{at}.weight": torch.zeros(256, 256) for at in range(6)}
    save_file(tensors, folder / "model.safetensors")
    code = (
        "import sys\nfrom accel.cli import main\n"
        "status = main(['estimate', 'model.safetensors', '--device-map', '0=1MB,mmap',\n"
        "    '--storage-dtype', 'BF16', '--storage-skip', 'h.0.weight', '--json'])\n"
        "sys.exit(status or 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=patience(60)
    )
    found = accel.bigmodel.DeviceMap.decode(done.stdout)
    weights = {name: accel.bigmodel.Weight(name=name, shape=(256, 256), dtype="F32") for name in tensors}
    skeleton = guess_skeleton(weights).store("BF16", skip="h.0.weight")
    assert found == accel.infer_device_map(skeleton, {0: "1MB", "mmap": None})


def make_model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))


def test_a_function_makes_the_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "big_nets.py").write_text(
        "from torch import nn\ndef net():\n"
        "    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))\n"
    )
    assert main(["estimate", "big_nets:net", "--device-map", "cpu=60kB,disk", "--json"]) == 0
    found = accel.bigmodel.DeviceMap.decode(capsys.readouterr().out)
    assert found == accel.infer_device_map(accel.bigmodel.describe(make_model()), {"cpu": "60kB", "disk": None})
    assert len(found.order) == 2
    assert found.slots == 1  # as two leave more on the disk
    flags = "--device-map cpu=60kB,disk --storage-dtype float8_e4m3fn --storage-skip 3.*"
    assert main(["estimate", "big_nets:net", *flags.split(), "--json"]) == 0
    found = accel.bigmodel.DeviceMap.decode(capsys.readouterr().out)
    skeleton = accel.bigmodel.describe(make_model(), storage_dtype=torch.float8_e4m3fn, storage_skip="3.*")
    assert found == accel.infer_device_map(skeleton, {"cpu": "60kB", "disk": None})
    assert (found.order, found.cast_bytes("cpu")) == ((), 64 * 64 * 4)
    assert main(["estimate", "big_nets:net", *flags.split()]) == 0
    text = capsys.readouterr().out
    assert "matrices stored in F8_E4M3" in text
    assert "16.4 kB to cast" in text


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--slots 2 --fill balanced", "no effect without one: got --slots, --fill"),
        ("--storage-dtype bfloat16", "no effect without one: got --storage-dtype"),
        ("--device-map 0=1GB --storage-dtype fp8", "the dtype of the weights is unknown"),
        ("--device-map 0=1GB --storage-skip h.0.*", "no effect without --storage-dtype"),
        ("--device-map 0=1GB --memory 5GB --nproc 2", "together with a device map: got --memory, --nproc"),
        ("--device-map 0=1GB,0=2GB", "a place with two limits"),
        ("--device-map 0=1GB --placement first", "unknown placement"),
        ("--device-map 0=1GB --fill low", "unknown way to fill"),
        ("--device-map 0", "a limit is missing"),
        ("--device-map 0=1kB,disk", "does not fit on 'cuda:0'"),
    ],
)
def test_words_without_an_effect_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], flags: str, text: str
) -> None:
    save_file({f"h.{at}.weight": torch.zeros(256, 256) for at in range(6)}, folder / "model.safetensors")
    assert main(["estimate", "model.safetensors", *flags.split()]) == 2
    assert text in capsys.readouterr().err
