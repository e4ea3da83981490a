# SPDX-License-Identifier: Apache-2.0
"""Training of small models by `forward_backward`, on one rank or through a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from steps import begin_batch
from torch import nn

import accel

WIDTH, WORDS = 8, 11


class Block(nn.Module):
    """A block with a buffer that its backward needs."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.linear(self.norm(hidden))) * self.scale


class Words(nn.Module):
    """A language model of float64 whose head may be tied to its embedding, the same at each making."""

    def __init__(self, depth: int = 8, *, tied: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(depth))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class Trained(NamedTuple):
    """What a rank knows after training.

    Attributes:
        parameters: whole ones of this rank, by name.
        figures: losses and norms in order.
    """

    parameters: Mapping[str, torch.Tensor]
    figures: list[float]


def batch_of(step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and targets, shape [rows, 5]; some targets do not count."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(WORDS, (rows, 5), generator=generator)
    targets = torch.randint(WORDS, (rows, 5), generator=generator)
    return ids, targets.masked_fill(torch.rand(rows, 5, generator=generator) < 0.3, -100)


def loss_sum(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")


def train(
    ctx: accel.DistContext,
    make: Callable[[], nn.Module],
    plan: accel.parallel.Plan | None = None,
    *,
    mesh: str = "",
    accumulation: int = 1,
    rows: tuple[int, ...] = (8, 8, 5),
    max_norm: float | None = 0.05,
    example: Any = None,
) -> Trained:
    """Take a step for each number of rows, by SGD with clipping; ranks with samples of their own divide the rows."""
    if mesh:
        ctx = accel.replace(ctx, mesh=mesh)
    model: Any = make()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan, example=example)
    state = accel.train_state(ctx, accumulation=accumulation)
    share, shares = ctx.data_parallel
    figures: list[float] = []
    for step, size in enumerate(rows):
        for micro in range(accumulation):
            ids, targets = (each[share::shares] for each in batch_of(100 * step + micro, size))
            state = begin_batch(ctx, state)
            weight = (targets != -100).sum()
            loss, state = accel.forward_backward(
                ctx, model, state, ids, targets=targets, loss_fn=loss_sum, weight=weight
            )
            if shares == 1:
                figures.append(float(loss))
        state = accel.optimizer_step(ctx, optimizer, state, max_norm=max_norm)
        if state.grad_norm is not None:
            figures.append(float(state.grad_norm))
    named = accel.unwrap_model(model).named_parameters(remove_duplicate=False)
    return Trained({name: whole_of(each) for name, each in named}, figures)


def differences(found: list[Trained], expected: Trained) -> tuple[float, float]:
    """The largest difference of parameters and of figures; every parameter must be on some rank."""
    names = set[str]().union(*(each.parameters for each in found))
    assert names == set(expected.parameters)
    parameters = [
        (value - expected.parameters[name]).abs().max().item()
        for each in found
        for name, value in each.parameters.items()
    ]
    figures = [abs(a - b) for each in found for a, b in zip(each.figures, expected.figures, strict=True)]
    return max(parameters), max(figures, default=0.0)


def by_hand(make: Callable[[], nn.Module], *, accumulation: int = 1, rows: tuple[int, ...] = (8, 8, 5)) -> Trained:
    """The same training in one process, with torch alone."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    figures: list[float] = []
    for step, size in enumerate(rows):
        batches = [batch_of(100 * step + micro, size) for micro in range(accumulation)]
        weights = [int((targets != -100).sum()) for _, targets in batches]
        for (ids, targets), weight in zip(batches, weights, strict=True):
            total = loss_sum(model(ids), targets)
            figures.append(total.item() / weight)
            (total / sum(weights)).backward()
        figures.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
    named = model.named_parameters(remove_duplicate=False)
    return Trained({name: each.detach().clone() for name, each in named}, figures)


def whole_of(parameter: Any) -> torch.Tensor:
    found = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return found.detach().clone()
