# SPDX-License-Identifier: Apache-2.0
"""Parameters, optimizer state and exchanged gradients stay at their addresses, as captured graphs of a GPU need it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from steps import ByState
from torch import nn

import accel
from accel.tensors import local_part
from accel.testing import Simulator

STEPS = 4
PLAN = accel.parallel.Plan(tensor={"0": "colwise", "2": "rowwise"})
LAYOUTS: dict[str, tuple[dict[str, Any], accel.parallel.Plan | None]] = {
    "ddp": ({}, None),
    "fsdp": ({"strategy": "fsdp"}, None),
    "tp": ({"mesh": "tp=2"}, PLAN),
}


def _place(tensor: torch.Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()


def _places(ctx: accel.DistContext, plan: Any, policy: Any) -> list[tuple[list[int], list[int], list[int]]]:
    """Addresses of parameters, optimizer state and gradients in each step."""
    model = accel.prepare_model(ctx, nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), plan=plan)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    run, found = ByState(ctx, 2), list[tuple[list[int], list[int], list[int]]]()
    for _ in range(STEPS):
        for _ in range(2):
            run.begin()
            with run.accumulate(model):
                run.backward(model(torch.ones(2, 4)).square().mean())
        gradients = [_place(each.grad) for each in model.parameters() if each.grad is not None]
        run.step(optimizer, nonfinite=policy, max_norm=0.1)
        state = [each for own in optimizer.state.values() for each in own.values() if isinstance(each, torch.Tensor)]
        found.append(([_place(each) for each in model.parameters()], [_place(each) for each in state], gradients))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", ["raise", "skip", "ignore", "defer"])
def test_what_a_step_changes_stays_where_it_is(ranks: Simulator, layout: str, policy: str) -> None:
    settings, plan = LAYOUTS[layout]
    for found in ranks.run(lambda ctx: _places(accel.replace(ctx, **settings), plan, policy), 2, default_group=True):
        parameters, state, gradients = zip(*found, strict=True)
        assert all(each == parameters[0] for each in parameters)
        assert all(each == state[0] for each in state)
        assert len(gradients[0]) == len(parameters[0])
        if layout == "ddp":  # views on DDP's buckets; others are made by the backward, in a graph's own memory
            assert all(each == gradients[0] for each in gradients)
