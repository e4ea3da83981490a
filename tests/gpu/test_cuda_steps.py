# SPDX-License-Identifier: Apache-2.0
"""Waits of a step's policies, compiled graphs and shards on a CUDA device: `pytest -m gpu`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))


def trained(ctx: accel.DistContext, model: nn.Module, steps: int = 6) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and parameters of a model that is prepared already."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler, generator, losses = accel.loss_scale(ctx), torch.Generator().manual_seed(1), list[float]()
    for _ in range(steps):
        inputs = torch.randn(16, 64, generator=generator).to(ctx.device)
        with accel.autocast(ctx):
            loss = model(inputs).float().square().mean()
        accum = accel.training.parts.backward(ctx, loss, scaler)
        scaler = accel.training.parts.optimizer_step(ctx, optimizer, scaler, accum, max_norm=1.0).scaler
        losses.append(loss.item())
    return losses, [accel.tensors.full_tensor(each).detach().float().cpu() for each in model.parameters()]


def host_waits(work: Callable[[], Any]) -> int:
    """How often the host waits for the device, as torch notices it."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            _ = work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(each.message) for each in seen)


@pytest.mark.parametrize(("policy", "waits"), [("raise", 1), ("skip", 1), ("ignore", 0), ("defer", 0)])
def test_a_policy_waits_as_often_as_the_page_says(policy: Any, waits: int) -> None:
    ctx = accel.single("cuda")
    model = accel.prepare_model(ctx, make_model())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs, weight, scaler = (
        torch.randn(16, 64, device=ctx.device),
        torch.tensor(3, device=ctx.device),
        accel.LossScale(),
    )

    def step() -> None:
        accum = accel.Accumulation().next()
        accum = accel.training.parts.backward(ctx, model(inputs).square().mean(), scaler, accum, weight=weight)
        _ = accel.training.parts.optimizer_step(ctx, optimizer, scaler, accum, max_norm=1.0, nonfinite=policy)

    step()
    assert host_waits(step) == waits


def test_a_deferred_step_leaves_all_as_it_was_and_raises_at_the_next() -> None:
    ctx = accel.single("cuda")
    model = accel.prepare_model(ctx, make_model())
    optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), accel.LossScale()
    inputs = torch.randn(16, 64, device=ctx.device)

    def step(scale: float) -> accel.training.Step:
        accum = accel.training.parts.backward(ctx, (model(inputs) * scale).square().mean(), scaler)
        return accel.training.parts.optimizer_step(ctx, optimizer, scaler, accum, nonfinite="defer")

    assert step(1.0).stepped is None
    before = [each.detach().clone() for each in model.parameters()]
    assert step(float("nan")).stepped is None
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(accel.errors.NonFiniteError):
        step(1.0)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:TensorFloat32:UserWarning", "ignore:The CUDA Graph is empty:UserWarning"
)  # of torch's own modules, at first use
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_trains_as_the_eager_one(mode: str) -> None:
    pytest.importorskip("triton")
    ctx = accel.single("cuda")
    eager, _ = trained(ctx, accel.prepare_model(ctx, make_model()))
    model = accel.prepare_model(ctx, accel.compile_model(make_model(), mode=mode))
    compiled, _ = trained(ctx, model)
    assert compiled == pytest.approx(eager, rel=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_shards_of_one_rank_train_as_the_whole_and_resume(
    nccl: accel.DistContext, tmp_path: Path, precision: Any
) -> None:
    alone = accel.single("cuda", precision=precision)
    whole, _ = trained(alone, accel.prepare_model(alone, make_model()))
    ctx = accel.replace(nccl, strategy="fsdp", precision=precision)
    model = accel.prepare_model(ctx, make_model())
    losses, parameters = trained(ctx, model)
    assert losses == pytest.approx(whole, rel=1e-4 if precision == "fp32" else 5e-2)
    saved = accel.save_state(ctx, tmp_path / "out", {"model": model}, step=1)
    other = accel.prepare_model(ctx, make_model())
    accel.load_state(ctx, saved, {"model": other})
    loaded = [accel.tensors.full_tensor(each).detach().float().cpu() for each in other.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(parameters, loaded, strict=True))
