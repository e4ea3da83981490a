# SPDX-License-Identifier: Apache-2.0
"""Trainable weights of 16 bits: fp16 is refused, bf16 reported once, by one check; all other programs hear nothing."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catching import assert_raises
from steps import begin_batch
from torch import nn

import accel
from accel.errors import PrepareError
from accel.precision import Precision
from accel.testing import Simulator, simulate

WAY_OUT = Precision(compute="bf16", params="fp32")
Adam = torch.optim.AdamW


class Declares(torch.optim.SGD):
    """An optimizer that rounds at random, as torchao's do on request."""

    def __init__(self, parameters: Any, *, bf16_stochastic_round: bool) -> None:
        super().__init__(parameters, lr=0.1)
        self.bf16_stochastic_round = bf16_stochastic_round


class InGroups(torch.optim.SGD):
    """An optimizer whose groups say that it carries what rounding loses."""

    def __init__(self, parameters: Any, **option: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group.update(option)


def wrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A wrapper that shares its optimizer's groups and state, as Accelerate's."""
    outer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    vars(outer).update(optimizer=optimizer, state=optimizer.state, param_groups=optimizer.param_groups)
    return outer


def told(caplog: pytest.LogCaptureFixture, fn: Any, world_size: int = 2, **settings: Any) -> list[str]:
    """What the ranks log while they prepare."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="accel.training"):
        _ = simulate(lambda ctx: fn(accel.replace(ctx, **settings)), world_size, default_group=world_size > 1)
    return [record.getMessage() for record in caplog.records]


def trained(net: nn.Module) -> list[nn.Parameter]:
    return [each for each in net.parameters() if each.requires_grad]


def together(ctx: accel.DistContext, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    _ = accel.prepare(ctx, scheduler, optimizer, net)


def apart(ctx: accel.DistContext, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    _ = accel.prepare(ctx, net)
    _ = accel.prepare_optimizer(ctx, optimizer)
    _ = accel.prepare_optimizer(ctx, optimizer)


def in_two_calls(ctx: accel.DistContext, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    _ = accel.prepare_model(ctx, net)
    _ = accel.prepare(ctx, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))


WAYS = [together, apart, in_two_calls]


def adapted(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A frozen base in 16 bits with an adapter in float32."""
    base = nn.Linear(4, 4).to(dtype).requires_grad_(False)
    return nn.Sequential(base, nn.Linear(4, 4))


def embedded(dtype: torch.dtype) -> nn.Module:
    """Only the embedding has 16 bits."""
    return nn.Sequential(nn.Embedding(4, 4).to(dtype), nn.Linear(4, 4))


def buffered() -> nn.Module:
    net = nn.Linear(4, 4)
    net.register_buffer("table", torch.ones(4, dtype=torch.float16))
    return net


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("net", [lambda dtype: nn.Linear(4, 4).to(dtype), embedded])
@pytest.mark.parametrize(
    ("strategy", "precision", "world_size"),
    [("ddp", "fp16", 1), ("ddp", "bf16", 2), ("ddp", "fp32", 1), ("fsdp", "fp16", 2), ("fsdp", "fp32", 1)],
)
def test_every_strategy_and_precision_refuses_fp16_and_reports_bf16_once(
    caplog: Any, way: Any, net: Any, strategy: str, precision: str, world_size: int
) -> None:
    def refused(ctx: accel.DistContext) -> None:
        half = net(torch.float16)
        before = [id(each) for each in half.parameters()]
        groups = [{"params": [each], "lr": 0.1} for each in half.parameters()]
        with assert_raises(PrepareError, problem="weights in fp16", fix=r"net\.float\(\).*params=\"fp32\""):
            way(ctx, half, torch.optim.SGD(groups))
        if way is together:  # nothing has been changed
            assert [id(each) for each in half.parameters()] == before

    def reported(ctx: accel.DistContext) -> None:
        low = net(torch.bfloat16)
        way(ctx, low, Adam(low.parameters()))

    settings = {"strategy": strategy, "precision": precision}
    assert told(caplog, refused, world_size, **settings) == []
    [text] = told(caplog, reported, world_size, **settings)
    assert "net.float()" in text
    assert 'params="fp32"' in text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("precision", [Precision(compute="fp16", outputs="fp32", fp32_modules=("1",)), "fp32"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_lines_to_write_work(caplog: Any, dtype: torch.dtype, precision: Any, strategy: str) -> None:
    """Each line of the error, and of the warning, gives a program that hears nothing."""

    def low() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(dtype)

    def said(ctx: accel.DistContext) -> str:
        net = low()
        try:
            together(ctx, net, Adam(net.parameters()))
        except PrepareError as error:
            return error.fix
        return caplog.records[-1].getMessage()

    def follow(ctx: accel.DistContext, line: str) -> None:
        for way in (together, apart):
            net = low()
            names = {"accel": accel, "ctx": ctx, "net": net}
            exec(line, names)
            way(names["ctx"], net, Adam(net.parameters()))
            assert torch.float16 not in {each.dtype for each in net.parameters()}

    with caplog.at_level(logging.WARNING, logger="accel.training"):
        text = simulate(lambda ctx: said(accel.replace(ctx, strategy=strategy, precision=precision)), 1)[0]
    lines = re.findall(
        r"net\.float\(\)|ctx = accel\.replace\(ctx, precision=(?:\"pure-bf16\"|accel[\w.]*\((?:[^()]|\([^()]*\))*\))\)",
        text,
    )
    assert len(lines) == (3 if dtype is torch.bfloat16 else 2)
    for line in lines:
        assert told(caplog, lambda ctx, line=line: follow(ctx, line), 1, strategy=strategy, precision=precision) == []


def test_a_line_that_leaves_batch_norms_as_they_are_is_not_named() -> None:
    ctx = accel.single(precision="fp16")
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).half()
    with pytest.raises(PrepareError) as caught:
        together(ctx, net, Adam(net.parameters()))
    assert caught.value.fix == "net.float() before prepare."


MASTERS = Precision(compute="bf16", params="bf16", master_weights="fp32")


@pytest.mark.parametrize(
    ("precision", "net", "optimizer"),
    [
        ("bf16", lambda: nn.Linear(4, 4), Adam),
        ("fp16", lambda: nn.Linear(4, 4), Adam),
        ("bf16", adapted, Adam),
        ("fp16", lambda: adapted(torch.float16), Adam),
        ("fp16", buffered, Adam),
        ("pure-bf16", lambda: nn.Linear(4, 4).bfloat16(), Adam),
        (WAY_OUT, lambda: nn.Linear(4, 4).half(), Adam),
        (MASTERS, lambda: nn.Linear(4, 4).half(), Adam),
        (Precision(compute="fp16", master_weights="fp32"), lambda: nn.Linear(4, 4).half(), Adam),
        ("bf16", lambda: nn.Linear(4, 4).bfloat16(), lambda each: Declares(each, bf16_stochastic_round=True)),
        ("fp16", lambda: nn.Linear(4, 4).half(), lambda each: InGroups(each, kahan_sum=None)),
        ("bf16", lambda: nn.Linear(4, 4).bfloat16(), lambda each: InGroups(each, use_kahan_summation=True)),
        ("bf16", lambda: nn.Linear(4, 4).bfloat16(), lambda each: wrapped(InGroups(each, master_weights=True))),
    ],
)
@pytest.mark.parametrize("way", [together, apart])
def test_other_programs_hear_nothing(caplog: Any, precision: Any, net: Any, optimizer: Any, way: Any) -> None:
    def run(ctx: accel.DistContext) -> None:
        made = net()
        way(ctx, made, optimizer(trained(made)))

    assert told(caplog, run, 1, precision=precision) == []


@pytest.mark.parametrize(
    "optimizer",
    [lambda each: Declares(each, bf16_stochastic_round=False), lambda each: InGroups(each, use_kahan_summation=False)],
)
def test_an_option_that_is_off_declares_nothing(caplog: Any, optimizer: Callable[[Any], Any]) -> None:
    low = nn.Linear(4, 4).bfloat16()
    assert len(told(caplog, lambda ctx: together(ctx, low, optimizer(low.parameters())), 1, precision="bf16")) == 1


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_models_without_an_optimizer_and_frozen_references_are_no_matter(caplog: Any, strategy: str) -> None:
    def run(ctx: accel.DistContext) -> None:
        net = nn.Linear(4, 4)
        reference = nn.Linear(4, 4).half().requires_grad_(False)
        _ = accel.prepare(ctx, nn.Linear(4, 4).half())
        _ = accel.prepare(ctx, reference, net, Adam([*net.parameters(), *reference.parameters()]))

    assert told(caplog, run, strategy=strategy, precision="fp16") == []


def test_parameters_made_float32_train_as_those_loaded_so(ranks: Simulator) -> None:
    def weights(ctx: accel.DistContext, *, loaded: torch.dtype, precision: Any) -> torch.Tensor:
        ctx = accel.replace(ctx, strategy="fsdp", precision=precision)
        torch.manual_seed(0)
        net = nn.Linear(4, 4).bfloat16().to(loaded)
        model, optimizer = accel.prepare(ctx, net, torch.optim.AdamW(net.parameters(), lr=1e-4))
        for _ in range(3):
            with accel.autocast(ctx):
                loss = model(torch.ones(2, 4)).float().square().mean()
            state = accel.backward(ctx, loss, begin_batch(ctx))
            _ = accel.optimizer_step(ctx, optimizer, state)
        return accel.get_state_dict(ctx, model, dst=None)["weight"]

    made = ranks.run(lambda ctx: weights(ctx, loaded=torch.bfloat16, precision=WAY_OUT), 2, default_group=True)[0]
    loaded = ranks.run(lambda ctx: weights(ctx, loaded=torch.float32, precision="bf16"), 2, default_group=True)[0]
    assert made.dtype == torch.float32
    assert torch.equal(made, loaded)
