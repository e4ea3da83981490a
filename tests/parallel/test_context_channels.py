# SPDX-License-Identifier: Apache-2.0
"""Signals along cp whose positions come after their channels, and models of one size of input."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from steps import begin_batch
from torch import Tensor, nn
from torch.nn import functional

import accel
from accel.testing import Simulator

CHANNELS, WIDTH, LENGTH = 3, 8, 32


def attended(x: Tensor, qkv: nn.Linear) -> Tensor:
    q, k, v = (each.unflatten(2, (2, -1)).transpose(1, 2) for each in qkv(x).chunk(3, 2))
    return x + functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Denoiser(nn.Module):
    """[batch, channels, length] to the same: layers of positions and one attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(CHANNELS, WIDTH, 1), nn.Conv1d(WIDTH, CHANNELS, 3, padding=1)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(attended(self.first(x).transpose(1, 2), self.qkv).transpose(1, 2))


class Patches(nn.Module):
    """Classifies signals of one length, by patches of two positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = (
            nn.Linear(2 * CHANNELS, WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, 4),
        )
        self.places = nn.Parameter(torch.linspace(-1, 1, LENGTH // 2 * WIDTH).view(LENGTH // 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[2] == LENGTH, f"a signal of {x.shape[2]} positions"
        x = x.unflatten(2, (-1, 2)).permute(0, 2, 3, 1).flatten(2)
        return self.head(attended(self.embed(x) + self.places, self.qkv).mean(1))


class Image(nn.Module):
    """Classifies images of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = (
            nn.Conv2d(CHANNELS, WIDTH, 4, 4),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[2:] == (LENGTH, LENGTH), f"an image of {list(x.shape[2:])}"
        return self.head(attended(self.embed(x).flatten(2).transpose(1, 2), self.qkv).mean(1))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "denoiser": (Denoiser, (2, CHANNELS, LENGTH), 2),
    "patches": (Patches, (2, CHANNELS, LENGTH), -1),
    "rows": (Image, (2, CHANNELS, LENGTH, LENGTH), 2),
    "columns": (Image, (2, CHANNELS, LENGTH, LENGTH), 3),
}


@pytest.mark.parametrize(
    ("name", "by_hand"), [*((name, False) for name in CASES), ("denoiser", True), ("patches", True)]
)
def test_a_model_of_channels_first_sees_all_positions(ranks: Simulator, name: str, by_hand: bool) -> None:
    """Its outputs, and its parameters after a step, equal one process."""
    make, shape, dim = CASES[name]
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(shape, dtype=torch.float64)
    is_signal = name == "denoiser"
    one = copy.deepcopy(model)
    expected = one(x)
    expected.square().mean().backward()

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="cp=2")
        mine = copy.deepcopy(model)
        prepared, optimizer = accel.prepare(ctx, mine, torch.optim.SGD(mine.parameters(), lr=1.0))
        if by_hand:
            part = x[..., accel.parallel.sequence_positions(ctx, LENGTH)]
        else:
            part = accel.parallel.split_sequence(ctx, {"x": x}, dim=dim)["x"]
        with accel.evaluating(prepared), torch.no_grad():  # before a step asks whether attention crossed ranks
            found = prepared(part)
        own = accel.parallel.sequence_positions(ctx, LENGTH)
        want = expected[..., own] if is_signal else expected
        torch.testing.assert_close(found, want)
        state = begin_batch(ctx)
        with accel.accumulate(ctx, state, prepared):
            state = accel.backward(ctx, prepared(part).square().mean(), state)
        _ = accel.optimizer_step(ctx, optimizer, state)
        for (key, before), parameter in zip(model.named_parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(mine.get_parameter(key).detach(), (before - parameter.grad).detach())

    _ = ranks.run(rank, 2, default_group=True)
