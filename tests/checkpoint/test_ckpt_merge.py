# SPDX-License-Identifier: Apache-2.0
"""A model out of a checkpoint, offline: the same files as `save_model` writes, from any number of pieces."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from ckpt_helpers import CPU, network
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from accel.checkpoint import Manifest, Piece, TensorEntry, merge, opened_tensors
from accel.errors import CheckpointError
from accel.storage import write_tensors
from accel.training import save_model, save_state


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
    loaded = [{}, {}]
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
    with pytest.raises(CheckpointError, match=f"{file.name}: damaged"):
        merge(path, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == []


@settings(max_examples=30, deadline=None)
@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=3), cuts=st.lists(st.integers(1, 4), max_size=3))
def test_pieces_are_put_where_they_belong(
    shape: list[int], cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    edges = sorted({0, shape[0], *(cut for cut in cuts if cut < shape[0])})
    files, pieces = {}, []
    for at, (start, end) in enumerate(itertools.pairwise(edges)):
        name = f"tensors-{at}.safetensors"
        files[name] = write_tensors(folder, name, {"model.w": whole[start:end]})
        pieces.append(Piece(name, (start, *[0] * (len(shape) - 1)), (end - start, *shape[1:])))
    entry = TensorEntry("float32", tuple(shape), tuple(pieces))
    manifest = like(files=files, tensors={"model.w": entry})
    with opened_tensors(folder, manifest, ["model.w"]) as read:
        assert read("model.w").equal(whole)
    if len(pieces) > 1:
        short = msgspec.structs.replace(manifest, tensors={"model.w": TensorEntry("float32", tuple(shape), pieces[:1])})
        with (
            opened_tensors(folder, short, ["model.w"]) as read,
            pytest.raises(CheckpointError, match="do not make it whole"),
        ):
            read("model.w")


def like(**fields: Any) -> Manifest:
    plain: dict[str, Any] = {"format": 1, "accel": "0", "torch": "2", "step": 0, "world_size": 1}
    return Manifest(**plain, aliases={}, items={}, **fields)


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
