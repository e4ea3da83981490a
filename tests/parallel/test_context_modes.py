# SPDX-License-Identifier: Apache-2.0
"""Models that run in training mode only are proved along cp in that mode, and matmuls of bf16 in a wide dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from catching import assert_raises
from steps import two_steps
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import accel
from accel.errors import PrepareError
from accel.testing import Simulator

WIDTH, LENGTH = 8, 16


class TrainedOnly(nn.Module):
    """Computes a bidirectional attention, whose backward, or forward, fails in evaluation mode."""

    calls: Tensor

    def __init__(self, fails: str) -> None:
        super().__init__()
        self.fails = fails
        self.embed, self.mix, self.drop = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        if not self.training and self.fails == "forward":
            raise ValueError("the number of steps is drawn in training only")
        if self.training:  # one model replaces its buffer, and one changes it
            self.calls = self.calls + 1 if self.fails == "forward" else self.calls.add_(1)
        x = self.embed(ids)
        mixed = (x @ x.transpose(-1, -2)).softmax(-1) @ self.mix(x)
        if self.fails == "backward":
            mixed.register_hook(self.changed)
        return x + mixed + 0 * self.drop(x)

    def changed(self, gradient: Tensor) -> Tensor:
        if not self.training:
            raise TypeError("no state of random numbers was kept")
        return gradient


class OtherPositions(torch.autograd.Function):
    """The values of all positions, with the gradient of some."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Tensor:
        (gradient,) = gradients
        return gradient * torch.arange(gradient.shape[1]).view(1, -1, 1)


class Wrong(TrainedOnly):
    """Has other gradients where ranks share the positions."""

    def forward(self, ids: Tensor) -> Tensor:
        return accel.parallel.local_map(OtherPositions.apply, "rows")(super().forward(ids))


def _made(kind: Callable[[str], TrainedOnly], fails: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(fails).double()


def _steps(ctx: accel.DistContext, kind: Callable[[str], TrainedOnly], fails: str) -> Any:
    model: Any = _made(kind, fails)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    ids = torch.randint(32, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    if ctx.world_size > 1:
        ctx = accel.replace(ctx, mesh="cp=2")
        ids = accel.parallel.split_sequence(ctx, {"ids": ids})["ids"]
    model, optimizer = accel.prepare(ctx, model, optimizer)
    norms = [norm for _, norm in two_steps(ctx, model, optimizer, lambda: model(ids).square().mean())]
    return norms, dict(accel.unwrap_model(model).state_dict())


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_a_model_that_fails_in_evaluation_mode_is_proved_in_training_mode(ranks: Simulator, fails: str) -> None:
    """The buffer counts two calls: the proof leaves none."""
    expected = _steps(accel.single(), TrainedOnly, fails)
    for found in ranks.run(lambda ctx: _steps(ctx, TrainedOnly, fails), 2, default_group=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


class DroppedOnly(TrainedOnly):
    """Drops weights of two attentions and activations by functions, in training, which is the only mode it has."""

    def __init__(self, fails: str) -> None:
        super().__init__(fails)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.5, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = functional.dropout(super().forward(ids), 0.5, self.training)
        x = x + functional.scaled_dot_product_attention(x, x, x, None, 0.5 if self.training else 0.0)
        return x + self.attention(x, x, x, need_weights=False)[0]


def test_dropout_by_functions_is_off_in_such_a_proof(ranks: Simulator) -> None:
    """A rank draws other masks of attention than one process, so a proof with dropout found other outputs."""
    for found in ranks.run(lambda ctx: _steps(ctx, DroppedOnly, "forward"), 2, default_group=True):
        assert all(torch.isfinite(each).all() for each in found[1].values())


class DroppedAcross(TrainedOnly):
    """Drops weights of an attention to all positions that its code calls."""

    def __init__(self, ctx: accel.DistContext, fails: str) -> None:
        super().__init__(fails)
        self.ctx = ctx

    def forward(self, ids: Tensor) -> Tensor:
        x = super().forward(ids)
        q = x.unsqueeze(1)
        attended = accel.parallel.context_attention(self.ctx, q, q, q, dropout_p=0.5 if self.training else 0.0)
        return x + attended.squeeze(1)


def test_dropout_of_context_attention_is_off_in_such_a_proof(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh="cp=2")
        return _steps(ctx, partial(DroppedAcross, ctx), "forward")

    for found in ranks.run(rank, 2, default_group=True):
        assert all(torch.isfinite(each).all() for each in found[1].values())


class Mixed(nn.Module):
    """A bidirectional attention; `wrong`: with other gradients where ranks share the positions."""

    def __init__(self, *, wrong: bool) -> None:
        super().__init__()
        self.mix, self.wrong = nn.Linear(WIDTH, WIDTH), wrong

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x)
        x = x + (x @ x.mT).softmax(-1) @ x
        return accel.parallel.local_map(OtherPositions.apply, "rows")(x) if self.wrong else x


def _mixed(ctx: accel.DistContext, *, wrong: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    ctx = accel.replace(ctx, mesh="cp=2") if ctx.world_size > 1 else ctx
    model = accel.prepare_model(ctx, Mixed(wrong=wrong).double().requires_grad_(not torch.is_inference_mode_enabled()))
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    return model, accel.parallel.split_sequence(ctx, {"x": x})["x"]


def test_gradients_are_compared_in_a_first_call_in_inference_mode(ranks: Simulator) -> None:
    """The inputs are made in that mode, or a frozen model is."""

    def rank(ctx: accel.DistContext, *, wrong: bool, is_all: bool = False) -> bool:
        with torch.inference_mode(is_all):
            model, own = _mixed(ctx, wrong=wrong)
        with torch.inference_mode():
            return model(own.clone()).is_inference()

    for is_all in (False, True):
        found = ranks.run(lambda ctx, is_all=is_all: rank(ctx, wrong=False, is_all=is_all), 2, default_group=True)
        assert found == [True, True]
    with assert_raises(PrepareError, got="a gradient of a parameter"):
        _ = ranks.run(lambda ctx: rank(ctx, wrong=True), 2, default_group=True)


def test_a_first_call_may_be_in_a_checkpoint(ranks: Simulator) -> None:
    def gradient(ctx: accel.DistContext) -> Tensor:
        model, own = _mixed(ctx, wrong=False)
        checkpoint(model, own.requires_grad_(), use_reentrant=False).square().sum().backward()
        return next(model.parameters()).grad

    found = ranks.run(gradient, 2, default_group=True)
    torch.testing.assert_close(found[0] + found[1], gradient(accel.single()), rtol=0, atol=1e-10)


def test_wrong_gradients_of_such_a_model_are_refused(ranks: Simulator) -> None:
    with assert_raises(PrepareError, got="a gradient of a parameter"):
        _ = ranks.run(lambda ctx: _steps(ctx, Wrong, "forward"), 2, default_group=True)


class OneFails(TrainedOnly):
    """Fails in evaluation mode on one rank alone, in the dtype that all ranks can compute in."""

    rank = 0

    def forward(self, ids: Tensor) -> Tensor:
        if self.embed(ids).dtype == torch.float64:
            raise TypeError("a kernel has no float64")
        if self.rank == 0 and not self.training:
            raise RuntimeError("out of memory")
        return super().forward(ids)


def test_an_evaluation_that_one_rank_cannot_run_is_an_error_on_all(ranks: Simulator) -> None:
    """No rank tries in training mode while others have gone on."""

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        net = OneFails("")
        net.rank = ctx.rank
        model = accel.prepare_model(ctx, net)
        part = accel.parallel.split_sequence(ctx, {"ids": torch.zeros(2, LENGTH, dtype=torch.int64)})
        with assert_raises(PrepareError, got="out of memory"):
            model(part["ids"])

    ranks.run(rank, 2, default_group=True)


class GroupedExperts(nn.Module):
    """Computes the tokens of two experts by matmuls of bf16, which have no wide dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.experts = nn.Embedding(32, 16), nn.Parameter(torch.randn(2, 16, 16))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        order = (ids.flatten() % 2).argsort(stable=True)
        ends = torch.bincount(ids.flatten() % 2, minlength=2).cumsum(0).int()
        rows = x.flatten(0, 1)[order].bfloat16()
        mixed = functional.grouped_mm(rows, self.experts.bfloat16(), offs=ends)
        return x + mixed.to(x.dtype)[order.argsort()].view_as(x)


def test_experts_that_compute_in_bf16_are_proved_in_a_wide_dtype(ranks: Simulator) -> None:
    ids = torch.randint(32, (4, LENGTH), generator=torch.Generator().manual_seed(1))

    def outputs(ctx: accel.DistContext) -> Tensor:
        torch.manual_seed(0)
        if ctx.world_size == 1:
            return GroupedExperts()(ids).detach()
        ctx = accel.replace(ctx, mesh="cp=2")
        part = accel.parallel.split_sequence(ctx, {"ids": ids})
        found = accel.prepare_model(ctx, GroupedExperts())(part["ids"]).detach()
        return accel.gather(ctx, found.transpose(0, 1))[accel.gather(ctx, part["position_ids"][0]).argsort()]

    expected = outputs(accel.single())
    for found in ranks.run(outputs, 2, default_group=True):
        torch.testing.assert_close(found.transpose(0, 1), expected, rtol=0, atol=0.05)
