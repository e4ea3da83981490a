# SPDX-License-Identifier: Apache-2.0
"""Weights in stores: ranges alone are fetched, several at once; and objects that change or are missing."""

from __future__ import annotations

import fsspec
import pytest
import torch
from safetensors.torch import save
from torch import nn

import accel
from accel.errors import CheckpointError, ConfigError
from accel.storage import encode_index

URL = "memory://weights/model"
WEIGHTS = {"weight": torch.randn(3, 1_000_000), "bias": torch.randn(3), "unused": torch.randn(500_000)}


@pytest.fixture
def store() -> fsspec.AbstractFileSystem:
    store = fsspec.filesystem("memory")
    for at, names in enumerate((("weight",), ("bias", "unused"))):
        store.pipe_file(f"/weights/model/m{at}.safetensors", save({name: WEIGHTS[name] for name in names}))
    names = [("weight",), ("bias", "unused")]
    index = encode_index(names, {name: tensor.nbytes for name, tensor in WEIGHTS.items()})
    for at in range(2):
        index = index.replace(f"model-0000{at + 1}-of-00002".encode(), f"m{at}".encode())
    store.pipe_file("/weights/model/model.safetensors.index.json", index)
    return store


def test_models_load_from_stores_by_ranges(store: fsspec.AbstractFileSystem) -> None:
    ctx = accel.single("cpu")
    for path in (URL, f"{URL}/model.safetensors.index.json", accel.RemotePath(URL)):
        model = accel.init_empty_weights(lambda: nn.Linear(1_000_000, 3))
        accel.load_checkpoint_in_model(ctx, model, path, allow_unexpected="unused", dtype=torch.float64)
        assert torch.equal(model.weight, WEIGHTS["weight"].double())
        assert torch.equal(model.bias, WEIGHTS["bias"].double())
    with accel.open_weights(URL) as source:
        memory = torch.empty_like(WEIGHTS["weight"])
        source.read([("weight", memory)])
        assert torch.equal(memory, WEIGHTS["weight"])
        fetched = source.ranges.counts["remote"]
        assert memory.nbytes < fetched < memory.nbytes + 10_000


def test_objects_that_change_or_are_missing_are_errors(store: fsspec.AbstractFileSystem) -> None:
    with accel.open_weights(URL) as source:
        store.pipe_file("/weights/model/m1.safetensors", save({"bias": torch.zeros(3)}))
        with pytest.raises(CheckpointError, match=r"too short.*m1\.safetensors"):
            source.read([("unused", torch.empty(500_000))])
    with accel.open_weights(URL) as source:
        store.pipe_file("/weights/model/m1.safetensors", save({"bias": torch.ones(4)}))
        with pytest.raises(CheckpointError, match=r"changed while it was read.*m1\.safetensors"):
            source.read([("bias", torch.empty(3))])
    store.rm_file("/weights/model/m1.safetensors")
    with pytest.raises(CheckpointError, match="1 of 2 files are missing: got m1"):
        accel.open_weights(URL)
    with pytest.raises(ConfigError, match="no weights at the path"):
        accel.open_weights("memory://weights/nothing")
