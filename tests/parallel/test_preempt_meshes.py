# SPDX-License-Identifier: Apache-2.0
"""A stop request within a window ends a run after it, on any mesh; a run that goes on ends as one that stayed."""

from __future__ import annotations

import functools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from language_models import forward_backward, make_objects, plan_of, rows
from torch.utils.data import DataLoader

import accel
from accel.parallel import Axes
from accel.tensors import full_tensor
from accel.testing import Simulator, simulate


def _train(ctx: accel.DistContext, axes: Axes, strategy: Any, out: Path, experts: int, *, stops: bool = False) -> Any:
    """Two windows of two batches each an epoch; where it `stops`, the last rank gets a signal in the first window."""
    ctx = accel.replace(ctx, mesh=str(axes) or "dp=1", strategy=strategy)
    model, optimizer = make_objects(ctx, tied=True, experts=experts, optimizer=torch.optim.AdamW)
    loader = accel.prepare_loader(ctx, DataLoader(rows(16), batch_size=4), global_batch=4)
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan_of(experts))
    items = {"model": model, "optimizer": optimizer}
    state = accel.resume(ctx, out, items, accel.train_state(ctx, accumulation=2))
    with accel.preempt.stop_requests(ctx) as requests:
        for batch in accel.batches(ctx, loader, state):
            state = state.next(batch)
            _, state = forward_backward(ctx, model, state, ids=batch.data, labels=batch.data)
            if stops and not state.sync and ctx.rank == ctx.world_size - 1:
                signal.raise_signal(signal.SIGTERM)
            if not state.sync:
                continue
            state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.5)
            if stop := accel.preempt.stop_agreed(ctx, requests):
                accel.save_state(ctx, out, items | {"state": state}, step=state.updates)
                return stop
    held = accel.unwrap_model(model).named_parameters(remove_duplicate=False)
    return {name: full_tensor(each).clone() for name, each in held}


@functools.cache
def _stayed(experts: int) -> dict[str, torch.Tensor]:
    return simulate(lambda ctx: _train(ctx, Axes(), "ddp", Path("none"), experts), 1, default_group=True)[0]


@pytest.mark.parametrize(
    ("axes", "strategy"),
    [
        (Axes(pp=2), "ddp"),
        pytest.param(Axes(tp=2), "ddp", marks=pytest.mark.slow),
        pytest.param(Axes(dp=2, cp=2), "fsdp", marks=pytest.mark.slow),
        pytest.param(Axes(pp=2, dp=2, tp=2), "fsdp", marks=pytest.mark.slow),
        pytest.param(Axes(dp=2, ep=2), "fsdp", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_stopped_run_goes_on_as_if_it_had_stayed(ranks: Simulator, tmp_path: Path, axes: Axes, strategy: Any) -> None:
    size, experts = axes.world_size, 4 if axes.ep > 1 else 0
    stops = ranks.run(lambda ctx: _train(ctx, axes, strategy, tmp_path, experts, stops=True), size, default_group=True)
    assert [(stop.signal, stop.rank, stop.code) for stop in stops] == [(signal.SIGTERM, size - 1, 143)] * size
    assert [each.name for each in tmp_path.glob("step-*")] == ["step-00000001"]
    found = ranks.run(lambda ctx: _train(ctx, axes, strategy, tmp_path, experts), size, default_group=True)
    expected = _stayed(experts)
    assert {name for each in found for name in each} == expected.keys()
    for each in found:
        for name, value in each.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10, msg=name)
