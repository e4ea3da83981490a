# SPDX-License-Identifier: Apache-2.0
"""A model out of a checkpoint, offline: the same files as `save_model` writes, from any number of pieces."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from ckpt_helpers import CPU, network
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accel import save_model, save_state
from accel.checkpoint import merge
from accel.context import DistContext
from accel.errors import CheckpointError
from accel.testing import simulate


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = network()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("size", ["5GB", 60])
def test_a_merged_model_is_what_save_model_writes_with_all_names_of_tied_tensors(
    tmp_path: Path, size: int | str
) -> None:
    model = Tied()
    path = save_state(CPU, tmp_path / "run", {"net": model, "other": network(1), "best": 1}, step=1)
    assert merge(path, tmp_path / "merged", item="net", max_shard_size=size) == tmp_path / "merged"
    save_model(CPU, model, tmp_path / "saved", max_shard_size=size)
    loaded: list[dict[str, Any]] = [{}, {}]
    for found, folder in zip(loaded, ("merged", "saved"), strict=True):
        for file in (tmp_path / folder).glob("*.safetensors"):
            found |= load_file(file)
    assert loaded[0].keys() == model.state_dict().keys() == loaded[1].keys() | {"head.weight"}
    assert all(tensor.equal(model.state_dict()[name]) for found in loaded for name, tensor in found.items())
    assert (size == "5GB") == (os.listdir(tmp_path / "merged") == ["model.safetensors"])


def test_nothing_is_written_of_a_damaged_checkpoint(tmp_path: Path) -> None:
    path = save_state(CPU, tmp_path / "run", {"model": network()}, step=1)
    file = next(path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with assert_raises(CheckpointError, problem=f"{file.name}: damaged"):
        merge(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sharded_tensors_are_put_together(tmp_path: Path) -> None:
    def rank(ctx: DistContext) -> None:
        model = Tied()
        fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
        save_state(ctx, tmp_path / "run", {"model": model}, step=1)

    with torch.random.fork_rng():
        torch.manual_seed(3)
        state = torch.get_rng_state()
        expected = Tied().state_dict()

    def seeded(ctx: DistContext) -> None:
        torch.set_rng_state(state)
        rank(ctx)

    simulate(seeded, 3, default_group=True)
    path = tmp_path / "run" / "step-00000001"
    stored = json.loads((path / "manifest.json").read_text())["tensors"]
    assert any(len(each["pieces"]) == 3 for each in stored.values())
    merge(path, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_a_merged_model_with_tied_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32, "hidden_size": 16}
    config = transformers.LlamaConfig(intermediate_size=24, tie_word_embeddings=True, **sizes)
    model = transformers.LlamaForCausalLM(config)
    path = save_state(CPU, tmp_path / "run", {"model": model}, step=1)
    config.save_pretrained(tmp_path / "out")
    merge(path, tmp_path / "out")
    loaded, told = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(loaded.state_dict()[name].equal(tensor) for name, tensor in model.state_dict().items())
    inner = transformers.AutoModel.from_pretrained(tmp_path / "out")
    assert inner.embed_tokens.weight.equal(model.lm_head.weight)
