# SPDX-License-Identifier: Apache-2.0
"""The memory of a step of a model of any kind, described by a run of its code, held against live tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_ranks import Live, fake_rank
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import accel
from accel.estimate import EstimatedStep, Input, measure, strategy_memory
from accel.estimate._memory import STRATEGIES
from accel.tensors import local_part
from accel.topology import Axes

OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda parameters, **named: torch.optim.SGD(parameters, momentum=0.9, **named),
}
# bf16 takes CPUs without it half a minute a step, and optimizers differ in their state alone
STEPS = [("fp32", name) for name in OPTIMIZERS] + [
    pytest.param("bf16", name, marks=[pytest.mark.slow] * (name != "adamw")) for name in OPTIMIZERS
]
# what operations of a backward take for themselves is not counted, and grows with the batch
CALLS = {(4, 16, 256): 0.1, (32, 64, 256): 0.16}


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, shape: tuple[int, ...], live: Live, bf16: bool) -> None:
    """Two steps; the second is measured, as it has a state of the optimizer from its start."""
    inputs = torch.zeros(shape)
    for _ in range(2):
        live.restart()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(inputs).float().sum()
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("shape", "off"), CALLS.items())
@pytest.mark.parametrize(("precision", "optimizer"), STEPS)
def test_a_step_of_one_rank_is_as_estimated(precision: Any, optimizer: str, shape: tuple[int, ...], off: float) -> None:
    described = measure(encoder, "encoder", [Input(shape, "float32")])
    estimated = strategy_memory(described, "ddp", EstimatedStep(precision=precision, optimizer=optimizer))
    model = encoder()
    with Live([*model.parameters()]) as live:
        train(model, OPTIMIZERS[optimizer](model.parameters(), foreach=True), shape, live, precision == "bf16")
    assert estimated.total == pytest.approx(live.peak, rel=off), estimated


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp-keep"])
@pytest.mark.parametrize(("shape", "off"), CALLS.items())
def test_a_step_of_shards_is_as_estimated(
    strategy: str, shape: tuple[int, ...], off: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = measure(encoder, "encoder", [Input(shape, "float32")])
    estimated = strategy_memory(described, strategy, EstimatedStep(), 64)
    with fake_rank(monkeypatch, Axes(dp=64), strategy="fsdp") as ctx:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake:
            model = encoder()
        model = accel.prepare_model(ctx, model, plan=STRATEGIES[strategy].plan)
        known = [local_part(each) for each in model.parameters()]
        with fake, Live(known) as live:
            train(model, torch.optim.AdamW(model.parameters(), foreach=True), shape, live, bf16=True)
    assert estimated.total == pytest.approx(live.peak, rel=off), estimated
