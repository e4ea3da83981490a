# SPDX-License-Identifier: Apache-2.0
"""Optimizer state is loaded in place where nothing can tell the difference, and into new tensors elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from ckpt_helpers import CPU, Run, equal, network
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import accel
from accel.context import DistContext
from accel.errors import CheckpointError
from accel.tensors import local_part
from accel.testing import simulate


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [slot for state in optimizer.state.values() for key, slot in state.items() if key != "step"]


def share_memory(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg_sq"] = state["exp_avg"]


def view_a_buffer(optimizer: Any) -> None:
    for parameter, state in optimizer.state.items():
        state["exp_avg"] = torch.zeros(2, *parameter.shape)[0]


class Careful(torch.optim.AdamW):
    """Looks at what it is given."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for each in self.state.values():
            each["seen"] = float(each["exp_avg"].sum())


def make(kind: type[torch.optim.AdamW] = torch.optim.AdamW) -> Run:
    run = Run(lambda params: kind(params, lr=0.01))
    run.step(2)
    return run


def test_moments_keep_their_memory(tmp_path: Path) -> None:
    saved, run = make(), make()
    path = accel.save_state(CPU, tmp_path, saved.items(), step=1)
    run.step()
    before = moments(run.optimizer)
    run.load(CPU, path)
    assert all(one is other for one, other in zip(before, moments(run.optimizer), strict=True))
    assert equal(run.state(), saved.state())


@pytest.mark.parametrize("change", [share_memory, view_a_buffer])
def test_memory_that_holds_something_else_is_left_alone(change: Callable[[Any], None], tmp_path: Path) -> None:
    saved, run = make(), make()
    path = accel.save_state(CPU, tmp_path, saved.items(), step=1)
    change(run.optimizer)
    shared = {id(slot): slot for slot in moments(run.optimizer)}
    before = [slot.clone() for slot in shared.values()]
    run.load(CPU, path)
    assert equal(run.state(), saved.state())
    kept = {id(slot) for slot in moments(run.optimizer)}
    assert all(torch.equal(o, n) for (i, o), n in zip(shared.items(), before, strict=True) if i not in kept)


@pytest.mark.parametrize("hooked", [False, True])
def test_code_that_looks_at_a_loaded_state_sees_it(hooked: bool, tmp_path: Path) -> None:
    kind = torch.optim.AdamW if hooked else Careful
    saved, run = make(kind), make(kind)
    saved.step()
    expected, seen = [float(state["exp_avg"].sum()) for state in saved.optimizer.state.values()], list[float]()
    path = accel.save_state(CPU, tmp_path, saved.items(), step=1)
    if hooked:
        run.optimizer.register_load_state_dict_post_hook(
            lambda optimizer: seen.extend(float(state["exp_avg"].sum()) for state in optimizer.state.values())
        )
    run.load(CPU, path)
    assert (seen if hooked else [state["seen"] for state in run.optimizer.state.values()]) == expected


def test_nothing_has_changed_when_another_item_refuses_its_state(tmp_path: Path) -> None:
    class Picky:
        def __init__(self, number: int) -> None:
            self.number = number

        def state_dict(self) -> dict[str, int]:
            return {"number": self.number}

        def load_state_dict(self, state: dict[str, int]) -> None:
            if state["number"] != self.number:
                raise ValueError("no")

    saved, run = make(), make()
    run.step()
    path = accel.save_state(CPU, tmp_path, saved.items() | {"zzz": Picky(1)}, step=1)
    before = [slot.clone() for slot in moments(run.optimizer)]
    with assert_raises(CheckpointError, problem="refused its state"):
        accel.load_state(CPU, path, run.items() | {"zzz": Picky(2)})
    assert equal(moments(run.optimizer), before)


def test_sharded_moments_keep_their_memory_on_their_mesh(tmp_path: Path) -> None:
    def trained(ctx: DistContext) -> tuple[Any, Any]:
        model = network()
        fully_shard(model, mesh=init_device_mesh("cpu", (ctx.world_size,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(3, 4) * (ctx.rank + 1)).square().mean().backward()
        optimizer.step()
        return model, optimizer

    def save(ctx: DistContext) -> list[torch.Tensor]:
        model, optimizer = trained(ctx)
        accel.save_state(ctx, tmp_path, {"model": model, "optimizer": optimizer}, step=1)
        return [slot.full_tensor() for slot in moments(optimizer)]

    def load(ctx: DistContext) -> tuple[bool, list[torch.Tensor]]:
        model, optimizer = trained(ctx)
        before = moments(optimizer)
        for slot in before:
            slot.mul_(2)
        accel.load_state(ctx, tmp_path / "step-00000001", {"model": model, "optimizer": optimizer})
        after = moments(optimizer)
        kept = [one is other for one, other in zip(before, after, strict=True) if local_part(one).numel()]
        return all(kept), [slot.full_tensor() for slot in after]

    expected = simulate(save, 2, default_group=True)[0]
    for world in (2, 3):
        for kept, found in simulate(load, world, default_group=True):
            assert kept
            assert equal(found, expected)
