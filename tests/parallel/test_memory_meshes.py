# SPDX-License-Identifier: Apache-2.0
"""Bytes that a rank holds in a step: parameters, gradients and optimizer state fall with tp and with shards."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from language_models import make_objects, plan_of, rows
from steps import begin_batch

import accel
from accel.parallel import Axes
from accel.testing import Simulator

WHOLE = ("norm", "places", "out.bias", "down.bias")  # in the names of what tensor parallelism does not divide


def _live_bytes() -> int:
    """Bytes of all plain tensors of this process, each memory once."""
    _ = gc.collect()
    found = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    storages = {each.data_ptr(): each.nbytes() for each in (tensor.untyped_storage() for tensor in found)}
    return sum(storages.values())


def _trained(ctx: accel.DistContext) -> tuple[Any, ...]:
    """Model, optimizer and gradients between the second backward and its step."""
    model, optimizer = make_objects(ctx, optimizer=torch.optim.AdamW)
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan_of())
    share, shares = ctx.data_parallel
    for step in range(2):
        part = accel.parallel.split_sequence(ctx, {"ids": rows(4)[share::shares]}, shift=())
        state = begin_batch(ctx)
        _, state = accel.forward_backward(
            ctx, model, state, part, loss_fn=lambda logits: logits.square().sum(), weight=len(part["ids"])
        )
        if step == 0:
            _ = accel.optimizer_step(ctx, optimizer, state)
    gradients = [each.grad for each in accel.unwrap_model(model).parameters()]  # torch makes these objects when asked
    assert all(each is not None for each in gradients)
    return model, optimizer, gradients


def _held(ctx: accel.DistContext, axes: Axes, strategy: Any) -> int:
    """Bytes that all ranks hold for a model, beyond a context's own, which it has since an earlier one."""
    ctx = accel.replace(ctx, mesh=str(axes) or "dp=1", strategy=strategy)

    def counted() -> int:
        accel.wait_for_everyone(ctx)
        found = _live_bytes() if ctx.is_main_process else 0
        accel.wait_for_everyone(ctx)
        return found

    _ = _trained(ctx)
    before = counted()
    kept = _trained(ctx)
    after = counted()
    del kept
    return after - before


@pytest.mark.parametrize(
    ("axes", "strategy"),
    [
        pytest.param(Axes(), "ddp", marks=pytest.mark.slow),
        (Axes(dp=2, tp=2), "fsdp"),
        pytest.param(Axes(dp=4), "fsdp", marks=pytest.mark.slow),
        pytest.param(Axes(tp=4), "ddp", marks=pytest.mark.slow),
        pytest.param(Axes(dp=4, tp=2), "fsdp", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_memory_falls_by_tp_times_shards(ranks: Simulator, axes: Axes, strategy: Any) -> None:
    whole, _ = make_objects(accel.single())
    expected = 0.0
    for name, each in whole.named_parameters():
        copies = 1 if any(part in name for part in WHOLE) else axes.tp
        expected += 4 * each.numel() * each.element_size() / copies / axes.dp  # beside it a gradient and two moments
    del whole
    held = ranks.run(lambda ctx: _held(ctx, axes, strategy), axes.world_size, default_group=True)[0]
    assert expected <= held / axes.world_size < 1.1 * expected
