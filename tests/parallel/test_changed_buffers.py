# SPDX-License-Identifier: Apache-2.0
"""Buffers that a training forward changes are logged once; nothing is refused, and the usual models are silent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catching import assert_raises
from steps import begin_batch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import accel
from accel.testing import Simulator

WIDTH, SAID = 4, "the forward changes buffers in training"


class Running(nn.Module):
    """Centers its input by a running mean, changed in place or replaced by another tensor."""

    mean: Tensor
    calls: Tensor

    def __init__(self, way: str = "in place") -> None:
        super().__init__()
        self.way = way
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.way == "in place":
            self.mean.lerp_(x.detach().mean(0), 0.1)
        elif self.training and self.way == "replaced":
            self.mean = self.mean.lerp(x.detach().mean(0), 0.1)
        elif self.way == "made anew":  # as positions that a forward computes again
            self.mean = self.mean.clone()
        self.calls += 1
        return self.linear(x - self.mean)


def _normed(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), layer)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "in place": (Running, "mean"),
    "replaced": (lambda: nn.Sequential(nn.Tanh(), Running("replaced")), "1.mean"),
    "many": (lambda: nn.Sequential(*(Running() for _ in range(5))), "0.mean, 1.mean, 2.mean and 2 more"),
    "parametrized": (
        lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        "parametrizations.weight.0._u, parametrizations.weight.0._v",
    ),
    "spectral_norm": (lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), "weight_u, weight_v"),
}
SILENT: dict[str, Callable[[], nn.Module]] = {
    "counters": lambda: Running("counted"),
    "made anew": lambda: Running("made anew"),
    "batch norm": lambda: _normed(nn.BatchNorm1d(WIDTH)),
    "no buffers": lambda: nn.Linear(WIDTH, WIDTH),
    "frozen": lambda: Running().requires_grad_(False),
}


def _run(ctx: accel.DistContext, model: nn.Module, forwards: int = 3) -> None:
    x = torch.linspace(-1, 1, 3 * WIDTH, requires_grad=True).view(3, WIDTH)
    for _ in range(forwards):
        model(x + ctx.rank).sum().backward()


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if SAID in each.getMessage()]


@pytest.mark.filterwarnings("ignore:.*weight_norm|.*spectral_norm:FutureWarning")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", ["alone", "ddp"])
def test_changed_buffers_are_logged_once(
    ranks: Simulator, caplog: pytest.LogCaptureFixture, name: str, layout: str
) -> None:
    make, names = MODELS[name]
    world = 1 if layout == "alone" else 2
    ranks.run(lambda ctx: _run(ctx, accel.prepare_model(ctx, make())), world, default_group=True)
    [line] = _lines(caplog)
    assert f"({names})" in line
    assert "accumulation and pipelines" in line


def test_shards_log_them_too(ranks: Simulator, caplog: pytest.LogCaptureFixture) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, strategy="fsdp")
        _run(ctx, accel.prepare_model(ctx, nn.Sequential(nn.Linear(WIDTH, WIDTH), Running())))

    ranks.run(rank, 2, default_group=True)
    [line] = _lines(caplog)
    assert "(1.mean)" in line


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_buffers_of_rank_0_that_replace_the_others_are_no_change(
    ranks: Simulator, caplog: pytest.LogCaptureFixture, strategy: Any
) -> None:
    def rank(ctx: accel.DistContext) -> None:
        _run(ctx, accel.prepare_model(accel.replace(ctx, strategy=strategy), Running("counted")))

    ranks.run(rank, 2, default_group=True)
    assert not _lines(caplog)


def test_each_stage_of_a_pipeline_logs_its_own(ranks: Simulator, caplog: pytest.LogCaptureFixture) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="pp=2,dp=2")
        model = accel.prepare_model(ctx, nn.Sequential(*(Running() for _ in range(4))))
        for _ in range(2):
            given = (begin_batch(ctx), torch.ones(4, WIDTH))
            _ = accel.forward_backward(ctx, model, *given, loss_fn=torch.sum, weight=4)
            accel.training.clear_gradients(model)

    ranks.run(rank, 4, default_group=True)
    assert sorted(line.partition("(")[2].partition(")")[0] for line in _lines(caplog)) == [
        "0.mean, 1.mean",
        "2.mean, 3.mean",
    ]


class Bounded(nn.Module):
    """Bounds the rows of its weight that it looks up, in the function alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)
        torch.nn.init.constant_(self.table.weight, 9.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.embedding(torch.tensor([0]), self.table.weight, max_norm=1.0)


def test_shards_refuse_rows_that_a_lookup_bounds(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        model = accel.prepare_model(accel.replace(ctx, strategy="fsdp"), Bounded())
        with assert_raises(accel.errors.ConfigError, got="table.weight by max_norm"):
            _run(ctx, model)

    ranks.run(rank, 2, default_group=True)


@pytest.mark.parametrize("name", SILENT)
def test_counters_batch_norms_and_unchanged_buffers_are_silent(caplog: pytest.LogCaptureFixture, name: str) -> None:
    ctx = accel.single()
    _run(ctx, accel.prepare_model(ctx, SILENT[name]()))
    assert not _lines(caplog)


def test_evaluation_neither_logs_nor_ends_the_look(caplog: pytest.LogCaptureFixture) -> None:
    ctx = accel.single()
    model = accel.prepare_model(ctx, Running())
    hooks = len(model._forward_hooks)
    with torch.no_grad():
        _ = model(torch.ones(2, WIDTH))
    _ = model.eval()(torch.ones(2, WIDTH))
    assert not _lines(caplog)
    with pytest.raises(RuntimeError):
        _ = model.train()(torch.ones(2, WIDTH + 1))
    averaged = copy.deepcopy(model)
    _run(ctx, model)
    assert len(_lines(caplog)) == 1
    assert len(model._forward_hooks) < hooks
    _run(ctx, averaged)
    assert len(_lines(caplog)) == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_graph_of_the_whole_model_does_not_break(when: str) -> None:
    ctx = accel.single()
    torch.compiler.reset()
    model: Any = Running()
    if when == "before":
        accel.compile_model(model, backend="aot_eager", fullgraph=True)
    model = accel.prepare_model(ctx, model)
    if when == "after":
        accel.compile_model(model, backend="aot_eager", fullgraph=True)
    _run(ctx, model)
    torch.compiler.reset()
