# SPDX-License-Identifier: Apache-2.0
"""Inputs of a model along cp are cut, or are samples that all ranks hold, by their values."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from steps import begin_batch
from torch import Tensor, nn
from torch.nn import functional

import accel
from accel.testing import Simulator

LENGTH, OWN, WIDTH = 16, 8, 4
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(2, LENGTH, WIDTH, generator=GENERATOR, dtype=torch.float64)
FACTORS = torch.randn(2, LENGTH, generator=GENERATOR, dtype=torch.float64)
IMAGE = torch.randn(2, OWN, WIDTH, generator=GENERATOR, dtype=torch.float64)


class Attending(nn.Module):
    """Attends by torch's function, with a bias, factors of positions and images if it is given some."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, given: dict[str, Tensor]) -> Tensor:
        q = self.linear(x)[:, None]
        x = functional.scaled_dot_product_attention(q, q, q, attn_mask=given.get("bias"))[:, 0]
        if "factors" in given:
            x = x * given["factors"][..., None]
        if "image" in given:
            x = x + self.linear(given["image"]).cumsum(1).mean((1, 2))[:, None, None]
        return x


def check(ranks: Simulator, calls: list[dict[str, Tensor]], dims: dict[str, int]) -> None:
    """Compare calls of one model with calls in one process. `dims`: dimensions of the positions of inputs."""
    with accel.seeding.seeded(accel.single(), 0):
        plain = Attending().double()
    expected = [plain(X, given).detach() for given in calls]

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, copy.deepcopy(plain))
        for given, want in zip(calls, expected, strict=True):
            part = accel.parallel.split_sequence(ctx, {"x": X, "want": want})
            cut = {
                name: accel.parallel.split_sequence(ctx, {name: given[name]}, dim=dims[name])[name]
                for name in given
                if name in dims
            }
            torch.testing.assert_close(model(part["x"], {**given, **cut}).detach(), part["want"])

    _ = ranks.run(rank, 2, default_group=True)


@pytest.mark.parametrize("least", [-torch.inf, torch.finfo(torch.float64).min])
def test_biases_of_own_queries_with_infinite_scores_are_cut(ranks: Simulator, least: float) -> None:
    at = torch.arange(LENGTH)
    bias = (at - at[:, None]).double().masked_fill(at > at[:, None], least)
    check(ranks, [{"bias": bias.expand(2, 1, -1, -1)}], {"bias": 2})


class Turning(nn.Module):
    """Multiplies by complex numbers of each position."""

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns).flatten(-2).cumsum(1)


@pytest.mark.parametrize("heads", [(), (1,)])
def test_complex_numbers_of_positions_are_cut(ranks: Simulator, heads: tuple[int, ...]) -> None:
    """No warning says that imaginary parts are left out."""
    x = X.unflatten(2, (*heads, -1))
    angles = torch.arange(LENGTH, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1])
    turns = torch.polar(torch.ones_like(angles), angles).expand(2, -1, -1).unflatten(2, (*heads, -1))
    expected = Turning()(x, turns)

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        part = accel.parallel.split_sequence(ctx, {"x": x, "turns": turns, "want": expected})
        torch.testing.assert_close(accel.prepare_model(ctx, Turning())(part["x"], part["turns"].clone()), part["want"])

    ranks.run(rank, 2, default_group=True)


def test_an_input_is_known_by_its_key_in_a_mapping(ranks: Simulator) -> None:
    calls = [{"factors": FACTORS}, {"image": IMAGE}, {"factors": FACTORS, "image": IMAGE}]
    check(ranks, calls, {"factors": 1})


def test_an_input_without_elements_stays_as_it_is(ranks: Simulator) -> None:
    check(ranks, [{"none": torch.zeros(2, OWN, 0)}], {})


def test_what_was_cut_is_known_though_its_values_repeat_on_all_ranks(ranks: Simulator) -> None:
    """Such as factors of positions in documents of one length."""
    check(ranks, [{"factors": FACTORS[:1, : OWN // 2].repeat(2, 4)}], {"factors": 1})


class Indexed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(OWN, WIDTH)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        return x + self.table(at)


@pytest.mark.parametrize("known", [True, False])
def test_integers_that_all_ranks_hold_are_warned_about_unless_they_were_cut(
    ranks: Simulator, caplog: pytest.LogCaptureFixture, known: bool
) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, Indexed().double())
        places = torch.arange(OWN // 2).repeat(2, 4)  # of documents of one length
        part = accel.parallel.split_sequence(ctx, {"x": X, "at": places})
        for _ in range(2):
            _ = model(part["x"], part["at"] if known else part["at"].clone())

    with caplog.at_level(logging.WARNING, "accel.parallel"):
        _ = ranks.run(rank, 2, default_group=True)
    said = [each.getMessage() for each in caplog.records if "hold the same integers" in each.getMessage()]
    assert len(said) == (0 if known else 1)


class Stages(nn.Module):
    """Two stages; the first one scales positions by factors that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attending(), Attending()])

    def forward(self, x: Tensor, factors: Tensor) -> Tensor:
        x = self.blocks[0](x * factors[..., None], {})
        return self.blocks[1](x, {})


@pytest.mark.filterwarnings("ignore:.*returned a view tensor")
def test_rows_of_micro_batches_are_known_as_cut(ranks: Simulator) -> None:
    with accel.seeding.seeded(accel.single(), 0):
        plain = Stages().double()
    factors = FACTORS[:1, : OWN // 2].repeat(2, 4)
    expected = float(plain(X, factors).detach().square().sum())

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh="pp=2,cp=2")
        part = accel.parallel.split_sequence(ctx, {"x": X, "factors": factors})
        model = accel.prepare_model(ctx, copy.deepcopy(plain), plan=accel.parallel.Plan(micro_batches=2))
        batch = part["x"], part["factors"]
        loss, _ = accel.forward_backward(
            ctx, model, begin_batch(ctx), batch, loss_fn=lambda out: out.square().sum(), weight=1
        )
        return float(loss)

    losses = ranks.run(rank, 4, default_group=True)
    assert sum(losses[:2]) == pytest.approx(expected, rel=1e-10)  # of the two ranks along cp
