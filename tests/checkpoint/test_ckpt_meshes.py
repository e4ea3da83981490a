# SPDX-License-Identifier: Apache-2.0
"""Checkpoints over meshes: any layout saves, any loads, to the bit, and the next step is that of a run that stayed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from language_models import forward_backward, make_objects, plan_of, rows
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

import accel
from accel.parallel import Axes
from accel.tensors import full_tensor
from accel.testing import Simulator, simulate

EXPERTS = 4
LAYOUTS: dict[str, tuple[Axes, str]] = {
    "one": (Axes(), "ddp"),
    "tp4": (Axes(tp=4), "ddp"),
    "dp2tp2": (Axes(dp=2, tp=2), "fsdp"),
    "hsdp": (Axes(dp_replicate=2, dp_shard=2), "fsdp"),
    "pp2": (Axes(pp=2), "ddp"),
    "pp2tp2": (Axes(pp=2, tp=2), "ddp"),
    "cp2dp2": (Axes(dp=2, cp=2), "fsdp"),
    "ep4": (Axes(dp=4, ep=4), "fsdp"),
}


class Found(NamedTuple):
    """What a rank has, whole, with averages and the optimizer's moments; and the model as one, by two ways.

    Attributes:
        kept: at the checkpoint that was saved or loaded.
        ended: after the third step.
        model: of `get_state_dict`, after the third step.
    """

    kept: dict[str, Tensor]
    ended: dict[str, Tensor]
    model: dict[str, Tensor]


def _values(items: Mapping[str, Any]) -> dict[str, Tensor]:
    held = dict(accel.unwrap_model(items["model"]).named_parameters(remove_duplicate=False))
    found: dict[str, Any] = {f"ema {name}": value for name, value in items["ema"].state_dict().items()}
    for name, each in held.items():
        moments = items["optimizer"].state.get(each, {})
        found |= {name: each, **{f"{key} of {name}": value for key, value in moments.items()}}
    return {name: full_tensor(each).clone() for name, each in found.items() if isinstance(each, Tensor)}


def _train(ctx: accel.DistContext, layout: str, out: Path, *, load: str = "", save: str = "") -> Found:
    """Take three steps, or go on from a checkpoint of two."""
    axes, strategy = LAYOUTS[layout]
    ctx = accel.replace(ctx, mesh=str(axes) or "dp=1", strategy=strategy)
    model, optimizer = make_objects(ctx, tied=True, experts=EXPERTS, optimizer=torch.optim.AdamW)
    loader = accel.prepare_loader(ctx, DataLoader(rows(12), batch_size=4), global_batch=4)
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan_of(EXPERTS, offload=layout == "hsdp"))
    state = accel.train_state(ctx)
    items = {"model": model, "optimizer": optimizer, "ema": accel.training.Ema(model, decay=0.9)}
    kept: dict[str, Tensor] = {}
    if load:
        state = accel.load_state(ctx, out / load, items | {"state": state})["state"]
        kept = _values(items)
    for batch in accel.batches(ctx, loader, state):
        state = state.next(batch)
        _, state = forward_backward(ctx, model, state, ids=batch.data, labels=batch.data)
        state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.5)
        items["ema"].update_(model)
        if state.updates == 2:
            kept = _values(items)
            if save:
                accel.save_state(ctx, out / save, items | {"state": state}, step=state.updates)
    if save:
        accel.save_model(ctx, model, out / "model")
    whole = {name: each.clone() for name, each in accel.get_state_dict(ctx, model, dst=None).items()}
    return Found(kept, _values(items), whole)


@pytest.fixture(scope="module")
def stayed() -> Found:
    """What one process has."""
    return simulate(lambda ctx: _train(ctx, "one", Path()), 1, default_group=True)[0]


def _all_of(found: list[Found], at: str) -> dict[str, Tensor]:
    """Values of all ranks by name; those that several have are equal to the bit."""
    values: dict[str, Tensor] = {}
    for each in found:
        for name, value in getattr(each, at).items():
            assert torch.equal(values.setdefault(name, value), value), name
    return values


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("saved", LAYOUTS)
def test_any_layout_loads_what_any_other_saved(ranks: Simulator, tmp_path: Path, stayed: Found, saved: str) -> None:
    def run(layout: str, **options: Any) -> list[Found]:
        size = LAYOUTS[layout][0].world_size
        return ranks.run(lambda ctx: _train(ctx, layout, tmp_path, **options), size, default_group=True, timeout_s=300)

    first = run(saved, save="run")
    kept, ended = _all_of(first, "kept"), _all_of(first, "ended")
    assert kept.keys() == ended.keys() == stayed.ended.keys()
    files = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(value, first[0].model[name]) for name, value in files.items())
    assert files.keys() == stayed.model.keys() - {"head.weight"}  # tied, under its first name
    layouts = list(LAYOUTS)
    at = layouts.index(saved)
    for layout in (saved, layouts[at - 1], layouts[at - 3]):  # so that each is loaded from three
        found = run(layout, load="run")
        for name, value in _all_of(found, "kept").items():
            assert torch.equal(value, kept[name]), f"{layout}, {name}"
        after = _all_of(found, "ended")
        assert after.keys() == ended.keys()
        for name, value in after.items():
            torch.testing.assert_close(value, stayed.ended[name], rtol=0, atol=1e-10, msg=f"{layout}, {name}")
            assert layout != saved or torch.equal(value, ended[name]), name
        for name, value in _all_of(found, "model").items():
            assert torch.equal(value, after[name]), f"{layout}, {name}"
