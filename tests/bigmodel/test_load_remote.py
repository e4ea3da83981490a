# SPDX-License-Identifier: Apache-2.0
"""Weights in stores: ranges alone are fetched, several at once; and objects that change or are missing."""

from __future__ import annotations

import fsspec
import pytest
import torch
from catching import assert_raises
from hypothesis import given, strategies as st
from safetensors.torch import save
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import accel
from accel.bigmodel.load._load import assign
from accel.errors import CheckpointError, ConfigError
from accel.storage import encode_index
from accel.tensors import full_tensor
from accel.testing import Simulator

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
    for path in (URL, f"{URL}/model.safetensors.index.json", accel.checkpoint.RemotePath(URL)):
        model = accel.init_empty_weights(lambda: nn.Linear(1_000_000, 3))
        accel.bigmodel.load_checkpoint_in_model(ctx, model, path, allow_unexpected="unused", dtype=torch.float64)
        assert torch.equal(model.weight, WEIGHTS["weight"].double())
        assert torch.equal(model.bias, WEIGHTS["bias"].double())
    with accel.bigmodel.open_weights(URL) as source:
        memory = torch.empty_like(WEIGHTS["weight"])
        source.read([("weight", memory)])
        assert torch.equal(memory, WEIGHTS["weight"])
        fetched = source.ranges.counts["remote"]
        assert memory.nbytes < fetched < memory.nbytes + 10_000


def test_objects_that_change_or_are_missing_are_errors(store: fsspec.AbstractFileSystem) -> None:
    with accel.bigmodel.open_weights(URL) as source:
        store.pipe_file("/weights/model/m1.safetensors", save({"bias": torch.zeros(3), "unused": torch.zeros(1)}))
        with assert_raises(CheckpointError, problem="too short", where=r"m1\.safetensors"):
            source.read([("unused", torch.empty(500_000))])
    with accel.bigmodel.open_weights(URL) as source:
        store.pipe_file("/weights/model/m1.safetensors", save({"bias": torch.ones(4), "unused": torch.zeros(1)}))
        with assert_raises(CheckpointError, problem="changed while it was read", where=r"m1\.safetensors"):
            source.read([("bias", torch.empty(3))])
    store.rm_file("/weights/model/m1.safetensors")
    with assert_raises(CheckpointError, problem="1 of 2 files are missing", got="m1"):
        accel.bigmodel.open_weights(URL)
    with assert_raises(ConfigError, problem="no weights at the path"):
        accel.bigmodel.open_weights("memory://weights/nothing")


def test_what_all_ranks_hold_whole_is_fetched_once(store: fsspec.AbstractFileSystem, ranks: Simulator) -> None:
    both = {"plain.weight": torch.randn(600, 700), "plain.bias": torch.randn(600), "rows": torch.randn(8, 1000)}
    store.pipe_file("/weights/both/model.safetensors", save(both))

    def rank(ctx: accel.DistContext) -> tuple[int, dict[str, torch.Tensor]]:
        ctx = accel.replace(ctx, mesh="tp=4")
        assert ctx.mesh is not None
        model = accel.init_empty_weights(lambda: nn.ModuleDict({"plain": nn.Linear(700, 600)}))
        empty = torch.empty(8, 1000, device="meta")
        model.register_parameter("rows", nn.Parameter(distribute_tensor(empty, ctx.mesh, [Shard(0)])))
        read: list[int] = []
        accel.bigmodel.load_checkpoint_in_model(ctx, model, "memory://weights/both", advance=read.append)
        return sum(read), {name: full_tensor(each).detach() for name, each in model.named_parameters()}

    found = ranks.run(rank, 4, default_group=True)
    assert all(torch.equal(each, both[name]) for _, values in found for name, each in values.items())
    sizes = sorted(nbytes - both["rows"].nbytes // 4 for nbytes, _ in found)
    assert sizes == [0, 0, both["plain.bias"].nbytes, both["plain.weight"].nbytes]


def test_a_store_that_fails_one_rank_fails_all_before_a_model_changes(
    store: fsspec.AbstractFileSystem, ranks: Simulator
) -> None:
    def rank(ctx: accel.DistContext) -> tuple[str, bool]:
        model = accel.init_empty_weights(lambda: nn.Linear(1_000_000, 3))

        def fail(nbytes: int) -> None:
            raise CheckpointError(f"the store is gone after {nbytes} bytes")

        with assert_raises(CheckpointError, problem="the store is gone") as caught:
            accel.bigmodel.load_checkpoint_in_model(ctx, model, URL, allow_unexpected="unused", advance=fail)
        return str(caught.value), model.weight.is_meta and model.bias.is_meta

    found = ranks.run(rank, 3)
    assert all(empty for _, empty in found)
    assert len({text for text, _ in found}) == 1


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 9))
def test_shares_of_ranks_differ_by_a_tensor_at_most(sizes: list[int], count: int) -> None:
    owners = assign(sizes, count)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(count)]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes, default=0)
