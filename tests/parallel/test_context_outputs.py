# SPDX-License-Identifier: Apache-2.0
"""Outputs of models along cp that are put together from single positions: own positions leave the forward."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from catching import assert_raises
from torch import Tensor, nn

import accel
from accel.testing import Simulator

WORDS, WIDTH, LENGTH = 13, 8, 24


class Loop(nn.Module):
    """A cell that takes one position after another; `join` makes the output of what it gave."""

    def __init__(self, join: Callable[[list[Tensor]], Tensor]) -> None:
        super().__init__()
        self.join = join
        self.embed, self.cell, self.head = nn.Embedding(WORDS, WIDTH), nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        state = x.new_zeros(len(ids), WIDTH)
        found: list[Tensor] = []
        for at in range(ids.shape[1]):
            state = self.cell(x[:, at], state)
            found.append(self.head(state))
        return self.join(found)


def filled(each: list[Tensor]) -> Tensor:
    """One tensor that positions are written into."""
    out = each[0].new_empty(len(each[0]), len(each), WORDS)
    for at, one in enumerate(each):
        out[:, at] = one
    return out


FULL: dict[str, tuple[int, Callable[[list[Tensor]], Tensor]]] = {
    "stack": (1, lambda each: torch.stack(each, 1)),
    "time first": (0, torch.stack),
    "chunks": (1, lambda each: torch.cat([torch.stack(each[:4], 1), torch.stack(each[4:], 1)], 1)),
    "filled": (1, filled),
}


@pytest.mark.parametrize(("name", "size"), [*((name, 2) for name in FULL), ("stack", 4)])
def test_own_positions_of_a_full_output_leave_the_forward(ranks: Simulator, name: str, size: int) -> None:
    """They meet own labels in the loss, and gradients of ranks sum up to the full ones."""
    dim, join = FULL[name]
    ids = torch.randint(WORDS, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    goal = torch.randn(3, LENGTH, WORDS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.manual_seed(2)
    expected = Loop(join).double()
    (expected(ids).movedim(dim, 1) - goal).square().sum().backward()

    def rank(ctx: accel.DistContext) -> dict[str, Tensor]:
        ctx = accel.replace(ctx, mesh=f"cp={size}")
        torch.manual_seed(2)
        model = accel.prepare_model(ctx, Loop(join).double())
        part = accel.parallel.split_sequence(ctx, {"ids": ids, "goal": goal}, shift=())
        out = model(part["ids"])
        assert out.shape[dim] == LENGTH // size
        (out.movedim(dim, 1) - part["goal"]).square().sum().backward()
        named = accel.unwrap_model(model).named_parameters()
        return {key: accel.reduce(ctx, each.grad) for key, each in named if each.grad is not None}

    for got in ranks.run(rank, size, default_group=True):
        for key, each in expected.named_parameters():
            torch.testing.assert_close(got[key], each.grad, rtol=0, atol=1e-9)


@pytest.mark.parametrize("length", [WORDS + 3, 2 * WORDS + 6])  # classes, padded to be as many as positions
def test_an_output_as_wide_as_the_sequence_by_chance_stays_full(ranks: Simulator, length: int) -> None:
    def join(each: list[Tensor]) -> Tensor:
        return nn.functional.pad(each[-1], (0, length - WORDS))

    ids = torch.randint(WORDS, (3, length), generator=torch.Generator().manual_seed(0))

    def rank(ctx: accel.DistContext) -> list[int]:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, Loop(join))
        return list(model(accel.parallel.split_sequence(ctx, {"ids": ids})["ids"]).shape)

    assert ranks.run(rank, 2, default_group=True) == [[3, length]] * 2


class Padded(nn.Module):
    """Computes a number of positions of its own, by `mix` of a tensor with a sequence's positions."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix, self.linear = mix, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.linear(x))


def spectrum(x: Tensor, weight: Tensor) -> Tensor:
    """A causal convolution of `LENGTH` positions."""
    count = 2 * LENGTH
    mixed = torch.fft.rfft(x, n=count, dim=1) * torch.fft.rfft(weight, n=count)[:, None]
    return torch.fft.irfft(mixed, dim=1)[:, :LENGTH]


PADDED: dict[str, tuple[bool, Callable[[Tensor], Tensor]]] = {
    "spectrum": (True, lambda x: torch.fft.irfft(torch.fft.rfft(x, n=2 * LENGTH, dim=1), dim=1)[:, :LENGTH]),
    "convolution": (True, lambda x: spectrum(x, torch.arange(LENGTH).cos().to(x.dtype))),
    "queries": (False, lambda x: (torch.arange(1, LENGTH + 1).outer(x[0, 0]).sin().to(x.dtype) @ x.mT).softmax(2) @ x),
    "classes": (False, lambda x: x[:, -1] @ torch.ones(WIDTH, LENGTH, dtype=x.dtype)),
    "counts": (False, lambda x: (torch.arange(LENGTH) == LENGTH // 2) * x.mean((1, 2))[:, None]),
    "first": (False, lambda x: x[:, 0] @ torch.ones(WIDTH, LENGTH, dtype=x.dtype)),
}


@pytest.mark.parametrize("name", PADDED)
def test_an_output_of_one_length_is_cut_if_its_places_follow_the_positions(ranks: Simulator, name: str) -> None:
    """In calls with sequences of this length; others keep all of it, as what the model makes of positions."""
    follows, mix = PADDED[name]
    x = torch.randn(3, 2 * LENGTH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.manual_seed(1)
    one = Padded(mix).double()
    lengths = (LENGTH, LENGTH // 2, 2 * LENGTH)

    def rank(ctx: accel.DistContext) -> list[Tensor]:
        ctx = accel.replace(ctx, mesh="cp=2")
        model = accel.prepare_model(ctx, copy.deepcopy(one))
        return [model(accel.parallel.split_sequence(ctx, {"x": x[:, :length]})["x"]).detach() for length in lengths]

    for number, got in enumerate(ranks.run(rank, 2, default_group=True)):
        for length, each in zip(lengths, got, strict=True):
            want = one(x[:, :length]).detach()
            if follows and length == LENGTH:
                want = torch.cat([want.chunk(4, 1)[at] for at in (number, 3 - number)], 1)
            torch.testing.assert_close(each, want, rtol=0, atol=1e-10)


class Mixer(nn.Module):
    """Mixes a fixed number of positions."""

    def __init__(self, *, told: bool) -> None:
        super().__init__()
        self.told, self.embed, self.mix = told, nn.Embedding(WORDS, WIDTH), nn.Linear(LENGTH, LENGTH)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        output: Tensor = self.mix(hidden.transpose(1, 2)).transpose(1, 2)
        return output + 0 * hidden if self.told else output


def test_a_full_output_of_a_model_of_one_length_is_refused_with_the_line_to_write(ranks: Simulator) -> None:
    ids = torch.randint(WORDS, (3, LENGTH), generator=torch.Generator().manual_seed(0))

    def rank(ctx: accel.DistContext) -> list[int]:
        ctx = accel.replace(ctx, mesh="cp=2")
        part = accel.parallel.split_sequence(ctx, {"ids": ids})
        with assert_raises(accel.errors.PrepareError, got=r"output 0 .* return output \+ 0 \* hidden"):
            _ = accel.prepare_model(ctx, Mixer(told=False))(part["ids"])
        return list(accel.prepare_model(ctx, Mixer(told=True))(part["ids"]).shape)

    assert ranks.run(rank, 2, default_group=True) == [[3, LENGTH // 2, WIDTH]] * 2
