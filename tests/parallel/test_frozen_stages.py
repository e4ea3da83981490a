# SPDX-License-Identifier: Apache-2.0
"""A rank whose stage trains nothing reports the norm of the others, in their dtype."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from steps import begin_batch
from torch import nn

import accel
from accel.parallel import Plan
from accel.parallel.axes.pipeline import sum_tied_gradients
from accel.parallel.axes.pipeline._pipeline import Tie
from accel.testing import Simulator


def _net(dtype: torch.dtype, trained: Iterable[int]) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).to(dtype).requires_grad_(False)
    for at in trained:
        net[at].requires_grad_(True)
    return net


def _norm(ctx: accel.DistContext, dtype: torch.dtype, trained: Iterable[int], given: str, way: str) -> torch.Tensor:
    ctx = accel.replace(ctx, mesh="pp=2") if ctx.world_size > 1 else ctx
    net = _net(dtype, trained)
    parameters = [each for each in net.parameters() if each.requires_grad or given == "all"]
    made: Any = accel.prepare(ctx, net, torch.optim.SGD(parameters, lr=0.1), plan=Plan(micro_batches=2))
    model, optimizer = made
    inputs = torch.linspace(-1, 2, 16).view(4, 4).to(dtype)
    state = begin_batch(ctx)
    _, state = accel.forward_backward(ctx, model, state, inputs, loss_fn=_squares, weight=4)
    if way == "value":
        accel.clip_grad_value_(ctx, model.parameters(), 1e9, state)
    if way == "unscale":
        state = accel.unscale_gradients(ctx, optimizer, state)
    if way == "clip":
        return accel.clip_grad_norm_(ctx, model.parameters(), 1e9, state)
    options = {"each": {"max_norm": [1e9]}, "unread": {"max_norm": 1e9, "nonfinite": "ignore"}}.get(way, {})
    norm = accel.optimizer_step(ctx, optimizer, state, **options).grad_norm
    assert norm is not None
    return norm


def _squares(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("trained", [(0, 1), (2, 3)], ids=["first", "last"])
@pytest.mark.parametrize(
    ("given", "way"),
    [
        ("trained", "step"),
        ("all", "unread"),
        ("trained", "each"),
        ("all", "clip"),
        ("all", "value"),
        ("all", "unscale"),
        ("trained", "unscale"),
    ],
)
def test_a_frozen_stage_reports_the_norm_of_the_others(
    ranks: Simulator, dtype: torch.dtype, trained: tuple[int, ...], given: str, way: str
) -> None:
    def run(ctx: accel.DistContext) -> torch.Tensor:
        return _norm(ctx, dtype, trained, given, way)

    [alone] = ranks.run(run, 1)
    assert alone.dtype == dtype
    for norm in ranks.run(run, 2, default_group=True):
        assert norm.dtype == dtype
        torch.testing.assert_close(norm, alone, rtol=1e-14 if dtype == torch.float64 else 1e-6, atol=0)


def test_a_tied_copy_without_a_gradient_sums_in_the_dtype_of_the_others(ranks: Simulator) -> None:
    def run(ctx: accel.DistContext) -> torch.Tensor:
        net = nn.Linear(2, 2, bias=False).bfloat16()
        net.weight.grad_dtype = torch.float32
        if ctx.rank == 0:
            net.weight.grad = torch.full((2, 2), 1 + 2**-12)  # no number of bfloat16
        sum_tied_gradients([Tie("weight", ctx.comm, net)], may_be_unused=False)
        assert net.weight.grad is not None
        return net.weight.grad

    for found in ranks.run(run, 2):
        assert torch.equal(found, torch.full((2, 2), 1 + 2**-12))
