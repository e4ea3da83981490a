# SPDX-License-Identifier: Apache-2.0
"""Runs of the language model of the tests of meshes with an optimizer that takes the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import language_models as lm
import pytest
import torch
from recorded_ranks import Steps, recorded
from torch import Tensor, nn
from torch.utils.data import DataLoader

import accel
from accel.tensors import full_tensor
from accel.testing import Simulator


def largest(found: Any, expected: Any) -> float:
    return max(float((found[name] - each).abs().max()) for name, each in expected.items())


MESHES = {
    "ddp": ("dp=2", "ddp", 2),
    "fsdp": ("dp=3", "fsdp", 3),
    "hsdp": ("dp_replicate=2,dp_shard=2", "fsdp", 4),
    "tp": ("tp=2", "ddp", 2),
    "fsdp x tp": ("dp=2,tp=2", "fsdp", 4),
    "cp x fsdp": ("cp=2,dp=2", "fsdp", 4),
    "pp": ("pp=2", "ddp", 2),
    "pp x fsdp": ("pp=2,dp=2", "fsdp", 4),
    "ep x fsdp": ("ep=2,dp=2", "fsdp", 2),
    "ep x fsdp x tp": ("ep=2,dp=2,tp=2", "fsdp", 4),
}


def model_of(ctx: accel.DistContext, of_model: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any, Any]:
    """A prepared model, its optimizer, and the state at the start."""
    model, optimizer = lm.make_objects(ctx, of_model=of_model)
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=lm.plan_of())
    return model, optimizer, accel.train_state(ctx)


def stepped(
    ctx: accel.DistContext, model: nn.Module, optimizer: Any, state: Any, factor: float = 1.0, **options: Any
) -> Any:
    loader = accel.prepare_loader(ctx, DataLoader(lm.rows(4), batch_size=4), global_batch=4)
    for batch in accel.batches(ctx, loader, state):
        state = state.next(batch)
        with accel.accumulate(ctx, state, model):
            logits = model(batch.data, torch.arange(lm.LENGTH).expand_as(batch.data))
            loss = accel.parallel.vocab_cross_entropy(ctx, logits, batch.data) / batch.data.numel()
            state = accel.backward(ctx, loss * factor, state)
        state = accel.optimizer_step(ctx, optimizer, state, **options)
    return state


def messages_of_a_step(
    ranks: Simulator, monkeypatch: pytest.MonkeyPatch, mesh: str, size: int, of_model: Callable[[nn.Module], Any]
) -> list[list[str]]:
    """What a step of the optimizer alone sends from each rank of an fsdp mesh, after a first one."""

    def step(ctx: accel.DistContext, steps: Steps) -> list[str]:
        ctx = accel.replace(ctx, mesh=mesh, strategy="fsdp")
        model, optimizer, state = model_of(ctx, of_model)
        _ = stepped(ctx, model, optimizer, state)
        for each in model.parameters():
            each.grad = torch.ones_like(each)
        before = len(steps[ctx.rank])
        _ = optimizer.step()
        return [one.what for each in steps[ctx.rank][before:] for one in each]

    with recorded(monkeypatch) as steps:
        return ranks.run(lambda ctx: step(ctx, steps), size, default_group=True)


def resumed(ctx: accel.DistContext, mesh: str, out: Path, epochs: int, of_model: Any) -> dict[str, Tensor]:
    """Train to an epoch from the newest checkpoint, and save there."""
    ctx = accel.replace(ctx, mesh=mesh, strategy="fsdp" if "dp=1" not in mesh else "ddp")
    model, optimizer, start = model_of(ctx, of_model)
    items = {"model": model, "optimizer": optimizer}
    state = accel.resume(ctx, out, items, start)
    while state.epoch < epochs:
        state = stepped(ctx, model, optimizer, state, max_norm=0.5)
        accel.save_state(ctx, out, items | {"state": state}, step=state.epoch)
    return {name: full_tensor(each) for name, each in accel.unwrap_model(model).named_parameters()}
