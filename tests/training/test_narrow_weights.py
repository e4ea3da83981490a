# SPDX-License-Identifier: Apache-2.0
"""Shards in 16 bits that no precision asked for are told once, with two ways out; all other programs hear nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import accel
from accel.testing import Simulator, simulate

WAY_OUT = accel.precision.Precision(compute="bf16", params="fp32")


def told(caplog: pytest.LogCaptureFixture, fn: Any, world_size: int = 2, **settings: Any) -> list[str]:
    """What two ranks log while they prepare."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="accel.training"):
        _ = simulate(lambda ctx: fn(accel.replace(ctx, **settings)), world_size, default_group=world_size > 1)
    return [record.getMessage() for record in caplog.records]


def adapted() -> nn.Module:
    """A frozen base in 16 bits with an adapter in float32."""
    base = nn.Linear(4, 4).bfloat16().requires_grad_(False)
    return nn.Sequential(base, nn.Linear(4, 4))


def prepared(ctx: accel.DistContext, net: nn.Module) -> torch.dtype:
    """Prepare, and return the dtype in which the optimizer steps the last parameter."""
    adam = torch.optim.AdamW([each for each in net.parameters() if each.requires_grad])
    scheduler = torch.optim.lr_scheduler.ConstantLR(adam)
    _, optimizer, _ = accel.prepare(ctx, net, adam, scheduler)
    return optimizer.param_groups[0]["params"][-1].dtype


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_model_loaded_in_16_bits_is_told_once(caplog: Any, world_size: int, precision: str) -> None:
    def run(ctx: accel.DistContext) -> None:
        assert prepared(ctx, nn.Linear(4, 4).bfloat16()) == torch.bfloat16

    [text] = told(caplog, run, world_size, strategy="fsdp", precision=precision)
    assert "steps 2 parameters in bfloat16, such as weight" in text
    assert f'precision=accel.precision.Precision(compute="{precision}", params="fp32")' in text
    assert 'precision="pure-bf16"' in text


def test_both_ways_out_are_silent_and_do_what_they_say(caplog: Any) -> None:
    found: list[torch.dtype] = []

    def run(ctx: accel.DistContext) -> None:
        found.append(prepared(ctx, nn.Linear(4, 4).bfloat16()))

    assert told(caplog, run, strategy="fsdp", precision=WAY_OUT) == []
    assert told(caplog, run, strategy="fsdp", precision="pure-bf16") == []
    assert found == [torch.float32] * 2 + [torch.bfloat16] * 2


@pytest.mark.parametrize(
    ("strategy", "precision", "net"),
    [
        ("fsdp", "bf16", lambda: nn.Linear(4, 4)),
        ("fsdp", "bf16", adapted),
        ("fsdp", "fp32", lambda: nn.Linear(4, 4).bfloat16()),
        ("ddp", "bf16", lambda: nn.Linear(4, 4).bfloat16()),
    ],
)
def test_other_programs_hear_nothing(caplog: Any, strategy: Any, precision: Any, net: Any) -> None:
    assert told(caplog, lambda ctx: prepared(ctx, net()), strategy=strategy, precision=precision) == []


def test_a_model_that_is_prepared_to_be_evaluated_is_no_matter(caplog: Any) -> None:
    def run(ctx: accel.DistContext) -> None:
        _ = accel.prepare(ctx, nn.Linear(4, 4).bfloat16())

    assert told(caplog, run, strategy="fsdp", precision="bf16") == []


def test_parameters_made_float32_train_as_those_loaded_so(ranks: Simulator) -> None:
    def weights(ctx: accel.DistContext, *, loaded: torch.dtype, precision: Any) -> torch.Tensor:
        ctx = accel.replace(ctx, strategy="fsdp", precision=precision)
        torch.manual_seed(0)
        net = nn.Linear(4, 4).bfloat16().to(loaded)
        model, optimizer = accel.prepare(ctx, net, torch.optim.AdamW(net.parameters(), lr=1e-4))
        for _ in range(3):
            with accel.autocast(ctx):
                loss = model(torch.ones(2, 4)).float().square().mean()
            accel.backward(ctx, loss, accel.loss_scale(ctx))
            _ = accel.optimizer_step(ctx, optimizer, accel.loss_scale(ctx))
        return accel.get_state_dict(ctx, model, dst=None)["weight"]

    made = ranks.run(lambda ctx: weights(ctx, loaded=torch.bfloat16, precision=WAY_OUT), 2, default_group=True)[0]
    loaded = ranks.run(lambda ctx: weights(ctx, loaded=torch.float32, precision="bf16"), 2, default_group=True)[0]
    assert made.dtype == torch.float32
    assert torch.equal(made, loaded)
