# SPDX-License-Identifier: Apache-2.0
"""Engines: one that keeps everything in tensors of its own goes through the whole loop, and ends where ddp does."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import fake_engine
import msgspec
import pytest
import torch
from catching import assert_raises
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import accel
from accel.errors import ConfigError, NonFiniteError, PrepareError
from accel.formats import StrategyName
from accel.parallel._engines import ENGINES, engine_of
from accel.topology import STRATEGY_DIMENSION

ROWS = torch.linspace(-1, 1, 22, dtype=torch.float64).view(11, 2)


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "fake", ("fake_engine", "make"))  # type: ignore[arg-type]


def _driven(ctx: accel.DistContext, engine: bool = True) -> accel.DistContext:
    if not engine:
        return ctx
    return dataclasses.replace(ctx, settings=msgspec.structs.replace(ctx.settings, strategy="fake"))


def _objects(ctx: accel.DistContext) -> tuple:
    with accel.seeding.seeded(ctx, 0):
        model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(ROWS, batch_size=4 // ctx.world_size, shuffle=True)  # of 11 rows: the last batch is ragged
    return accel.prepare(ctx, model, optimizer, StepLR(optimizer, 2, 0.5), loader)


def _train(
    ctx: accel.DistContext, items: dict, loader: accel.Loader, epochs: int, clip: str, out: Path | None = None
) -> list[float]:
    """Train by accumulation of 2, ragged batches weighted by their samples; save after every epoch."""
    model, optimizer, scheduler, state = (items[name] for name in ("model", "optimizer", "scheduler", "state"))
    norms: list[float] = []
    while state.epoch < epochs:
        for batch in accel.batches(ctx, loader, state):
            state = state.next(batch)
            with accel.accumulate(ctx, state, model):
                state = accel.backward(ctx, model(batch.data).square().mean(), state)
            if not state.sync:
                continue
            limits = {"max_norm": 0.1} if clip == "in the step" else {}
            if clip == "by norm":
                norms.append(float(accel.clip_grad_norm_(ctx, model.parameters(), 0.1, state)))
            elif clip == "by value":
                accel.clip_grad_value_(ctx, model.parameters(), 0.01, state)
            state = accel.optimizer_step(ctx, optimizer, state, scheduler=scheduler, **limits)
            assert state.stepped
            norms.append(float(state.grad_norm))
        items["state"] = state
        if out is not None:
            accel.save_state(ctx, out, items, step=state.epoch)
    return norms


def _items(ctx: accel.DistContext) -> tuple[dict, accel.Loader]:
    model, optimizer, scheduler, loader = _objects(ctx)
    state = accel.train_state(ctx, seed=3, accumulation=2)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "state": state}, loader


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.parametrize("clip", ["no", "in the step", "by norm", "by value"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_an_engine_ends_where_ddp_does(ranks, world_size, clip):
    def rank(ctx):
        ends = []
        for engine in (False, True):
            here = _driven(ctx, engine)
            items, loader = _items(here)
            assert isinstance(items["model"], fake_engine.FlatModel) == engine
            ends.append((items, _train(here, items, loader, 2, clip)))
        (ours, our_norms), (theirs, their_norms) = ends
        torch.testing.assert_close(_weights(theirs["model"]), _weights(ours["model"]), rtol=0, atol=1e-12)
        assert their_norms == pytest.approx(our_norms, abs=1e-12)
        assert theirs["scheduler"].get_last_lr() == ours["scheduler"].get_last_lr()
        assert (theirs["state"].updates, theirs["state"].cursor) == (ours["state"].updates, ours["state"].cursor)
        return True

    assert all(ranks.run(rank, world_size))


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 2), (4, 1)])
def test_its_state_is_saved_and_loaded(ranks, tmp_path, saved_on, loaded_on):
    def save(ctx):
        ctx = _driven(ctx)
        items, loader = _items(ctx)
        _train(ctx, items, loader, 3, "no", tmp_path)
        return _weights(items["model"])

    def resume(ctx):
        ctx = _driven(ctx)
        items, loader = _items(ctx)
        loaded = accel.load_state(ctx, tmp_path / "step-00000001", items)
        assert loaded["model"] is items["model"]
        assert loaded["optimizer"] is items["optimizer"]
        items["state"] = loaded["state"]
        _train(ctx, items, loader, 3, "no")
        return _weights(items["model"])

    expected = ranks.run(save, saved_on)[0]
    for weights in ranks.run(resume, loaded_on):
        torch.testing.assert_close(weights, expected, rtol=0, atol=0 if saved_on == loaded_on else 1e-12)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_gradients_that_are_not_finite_are_accels_decision(ranks, nonfinite):
    def rank(ctx):
        ctx = _driven(ctx)
        items, loader = _items(ctx)
        before = _weights(items["model"])
        state = items["state"]
        batch = next(iter(accel.batches(ctx, loader, state)))
        state = state.next(batch, last=True)
        with accel.accumulate(ctx, state, items["model"]):
            state = accel.backward(ctx, items["model"](batch.data).square().mean() * float("inf"), state)
        refused = pytest.raises(NonFiniteError) if nonfinite == "raise" else contextlib.nullcontext()
        with refused:
            state = accel.optimizer_step(ctx, items["optimizer"], state, nonfinite=nonfinite)
            assert not state.stepped
        assert torch.equal(_weights(items["model"]), before)
        return bool(items["model"].gradients.any())

    assert ranks.run(rank, 2) == [nonfinite == "raise"] * 2


def test_what_an_engine_cannot_do_is_refused(ranks):
    def rank(ctx):
        ctx = _driven(ctx)
        with assert_raises(ConfigError, problem="no effect on an engine", expected="none", got="bucket_cap_mb"):
            accel.prepare_model(ctx, nn.Linear(2, 1), bucket_cap_mb=1.0)
        assert isinstance(accel.prepare_model(ctx, nn.Linear(2, 1)), fake_engine.FlatModel)
        items, loader = _items(ctx)
        batch = next(iter(accel.batches(ctx, loader, items["state"])))
        state = items["state"].next(batch, last=True)
        with accel.accumulate(ctx, state, items["model"]):
            state = accel.backward(ctx, items["model"](batch.data).square().mean(), state)
        with assert_raises(ConfigError, problem="an engine divides its gradients within the step"):
            accel.unscale_gradients(ctx, items["optimizer"], state)
        with assert_raises(ConfigError, problem="an engine steps all of its parameters at once"):
            accel.training.fused_step(ctx, items["model"](batch.data).square().mean(), items["optimizer"])
        return True

    assert all(ranks.run(rank, 2))


def _own_names() -> Iterator[str]:
    yield from (name for name in ENGINES if name != "fake")


def test_every_strategy_is_a_dimensions_or_an_engines_and_engines_exist():
    assert {*_own_names(), *STRATEGY_DIMENSION} == set(get_args(StrategyName))
    for name in _own_names():
        assert importlib.util.find_spec(ENGINES[name][0]) is not None


def test_an_engine_is_looked_up_by_the_name_of_the_strategy():
    ctx = accel.single()
    assert engine_of(ctx) is None
    found = engine_of(ctx, {"ddp": ("fake_engine", "make")})
    assert found is not None
    assert found == engine_of(_driven(ctx))


def test_a_plan_beside_an_engine_is_refused() -> None:
    ctx = _driven(accel.single())
    for prepare in (accel.prepare, accel.prepare_model):
        with assert_raises(ConfigError, problem="a plan has no effect on an engine", got="fake", where="plan="):
            prepare(ctx, nn.Linear(2, 2), plan=accel.parallel.Plan(offload=True))


def test_sparse_gradients_are_refused() -> None:
    ctx = _driven(accel.single())
    for prepare in (accel.prepare, accel.prepare_model):
        with assert_raises(PrepareError, got="sparse=True and the engine fake", where=r", 0\.weight"):
            prepare(ctx, nn.Sequential(nn.Embedding(3, 2, sparse=True)))
