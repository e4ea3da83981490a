# SPDX-License-Identifier: Apache-2.0
"""`resume`: the state of the newest checkpoint, under any name or from its parts, with the settings of `start`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from catching import assert_raises
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.testing import simulate

DATA = TensorDataset(torch.randn(22, 4, generator=torch.Generator().manual_seed(0)).double())


def train(ctx: accel.DistContext, out: Path, *, updates: int, accumulation: int = 2) -> tuple[torch.Tensor, Any]:
    """Train until so many updates are taken, saving after each."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(4, 1).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = accel.prepare_loader(ctx, DataLoader(DATA, batch_size=4, shuffle=True), global_batch=4)
    model, optimizer = accel.prepare(ctx, model, optimizer)
    items: dict[str, Any] = {"model": model, "optimizer": optimizer}
    state = accel.resume(ctx, out, items, accel.train_state(ctx, seed=0, accumulation=accumulation))
    while state.updates < updates:
        for batch in accel.batches(ctx, loader, state):
            state = state.next(batch)
            with accel.accumulate(ctx, state, model):
                state = accel.backward(ctx, model(batch.data[0]).square().mean(), state)
            if state.sync:
                state = accel.optimizer_step(ctx, optimizer, state)
                accel.save_state(ctx, out, items | {"position": state}, step=state.updates, keep=2)
            if state.updates == updates:
                break
    return torch.cat([each.detach().flatten() for each in accel.unwrap_model(model).parameters()]), state


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 3)])
def test_a_run_goes_on_in_the_middle_of_an_epoch_as_if_it_had_not_stopped(
    tmp_path: Path, before: int, after: int
) -> None:
    straight, whole = simulate(lambda ctx: train(ctx, tmp_path / "straight", updates=7), after)[0]
    simulate(lambda ctx: train(ctx, tmp_path / "stopped", updates=4), before)
    for parameters, state in simulate(lambda ctx: train(ctx, tmp_path / "stopped", updates=7), after):
        torch.testing.assert_close(parameters, straight, rtol=0, atol=0 if before == after else 1e-12)
        assert state == whole


def test_a_run_without_a_checkpoint_begins_with_start(tmp_path: Path) -> None:
    def rank(ctx: accel.DistContext) -> bool:
        start = accel.train_state(ctx, seed=3)
        return accel.resume(ctx, tmp_path / "none", {"model": nn.Linear(1, 1)}, start) is start

    assert simulate(rank, 2) == [True, True]


def _save(out: Path, **items: object) -> tuple[accel.DistContext, nn.Module]:
    ctx, model = accel.single(), nn.Linear(2, 1)
    accel.save_state(ctx, out, {"model": model, **items}, step=1)
    return ctx, model


def test_a_checkpoint_of_the_three_records_gives_a_state(tmp_path: Path) -> None:
    cursor, accum = accel.Cursor(seed=5, epoch=1, consumed=8), accel.Accumulation(4).close(stepped=True)
    scaler = accel.LossScale(scale=32.0, dynamic=True, good_steps=3)
    ctx, model = _save(tmp_path, where=cursor, accum=accum, scale=scaler)
    start = accel.train_state(ctx, seed=5, accumulation=4)
    fp16 = msgspec.structs.replace(start, scaler=accel.LossScale(scale=2.0**16, dynamic=True, growth_interval=7))
    state = accel.resume(ctx, tmp_path, {"model": model}, fp16)
    assert state == accel.TrainState(cursor, accum, msgspec.structs.replace(scaler, growth_interval=7))


def test_settings_are_those_of_start(tmp_path: Path) -> None:
    scaler = accel.LossScale(scale=32.0, dynamic=True, good_steps=3)
    saved = accel.TrainState(accel.Cursor(consumed=8), accel.Accumulation(4, updates=2), scaler)
    ctx, model = _save(tmp_path, state=saved)
    state = accel.resume(ctx, tmp_path, {"model": model}, accel.train_state(ctx, accumulation=8))
    assert state == accel.TrainState(accel.Cursor(consumed=8), accel.Accumulation(8, updates=2), accel.LossScale())


def test_another_seed_is_refused_before_anything_changes(tmp_path: Path) -> None:
    ctx, model = _save(tmp_path, state=accel.train_state(accel.single(), seed=5))
    other = nn.Linear(2, 1)
    before = other.weight.detach().clone()
    with assert_raises(
        accel.errors.ConfigError, problem="another seed", expected=r"train_state\(ctx, seed=5\)", got="seed=0"
    ):
        accel.resume(ctx, tmp_path, {"model": other}, accel.train_state(ctx))
    assert torch.equal(other.weight, before)
    accel.resume(ctx, tmp_path, {"model": other}, accel.train_state(ctx, seed=5))
    assert torch.equal(other.weight, model.weight)


def test_a_checkpoint_without_one_state_names_what_it_holds(tmp_path: Path) -> None:
    ctx, model = _save(tmp_path / "none")
    with assert_raises(accel.errors.CheckpointError, problem="holds no state of a loop", got="model", where="resume"):
        accel.resume(ctx, tmp_path / "none", {"model": model}, accel.train_state(ctx))
    ctx, model = _save(tmp_path / "two", one=accel.train_state(ctx), two=accel.train_state(ctx))
    with assert_raises(accel.errors.CheckpointError, problem="more than one state", got="one, two", where="resume"):
        accel.resume(ctx, tmp_path / "two", {"model": model}, accel.train_state(ctx))


def test_values_that_would_be_loaded_and_not_returned_are_refused(tmp_path: Path) -> None:
    ctx = accel.single()
    with assert_raises(
        accel.errors.ConfigError, problem="resume does not return a value", got="log: dict", fix="accel.load_state"
    ):
        accel.resume(ctx, tmp_path, {"log": {}}, accel.train_state(ctx))
    with assert_raises(accel.errors.ConfigError, problem="the state to start with is not valid"):
        accel.resume(ctx, tmp_path, {"model": nn.Linear(1, 1)}, accel.Cursor())  # pyright: ignore[reportArgumentType]


def test_a_folder_among_the_items_is_read_back(tmp_path: Path) -> None:
    read: list[str] = []
    start = accel.train_state(accel.single())
    folder = accel.items.Folder(
        save=lambda place: (place / "notes").write_text("kept"),
        load=lambda place: read.append((place / "notes").read_text()),
    )
    ctx, model = _save(tmp_path / "run", state=start, hooks=folder)
    assert accel.resume(ctx, tmp_path / "run", {"model": model, "hooks": folder}, start) == start
    assert read == ["kept"]


def test_items_without_names_are_refused(tmp_path: Path) -> None:
    ctx, items = accel.single(), [nn.Linear(1, 1)]
    with assert_raises(accel.errors.ConfigError, problem="items have no names", got="list", where="resume"):
        accel.resume(ctx, tmp_path, items, accel.train_state(ctx))  # pyright: ignore[reportArgumentType]
    state = accel.train_state(ctx, accumulation=2)
    assert accel.resume(ctx, tmp_path, {}, state) == state


def test_a_value_stays_in_the_file_for_none(tmp_path: Path) -> None:
    state = accel.train_state(accel.single())
    ctx, model = _save(tmp_path, state=state, optimizer=torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    assert accel.resume(ctx, tmp_path, {"model": model, "optimizer": None}, state) == state
