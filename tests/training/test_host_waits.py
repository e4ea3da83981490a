# SPDX-License-Identifier: Apache-2.0
"""Where a step needs no number on the host it reads none: on torch's `meta` device, whose tensors hold nothing to read.

A host that reads from an accelerator waits for it.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from steps import ByState
from torch import nn

import accel


def _step(ctx: accel.DistContext, *, tokens: bool, apart: bool = False, **options):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(ctx.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    model = accel.prepare_model(ctx, model)
    run = ByState(ctx, 2, scaler=accel.LossScale(scale=8.0))
    for micro in range(2):
        run.begin(last=micro == 1)
        weight = torch.ones((), dtype=torch.int64, device=ctx.device) if tokens else 3
        with run.accumulate(model):
            loss = model(torch.ones(3, 4, device=ctx.device)).square().mean()
            run.backward(loss, weight=weight)
    if apart:
        run.clip_norm(model.parameters(), 1.0)
        run.clip_value(model.parameters(), 1.0)
        run.unscale(optimizer)
    run.step(optimizer, scheduler=scheduler, **options)
    return run


@pytest.fixture
def empty() -> accel.DistContext:
    return dataclasses.replace(accel.single(), device=torch.device("meta"))


LIMITS = [{}, {"max_norm": 1.0}, {"max_norm": 1.0, "norm_type": float("inf")}, {"max_norm": [1.0]}, {"max_value": 0.1}]


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("limits", LIMITS)
def test_a_step_that_does_not_look_reads_nothing(empty, tokens, apart, limits):
    run = _step(empty, tokens=tokens, apart=apart, nonfinite="ignore", **limits)
    assert run.stepped
    assert (run.grad_norm is None) == ("max_norm" not in limits)


@pytest.mark.parametrize("options", [{}, {"nonfinite": "skip"}])
def test_a_step_that_looks_reads(empty, options):
    """So that the test above can fail: meta tensors refuse to be read."""
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        _step(empty, tokens=True, **options)
