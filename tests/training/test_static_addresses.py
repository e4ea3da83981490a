# SPDX-License-Identifier: Apache-2.0
"""Parameters, optimizer state and exchanged gradients stay at their addresses, as captured graphs of a GPU need it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from steps import ByState, begin_batch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class OutsideMemory(TorchDispatchMode):
    """Notes the memory that operators take and have not made."""

    def __init__(self) -> None:
        super().__init__()
        self.places = set[int]()
        self._made = dict[int, torch.UntypedStorage]()  # kept, so that no other memory gets its place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taken = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        self.places |= {place for each in taken if (place := _place(each)) not in self._made}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and _place(each) not in self.places:
                self._made[_place(each)] = each.untyped_storage()
        return result


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("policy", ["raise", "skip", "ignore", "defer"])
def test_a_micro_batch_takes_the_memory_of_the_first_one(ranks: Simulator, policy: Any, world_size: int) -> None:
    """By the loop that the page on waits describes: a captured graph would find all that it reads and writes."""

    def rank(ctx: accel.DistContext) -> list[set[int]]:
        model = accel.prepare_model(ctx, nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        state = accel.train_state(ctx)
        inputs, found = torch.zeros(2, 4), list[set[int]]()
        captured: list[torch.Tensor] = []
        for step in range(STEPS):
            inputs.copy_(torch.full((2, 4), float(step)))
            for parameter, grad in zip(model.parameters(), captured, strict=False):
                parameter.grad = grad.zero_()
            with OutsideMemory() as outside:
                state = accel.backward(ctx, model(inputs).square().mean(), begin_batch(ctx, state))
            if step:  # the first makes the gradients
                found.append(outside.places)
            captured = [each.grad for each in model.parameters() if each.grad is not None]
            state = accel.optimizer_step(ctx, optimizer, state, max_norm=1.0, nonfinite=policy)
        expected = {_place(inputs), *map(_place, model.parameters()), *map(_place, captured)}
        assert expected <= found[0]
        return found

    for found in ranks.run(rank, world_size):
        assert all(each == found[0] for each in found)
