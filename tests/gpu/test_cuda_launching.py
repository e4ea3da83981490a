# SPDX-License-Identifier: Apache-2.0
"""Launching from a process that has touched CUDA, the self-check on GPUs, and estimated memory: `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accel
from accel.cli import main
from accel.estimate import EstimatedStep, Input, measure, strategy_memory
from accel.formats import PrecisionName

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def where(ctx: accel.DistContext) -> tuple[str, int | None, float]:
    return ctx.device.type, ctx.device.index, float(torch.ones(2, device=ctx.device).sum())


def test_a_function_runs_on_all_gpus_after_cuda_was_touched_here() -> None:
    _ = torch.ones(1, device="cuda") + 1
    assert accel.notebook_launcher(where) == [("cuda", index, 2.0) for index in range(torch.cuda.device_count())]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_self_check_passes(precision: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["test", "--nproc-per-node", "auto", "--precision", precision]) == 0
    assert "6 of 6 checks passed." in capfd.readouterr().out


@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure-bf16"])
def test_estimated_memory_is_what_a_step_takes(precision: PrecisionName) -> None:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
        return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    warm = nn.Linear(64, 64).cuda()
    warm(torch.ones(8, 64, device="cuda")).sum().backward()  # cuBLAS keeps workspaces, 64 MiB on an H100
    torch.cuda.synchronize()
    libraries = torch.cuda.memory_allocated()
    described = measure(make, "encoder", [Input((16, 256, 512), "float32")])
    planned = strategy_memory(described, "ddp", EstimatedStep(precision=precision))
    ctx = accel.single("cuda", precision=precision)
    model = accel.precision.apply_precision(ctx, make().to(ctx.device))
    model, optimizer = accel.prepare(ctx, model, torch.optim.AdamW(model.parameters()))
    scaler, inputs = accel.loss_scale(ctx), torch.randn(16, 256, 512, device=ctx.device)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        with accel.autocast(ctx):
            loss = model(inputs).float().square().mean()
        kept = torch.cuda.memory_allocated()
        accum = accel.training.parts.backward(ctx, loss, scaler)
        scaler = accel.training.parts.optimizer_step(ctx, optimizer, scaler, accum).scaler
    assert planned.moment == "loss"
    assert kept - libraries == pytest.approx(planned.total, rel=0.1)
