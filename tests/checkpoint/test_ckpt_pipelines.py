# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of pipelined models: names of the whole model, loaded by any other division, tied parameters too."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import Words, batch_of, loss_sum
from safetensors.torch import load_file
from steps import begin_batch

import accel
from accel.testing import Simulator

V = accel.parallel.Plan(schedule="ZBVZeroBubble", stages_per_rank=2)
UNEVEN = accel.parallel.Plan(stages=[["embed", "blocks.0"], [f"blocks.{at}" for at in range(1, 8)] + ["norm", "head"]])
LAYOUTS: dict[str, tuple[int, str, accel.parallel.Plan | None]] = {
    "one": (1, "", None),
    "pp2": (2, "pp=2", None),
    "uneven": (2, "pp=2", UNEVEN),
    "v": (2, "pp=2", V),
    "pp4": (4, "pp=4", None),
    "pp2dp2": (4, "pp=2,dp=2", None),
}


def _items(ctx: accel.DistContext, layout: str, *, tied: bool) -> tuple[accel.DistContext, dict[str, Any]]:
    _, mesh, plan = LAYOUTS[layout]
    ctx = accel.replace(ctx, mesh=mesh, strategy="fsdp")
    model: Any = Words(tied=tied)
    decayed = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim == 1]
    optimizer: Any = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0}], lr=1e-2)
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan)
    return ctx, {"model": model, "optimizer": optimizer, "ema": accel.training.Ema(model, decay=0.5)}


def _steps(ctx: accel.DistContext, items: dict[str, Any], count: int, first: int) -> None:
    share, shares = ctx.data_parallel
    for step in range(first, first + count):
        ids, targets = (each[share::shares] for each in batch_of(step, 8))
        state = begin_batch(ctx)
        weight = (targets != -100).sum()
        _, state = accel.forward_backward(
            ctx, items["model"], state, ids, targets=targets, loss_fn=loss_sum, weight=weight
        )
        state = accel.optimizer_step(ctx, items["optimizer"], state, max_norm=0.05)
        items["ema"].update_(items["model"], state)


def _values(ctx: accel.DistContext, items: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = accel.get_state_dict(ctx, items["model"], dst=None)
    return {name: each.clone() for name, each in found.items()}


def _save(ctx: accel.DistContext, layout: str, folder: Path, *, tied: bool) -> dict[str, torch.Tensor]:
    ctx, items = _items(ctx, layout, tied=tied)
    _steps(ctx, items, 2, 0)
    _ = accel.save_state(ctx, folder, items, step=1)
    _steps(ctx, items, 1, 2)
    return _values(ctx, items)


def _load(ctx: accel.DistContext, layout: str, folder: Path, *, tied: bool) -> dict[str, torch.Tensor]:
    ctx, items = _items(ctx, layout, tied=tied)
    _ = accel.load_state(ctx, folder, items)
    _steps(ctx, items, 1, 2)
    return _values(ctx, items)


PAIRS = [("pp2", "one"), ("one", "pp2"), ("pp2", "pp4"), ("pp4", "uneven"), ("v", "pp2"), ("pp2", "pp2dp2")]


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        *PAIRS[:3],
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS[3:]),
        pytest.param("pp2dp2", "one", marks=pytest.mark.slow),
        pytest.param("pp2dp2", "v", marks=pytest.mark.slow),
    ],
)
def test_any_division_loads_and_takes_the_next_step(
    ranks: Simulator, tmp_path: Path, saved: str, loaded: str, tied: bool
) -> None:
    stayed = ranks.run(partial(_save, layout=saved, folder=tmp_path, tied=tied), LAYOUTS[saved][0], default_group=True)
    went_on = ranks.run(
        partial(_load, layout=loaded, folder=tmp_path, tied=tied), LAYOUTS[loaded][0], default_group=True
    )
    names = list(Words(tied=tied).state_dict())
    for found in [*stayed, *went_on]:
        assert list(found) == names
        for name, value in found.items():
            torch.testing.assert_close(value, stayed[0][name], rtol=0, atol=1e-12)
    if tied:
        assert torch.equal(went_on[0]["embed.weight"], went_on[0]["head.weight"])


@pytest.mark.parametrize("layout", ["pp2", "v", "pp2dp2"])
def test_weights_are_those_of_the_whole_model(ranks: Simulator, tmp_path: Path, layout: str) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        ctx, items = _items(ctx, layout, tied=True)
        _ = accel.save_model(ctx, items["model"], tmp_path, max_shard_size=600)
        return accel.get_state_dict(ctx, items["model"], dst=1)

    first, second, *_ = ranks.run(rank, LAYOUTS[layout][0], default_group=True)
    assert first is None
    whole = Words(tied=True).state_dict()
    assert list(second) == list(whole)
    files = [load_file(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    written = {name: each for file in files for name, each in file.items()}
    assert len(files) > 1
    assert written.keys() == whole.keys() - {"head.weight"}
    for name, value in whole.items():
        assert torch.equal(second[name], value)
        assert name == "head.weight" or torch.equal(written[name], value)
