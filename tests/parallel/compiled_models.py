# SPDX-License-Identifier: Apache-2.0
"""A small language model whose blocks and stages are compiled, and its training by windows of ragged batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from pipelines import Trained
from steps import begin_batch
from torch import nn
from torch.nn import functional

import accel
from accel.parallel import Plan

WIDTH, WORDS, TOKENS, ROWS = 16, 22, 6, (8, 5, 8)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Chain(nn.Module):
    """A language model of float64 whose head is tied to its embedding, without a plan of its own."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body, self.head = Body().double(), nn.Linear(WIDTH, WORDS, bias=False).double()
        self.head.weight = self.body.embed.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(ids))


class Between(Chain):
    """The same with work between its modules."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(ids)) * 2) * 0.9


class Case(NamedTuple):
    """A mesh, a plan and what is compiled.

    Attributes:
        graphs: the most graphs of all ranks, of batches with several rows.
        keep: operators whose outputs recomputed blocks keep.
    """

    mesh: str
    plan: Plan
    graphs: int
    strategy: Any = "ddp"
    regions: Any = None
    again: bool = False
    keep: Any = ()

    make: Callable[[], nn.Module] = Chain


def batch_of(step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and targets, some of which do not count."""
    draw = torch.Generator().manual_seed(step)
    ids, targets = (torch.randint(WORDS, (rows, TOKENS), generator=draw) for _ in range(2))
    return ids, targets.masked_fill(torch.rand(rows, TOKENS, generator=draw) < 0.3, -100)


def train(ctx: accel.DistContext, case: Case, *, backend: str = "") -> Trained:
    """Windows of three batches, by AdamW with clipping; without a backend nothing is compiled or recomputed."""
    if ctx.world_size > 1:
        ctx = accel.replace(ctx, mesh=case.mesh, strategy=case.strategy)
    model: Any = case.make().train()
    if backend and case.again:
        accel.checkpoint_activations(model, keep=case.keep)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=case.plan, example=batch_of(0, 4)[0])
    if backend:
        accel.compile_model(model, case.regions, backend=backend, fullgraph=True)  # raises where a graph breaks
    state = accel.train_state(ctx, accumulation=3)
    share, shares = ctx.data_parallel

    def loss_of(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if case.plan.head == "colwise":
            return accel.parallel.vocab_cross_entropy(ctx, output, targets)
        return functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")

    figures: list[float] = []
    for step, size in enumerate(ROWS):
        sums: list[torch.Tensor] = []
        for micro in range(3):
            ids, targets = (each[share::shares] for each in batch_of(100 * step + micro, size))
            state = begin_batch(ctx, state)
            weight = (targets != -100).sum()
            loss, state = accel.forward_backward(
                ctx, model, state, ids, targets=targets, loss_fn=loss_of, weight=weight
            )
            sums.append(torch.stack([loss.double() * weight, weight.double()]))
        state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.5)
        total = accel.reduce(ctx, torch.stack(sums).sum(0))
        assert state.grad_norm is not None
        figures += [float(total[0] / total[1]), float(state.grad_norm)]
    return Trained(accel.get_state_dict(ctx, model, dst=None) or {}, figures)
