# SPDX-License-Identifier: Apache-2.0
"""Models divided over ranks that stream: each rank's stage, or its parts of weights, from where its map says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from small_llamas import llama, sizes_of
from torch import nn

import accel
from accel.bigmodel.plan import DeviceMap
from accel.errors import ConfigError, PrepareError, StreamError
from accel.tensors import is_absent, local_part
from accel.testing import Simulator

IDS = torch.arange(24).view(2, 12) % 60
SMALL = {"layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "head_width": 8, "inner": 48, "vocabulary": 64}


def _llama(*, tied: bool = False) -> Any:
    torch.manual_seed(0)
    return llama(sizes_of(**SMALL, tied=tied))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A model's folder, and its logits."""
    folder = tmp_path_factory.mktemp("saved")
    model = _llama(tied=True)
    accel.save_model(accel.single("cpu"), model, folder, max_shard_size="40KB")
    with torch.no_grad():
        return folder, model(IDS).logits


def _map(model: nn.Module, home: str, **options: Any) -> DeviceMap:
    skeleton = accel.bigmodel.describe(model, **options)
    homes = {each.name: home if ".layers." in each.name else "cpu:0" for each in skeleton.segments}
    return DeviceMap(skeleton=skeleton, home=homes, runs=dict.fromkeys(homes, "cpu:0"))


def _divided(ctx: accel.DistContext, mesh: str) -> tuple[accel.DistContext, Any]:
    ctx = accel.replace(ctx, mesh=mesh)
    model = accel.init_empty_weights(lambda: _llama(tied=True))
    return ctx, accel.prepare_model(ctx, model, allocate=False)


def _logits(ctx: accel.DistContext, model: Any) -> torch.Tensor:
    with accel.evaluating(model), torch.no_grad():
        return accel.training.forward(ctx, model, IDS) if ctx.axis("pp").size > 1 else model(IDS).logits


@pytest.mark.parametrize("home", ["cpu", "mmap", "disk"])
@pytest.mark.parametrize("mesh", ["tp=2", pytest.param("pp=2", marks=pytest.mark.slow), "pp=2,tp=2"])
def test_stages_and_parts_of_weights_stream(
    ranks: Simulator, saved: tuple[Path, torch.Tensor], tmp_path: Path, mesh: str, home: str
) -> None:
    folder, expected = saved

    def rank(ctx: accel.DistContext) -> tuple[torch.Tensor, int, int]:
        ctx, model = _divided(ctx, mesh)
        assert all(each.is_meta for each in model.parameters())
        device_map = _map(model, home)
        with accel.load_checkpoint_and_dispatch(ctx, model, folder, device_map) as run:
            logits = _logits(ctx, run.model)
            moved = sum(each.moved_bytes for each in run.stats().segments)
            accel.save_model(ctx, run.model, tmp_path)
        layers = [each for each in device_map.skeleton.segments if ".layers." in each.name]
        return logits, moved, sum(weight.nbytes for each in layers for weight in each.weights)

    for logits, moved, parts in ranks.run(rank, 4 if "," in mesh else 2, default_group=True):
        assert torch.allclose(logits, expected, atol=1e-5)
        assert moved >= parts > 0
    again = accel.bigmodel.load_checkpoint_in_model(accel.single("cpu"), _llama(tied=True), tmp_path)
    first = dict(_llama(tied=True).named_parameters())
    assert all(torch.equal(again.get_parameter(name), each) for name, each in first.items())


def test_parts_hold_no_memory_and_fetch_themselves(ranks: Simulator, saved: tuple[Path, torch.Tensor]) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx, model = _divided(ctx, "tp=2")
        name = "model.layers.1.mlp.down_proj.weight"
        with accel.load_checkpoint_and_dispatch(ctx, model, saved[0], _map(model, "disk")) as run:
            weight = run.model.get_parameter(name)
            assert is_absent(weight)
            assert weight.shape == (32, 48)
            assert local_part(weight).shape == (32, 24)
            part = _llama(tied=True).get_parameter(name).chunk(2, 1)[ctx.rank]
            assert torch.equal(local_part(weight + 0), part)
            with assert_raises(StreamError, fix=r"run\.close"):
                run.model.load_state_dict({name: weight}, strict=False)
        with assert_raises(StreamError, problem="closed"):
            _ = weight + 0

    ranks.run(rank, 2, default_group=True)


@pytest.mark.parametrize("home", ["cpu", "cpu:0"])
def test_parts_lie_in_a_smaller_dtype(ranks: Simulator, saved: tuple[Path, torch.Tensor], home: str) -> None:
    def rank(ctx: accel.DistContext) -> torch.Tensor:
        ctx, model = _divided(ctx, "tp=2")
        device_map = _map(model, home, storage_dtype=torch.float8_e5m2)
        with accel.load_checkpoint_and_dispatch(ctx, model, saved[0], device_map) as run:
            return _logits(ctx, run.model)

    rounded = _llama(tied=True)
    for layer in rounded.model.layers:
        for weight in layer.parameters():
            if weight.dim() > 1:
                weight.data = weight.data.to(torch.float8_e5m2).float()
    with torch.no_grad():
        expected = rounded(IDS).logits
    assert all(torch.allclose(each, expected, atol=1e-5) for each in ranks.run(rank, 2, default_group=True))


def test_parts_come_from_tensors_and_from_the_model_itself(ranks: Simulator, saved: tuple[Path, torch.Tensor]) -> None:
    def rank(ctx: accel.DistContext) -> list[torch.Tensor]:
        ctx, model = _divided(ctx, "tp=2")
        whole = dict(_llama(tied=True).named_parameters())
        with accel.dispatch_model(model, _map(model, "cpu"), source=whole) as run:
            found = [_logits(ctx, run.model)]
        model = accel.prepare_model(ctx, _llama(tied=True))
        before = list(model.parameters())
        with accel.dispatch_model(model, _map(model, "cpu")) as run:
            found.append(_logits(ctx, run.model))
        assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
        found.append(_logits(ctx, model))
        with assert_raises(ConfigError, fix="allocate=False") as caught:
            accel.dispatch_model(model, _map(model, "disk"), source=saved[0])
        assert "has values" in caught.value.problem
        found.append(_logits(ctx, model))
        return found

    for found in ranks.run(rank, 2, default_group=True):
        assert all(torch.allclose(each, saved[1], atol=1e-5) for each in found)


@pytest.mark.parametrize(("mesh", "strategy"), [("dp=2", "ddp"), ("dp=2", "fsdp"), ("dp=2,tp=2", "ddp")])
def test_a_model_that_ranks_replicate_gets_memory(ranks: Simulator, mesh: str, strategy: Any) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh=mesh, strategy=strategy)
        model = accel.init_empty_weights(_llama)
        with assert_raises(PrepareError, fix="run each replica separately") as caught:
            accel.prepare_model(ctx, model, allocate=False)
        assert caught.value.got == "dp=2"
        assert all(each.is_meta for each in model.parameters())

    ranks.run(rank, 4 if "," in mesh else 2, default_group=True)


def test_one_rank_leaves_a_model_empty(saved: tuple[Path, torch.Tensor]) -> None:
    ctx = accel.single("cpu")
    model = accel.prepare_model(ctx, accel.init_empty_weights(lambda: _llama(tied=True)), allocate=False)
    assert all(each.is_meta for each in model.parameters())
    with accel.load_checkpoint_and_dispatch(ctx, model, saved[0], _map(model, "disk")) as run:
        assert torch.equal(_logits(ctx, run.model), saved[1])
