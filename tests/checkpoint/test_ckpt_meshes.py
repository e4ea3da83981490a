# SPDX-License-Identifier: Apache-2.0
"""Checkpoints over meshes: any layout saves, any loads, and the next step is that of a run that stayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from language_models import STYLES, make_objects, rows
from torch.utils.data import DataLoader

import accel
from accel import Axes
from accel.tensors import full_tensor
from accel.testing import Simulator

LAYOUTS: dict[str, tuple[Axes, str]] = {
    "one": (Axes(), "ddp"),
    "tp4": (Axes(tp=4), "ddp"),
    "dp2tp2": (Axes(dp=2, tp=2), "fsdp"),
    "hsdp": (Axes(dp_replicate=2, dp_shard=2), "fsdp"),
    "pp2": (Axes(pp=2), "ddp"),
    "pp2tp2": (Axes(pp=2, tp=2), "ddp"),
    "cp2dp2": (Axes(dp=2, cp=2), "fsdp"),
}


def _steps(ctx: accel.DistContext, layout: str, out: Path, *, load: str = "", upto: int, save: str = "") -> Any:
    """Train to a number of steps, from a checkpoint if one is named; return this rank's parameters, whole."""
    axes, strategy = LAYOUTS[layout]
    ctx = accel.replace(ctx, mesh=str(axes) or "dp=1", strategy=strategy)
    model, optimizer = make_objects(ctx, tied=True)
    loader = accel.prepare_loader(ctx, DataLoader(rows(), batch_size=4), global_batch=4)
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=accel.Plan(tensor=STYLES))
    state = accel.train_state(ctx)
    items = {"model": model, "optimizer": optimizer, "state": state, "ema": accel.Ema(model, decay=0.9)}
    if load:
        state = accel.load_state(ctx, out / load, items)["state"]
    for batch in accel.batches(ctx, loader, state):
        state = state.next(batch)
        labels = batch.data.clone()
        labels[int(batch.valid) :] = -100  # stand-ins
        part = accel.split_sequence(ctx, {"ids": batch.data, "labels": labels})
        wanted = part.pop("labels")
        _, state = accel.forward_backward(
            ctx,
            model,
            state,
            part,
            targets=wanted,
            loss_fn=lambda logits, targets: accel.vocab_cross_entropy(ctx, logits.flatten(0, 1), targets.flatten()),
            weight=(wanted != -100).sum(),
        )
        state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.5)
        items["ema"].update_(model)
        if state.updates == upto:
            break
    if save:
        accel.save_state(ctx, out / save, items | {"state": state}, step=state.updates)
    held = dict(accel.unwrap_model(model).named_parameters(remove_duplicate=False))
    averages = {f"ema {name}": value for name, value in items["ema"].state_dict().items()}
    return {name: full_tensor(each) for name, each in {**held, **averages}.items() if isinstance(each, torch.Tensor)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("saved", LAYOUTS)
def test_any_layout_loads_what_any_other_saved(ranks: Simulator, tmp_path: Path, saved: str) -> None:
    def run(layout: str, **options: Any) -> Any:
        size = LAYOUTS[layout][0].world_size
        return ranks.run(lambda ctx: _steps(ctx, layout, tmp_path, **options), size, default_group=True, timeout_s=300)

    expected = run("one", upto=3)[0]
    run(saved, upto=2, save="run")
    for layout in LAYOUTS:
        found = run(layout, load="run", upto=3)
        assert {name for each in found for name in each} == expected.keys()
        for each in found:
            for name, value in each.items():
                torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10, msg=f"{layout}, {name}")
