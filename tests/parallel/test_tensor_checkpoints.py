# SPDX-License-Identifier: Apache-2.0
"""A model that ranks along tp share is saved whole, loaded on any mesh, averaged, copied and pickled like others."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from profiles import share
from safetensors.torch import load_file
from steps import begin_batch
from tensor_models import ENDS, IGNORED, loader, made, plans, total_loss, whole

import accel
from accel.testing import Simulator

LAYOUTS = {
    "one": (1, "", "ddp"),
    "tp2": (2, "tp=2", "ddp"),
    "tp4": (4, "tp=4", "ddp"),
    "dp2tp2": (4, "dp=2,tp=2", "fsdp"),
}
OPTIONS = {"heads_of_keys": 2, "tied": True, "classes": 11, "hidden": 23}  # parts of several lengths
EXACT = {"rtol": 0, "atol": 1e-10}


def _built(ctx: accel.DistContext, layout: str, *, seed: int, fused: bool) -> tuple[accel.DistContext, Any]:
    _, mesh, strategy = LAYOUTS[layout]
    ctx = accel.replace(ctx, mesh=mesh, strategy=strategy) if mesh else ctx
    options = {"fused": True, "tied": True} if fused else OPTIONS
    model = made(seed, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    styles = plans(fused=fused)["copies"] | {**ENDS, "head": "colwise_gather_output"}
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=accel.parallel.Plan(tensor=styles))
    return ctx, {"model": model, "optimizer": optimizer, "ema": accel.training.Ema(model, decay=0.5)}


def _step(ctx: accel.DistContext, items: dict[str, Any]) -> None:
    ids, labels = (torch.stack(each) for each in zip(*loader(4, 4).dataset, strict=True))
    mine, shares = ctx.data_parallel
    ids, labels = ids.chunk(shares)[mine], labels.chunk(shares)[mine]
    tokens = int((labels != IGNORED).sum())
    state = begin_batch(ctx)
    with accel.accumulate(ctx, state, items["model"]):
        loss = total_loss(ctx, items["model"](ids), labels, divided=False) / tokens
        state = accel.backward(ctx, loss, state, weight=tokens)
    state = accel.optimizer_step(ctx, items["optimizer"], state, max_norm=0.5)
    items["ema"].update_(items["model"], state)


def _numbers(items: dict[str, Any]) -> Any:
    return whole(items["model"]), whole(items["ema"])


def assert_loads_as_saved(ranks: Simulator, saved: str, loaded: str, folder: Path, *, fused: bool) -> None:
    def save(ctx: accel.DistContext) -> Any:
        ctx, items = _built(ctx, saved, seed=1, fused=fused)
        _step(ctx, items)
        accel.save_state(ctx, folder, items, step=1)
        at_save = _numbers(items)
        _step(ctx, items)
        return at_save, _numbers(items)

    def load(ctx: accel.DistContext) -> Any:
        ctx, items = _built(ctx, loaded, seed=2, fused=fused)
        accel.load_state(ctx, accel.latest_checkpoint(folder), items)
        at_load = _numbers(items)
        _step(ctx, items)
        return at_load, _numbers(items)

    at_save, stayed = ranks.run(save, LAYOUTS[saved][0], default_group=True)[0]
    for at_load, went_on in ranks.run(load, LAYOUTS[loaded][0], default_group=True):
        torch.testing.assert_close(at_load, at_save, rtol=0, atol=0)
        torch.testing.assert_close(went_on, stayed, **EXACT)


@pytest.mark.parametrize(("saved", "loaded"), [("one", "tp2"), ("tp4", "one")])
def test_a_checkpoint_goes_on_on_another_mesh(ranks, tmp_path, saved, loaded):
    assert_loads_as_saved(ranks, saved, loaded, tmp_path, fused=False)


@pytest.mark.nightly
@settings(max_examples=share(0.16), deadline=None)
@given(layouts=st.permutations(sorted(LAYOUTS)), fused=st.booleans())
def test_all_pairs_of_meshes_go_on(ranks, tmp_path_factory, layouts, fused):
    assert_loads_as_saved(ranks, *layouts[:2], tmp_path_factory.mktemp("run"), fused=fused)


@pytest.mark.parametrize("layout", ["tp2", "dp2tp2"])
def test_state_dicts_and_models_are_saved_whole_under_plain_names(ranks, tmp_path, layout):
    def rank(ctx: accel.DistContext) -> Any:
        ctx, items = _built(ctx, layout, seed=1, fused=True)
        accel.save_model(ctx, items["model"], tmp_path)
        return accel.get_state_dict(ctx, items["model"], dst=None)

    plain = made(fused=True, tied=True).state_dict()
    for found in ranks.run(rank, LAYOUTS[layout][0], default_group=True):
        assert list(found) == list(plain)
        torch.testing.assert_close(dict(found), dict(plain), rtol=0, atol=0)
    stored = load_file(tmp_path / "model.safetensors")
    for name, tensor in stored.items():
        torch.testing.assert_close(tensor, plain[name], rtol=0, atol=0)


def test_copies_and_pickles_compute_as_the_model_does(ranks):
    ids = torch.arange(8)[None] % 7

    def rank(ctx: accel.DistContext) -> bool:
        _, items = _built(ctx, "tp2", seed=1, fused=True)
        model = items["model"]
        expected = model(ids)
        twin = copy.deepcopy(model)
        assert torch.equal(twin(ids), expected)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        assert torch.equal(again(ids), expected)
        assert type(again.head).__name__ == "Linear"
        with torch.no_grad():
            twin.norm.weight.mul_(2)
        return torch.equal(model(ids), expected)

    assert ranks.run(rank, 2, default_group=True) == [True, True]


def test_the_plain_model_computes_with_what_was_saved(ranks, tmp_path):
    ids = torch.arange(8)[None] % 7

    def rank(ctx: accel.DistContext) -> torch.Tensor:
        ctx, items = _built(ctx, "tp4", seed=1, fused=False)
        _step(ctx, items)
        accel.save_model(ctx, items["model"], tmp_path)
        return items["model"](ids).detach()

    outputs = ranks.run(rank, 4, default_group=True)
    plain = made(2, **OPTIONS)
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    torch.testing.assert_close(outputs[3], plain(ids).detach(), **EXACT)
