# SPDX-License-Identifier: Apache-2.0
"""Formats, streams and averages as only a CUDA device has them: `pytest -m gpu`."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import accel
from accel.precision import Fp8, Precision
from accel.random import capture_rng, restore_rng
from accel.training import Ema

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def _ampere() -> bool:
    return torch.cuda.get_device_capability() >= (8, 0)


def test_tf32_rounds_in_its_block_only_and_in_its_backward():
    if not _ampere():
        pytest.skip("no tf32")
    ctx = accel.single("cuda", precision="tf32")
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(256, 256, device="cuda", generator=generator) for _ in range(2))
    exact = (a.double() @ b.double()).float()

    def error(product: torch.Tensor) -> float:
        return float((product - exact).abs().max() / exact.abs().max())

    assert error(a @ b) < 1e-5
    with accel.autocast(ctx):
        assert 1e-5 < error(a @ b) < 1e-2
        with accel.autocast(ctx, "fp32"):
            assert error(a @ b) < 1e-5
    assert error(a @ b) < 1e-5
    weight = a.clone().requires_grad_()
    accel.training.parts.backward(ctx, ((weight @ torch.eye(256, device="cuda")) * b).sum(), accel.loss_scale(ctx))
    assert weight.grad is not None
    assert not torch.equal(weight.grad, b)


def test_this_devices_stream_is_seeded_scoped_and_restored():
    ctx = accel.single("cuda")

    def dropped() -> list[float]:
        return nn.functional.dropout(torch.ones(64, device="cuda"), 0.5).tolist()

    accel.seeding.set_seed(ctx, 3)
    first = dropped()
    accel.seeding.set_seed(ctx, 3)
    with accel.seeding.seeded(ctx, 0):
        dropped()
    assert dropped() == first
    state = capture_rng(ctx.device)
    second = dropped()
    restore_rng(state, ctx.device)
    assert dropped() == second


def test_averages_are_those_of_the_cpu():
    averages = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        model = accel.prepare(accel.single(device), model)
        ema = Ema(model, decay=0.5)
        for _ in range(3):
            with torch.no_grad():
                model.weight.mul_(1.5)
            ema.update_(model)
        averages.append(ema.weights.get_parameter("weight").cpu())
    torch.testing.assert_close(*averages)


@pytest.mark.filterwarnings("ignore:.*get_autocast_gpu_dtype:DeprecationWarning")  # of torchao
def test_fp8_layers_train_near_bf16():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchao.float8")

    def losses(precision: Precision) -> list[float]:
        ctx = accel.single("cuda", precision=precision)
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = accel.prepare(ctx, model, optimizer)
        inputs, scaler, found = torch.randn(64, 64, device="cuda"), accel.loss_scale(ctx), []
        for _ in range(5):
            with accel.autocast(ctx):
                loss = (model(inputs).float() - inputs).square().mean()
            accel.training.parts.backward(ctx, loss, scaler)
            scaler = accel.training.parts.optimizer_step(ctx, optimizer, scaler).scaler
            found.append(loss.item())
        return found

    exact, rounded = losses(Precision(compute="bf16")), losses(Precision(compute="bf16", fp8=Fp8()))
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.05)
