# SPDX-License-Identifier: Apache-2.0
"""A state that is not finite is saved only when asked for; the refusal names it, on every rank, and saves nothing."""

from __future__ import annotations

import math

import pytest
import torch
from catching import assert_raises
from torch import nn

import accel
from accel.errors import NonFiniteError

KINDS = ["parameter", "optimizer", "buffer", "stateful", "record"]


class Average:
    """Something with a state of its own."""

    def __init__(self) -> None:
        self.value = torch.zeros(3)

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state_dict):
        self.value = state_dict["value"]


def _items(ctx: accel.DistContext) -> dict[str, object]:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model = accel.prepare_model(ctx, model)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "average": Average(), "kept": torch.zeros(2)}


def _spoil(items: dict[str, object], kind: str, value: float) -> str:
    plain = accel.unwrap_model(items["model"])
    spots = {
        "parameter": (plain[0].weight, "model.0.weight"),
        "optimizer": (items["optimizer"].state[plain[0].bias]["exp_avg"], "optimizer.state.model.0.bias"),
        "buffer": (plain[1].running_var, "model.1.running_var"),
        "stateful": (items["average"].value, "average"),
        "record": (items["kept"], "kept"),
    }
    tensor, name = spots[kind]
    with torch.no_grad():
        tensor.view(-1)[1] = value
    return name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("spoilt", [0, 1])
def test_the_first_tensor_is_named_on_every_rank(ranks, tmp_path, kind, value, spoilt):
    def rank(ctx):
        items = _items(ctx)
        accel.save_state(ctx, tmp_path, items, step=1)
        name = _spoil(items, kind, value) if ctx.rank == spoilt else ""
        with pytest.raises(NonFiniteError) as caught:
            accel.save_state(ctx, tmp_path, items, step=2)
        return name, str(caught.value)

    told = ranks.run(rank, 2)
    assert told[0][1] == told[1][1]
    assert told[spoilt][0] in told[0][1]
    assert f"rank {spoilt}" in told[0][1]
    assert accel.latest_checkpoint(tmp_path).name == "step-00000001"


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_background_it_is_told_by_the_result(ranks, tmp_path, kind):
    def rank(ctx):
        torch.manual_seed(0)
        items = _items(ctx)
        accel.save_state(ctx, tmp_path, items, step=1, mode="async").result()
        name = _spoil(items, kind, math.nan)
        saving = accel.save_state(ctx, tmp_path, items, step=2, mode="async")
        _spoil(items, kind, 0.0)
        with pytest.raises(NonFiniteError) as caught:
            saving.result()
        saving = accel.save_state(ctx, tmp_path, items, step=3, mode="async")
        _spoil(items, kind, math.nan)
        saving.result()
        accel.save_state(ctx, tmp_path, items, step=4, mode="async", allow_non_finite=True).result()
        return name, str(caught.value)

    (name, text), other = ranks.run(rank, 2)
    assert other == (name, text)
    assert name in text
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-0000000{step}" for step in (1, 3, 4)]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_saved_when_asked_for(tmp_path, kind):
    ctx = accel.single()
    items = _items(ctx)
    _spoil(items, kind, math.nan)
    saved = accel.save_state(ctx, tmp_path, items, step=1, allow_non_finite=True)
    fresh = _items(ctx)
    loaded = accel.load_state(ctx, saved, fresh)
    live = (accel.unwrap_model(items["model"]).state_dict(), items["optimizer"].state_dict()["state"])
    back = (accel.unwrap_model(fresh["model"]).state_dict(), fresh["optimizer"].state_dict()["state"])
    torch.testing.assert_close(back, live, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(loaded["kept"], items["kept"], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(fresh["average"].value, items["average"].value, rtol=0, atol=0, equal_nan=True)


def test_masks_and_what_is_merely_huge_are_fine(tmp_path):
    ctx = accel.single()
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
    model.register_buffer("short", torch.full((3,), 6e4, dtype=torch.float16))
    model.register_buffer("turned", torch.full((3,), 1e30 + 1e30j))
    model.register_buffer("eighth", torch.ones(3, dtype=torch.float8_e4m3fn))
    model.register_buffer("none", torch.zeros(0))
    nn.init.constant_(model.weight, 1e30)  # whose square is above what float32 holds
    accel.save_state(ctx, tmp_path, {"model": model}, step=1)
    model.short[1] = math.inf
    with assert_raises(NonFiniteError, where=r"model\.short"):
        accel.save_state(ctx, tmp_path, {"model": model}, step=2)


def test_of_many_a_few_are_named(tmp_path):
    items = {f"item{at}": torch.full((2,), math.nan) for at in range(7)}
    with assert_raises(NonFiniteError, got="7 tensors with some", where="item0, item1, item2 and 4 more"):
        accel.save_state(accel.single(), tmp_path, items, step=1)
