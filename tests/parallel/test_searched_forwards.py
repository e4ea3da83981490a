# SPDX-License-Identifier: Apache-2.0
"""Models with forwards that a record without values does not show: plans are found inside of them, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from steps import two_steps
from test_part_plans import divided_share
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import accel
from accel.testing import Simulator

WIDTH, HEADS, WORDS = 16, 4, 40


class Attention(nn.Module):
    """Attention with a bias by distance, from a module that each call is given."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, distances: nn.Module | None = None) -> Tensor:
        q, k, v = (each.unflatten(2, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, 2))
        scores = q @ k.mT
        if distances is not None:
            scores = scores + distances(x.shape[1])
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Distances(nn.Module):
    """A bias of each head and distance."""

    def __init__(self) -> None:
        super().__init__()
        self.by_distance = nn.Sequential(nn.Linear(1, 8), nn.SiLU(), nn.Linear(8, HEADS))

    def forward(self, tokens: int) -> Tensor:
        at = torch.arange(tokens)
        table = self.by_distance(at[:, None].to(self.by_distance[0].weight.dtype))
        return table[(at[:, None] - at).abs()].permute(2, 0, 1)


class Given(nn.Module):
    """Each attention is called with the module of distances."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.distances = Distances()
        self.blocks = nn.ModuleList(Attention() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden, self.distances)
        return self.head(hidden)


class Hashed(nn.Module):
    """Attention to the words of the same bucket, by random directions that each call draws."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        keys, values = (layer(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for layer in (self.keys, self.values))
        directions = torch.randn(keys.shape[-1], 2, dtype=x.dtype)
        turned = keys.detach() @ directions
        buckets = torch.cat([turned, -turned], -1).argmax(-1)
        others = buckets.unsqueeze(-1) != buckets.unsqueeze(-2)
        scores = (keys @ keys.mT).masked_fill(others, -1e9)
        return x + self.out((scores.softmax(-1) @ values).transpose(1, 2).flatten(2))


class Hashes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Hashed() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Packed(nn.Module):
    """Drops the padding of each sample, in one module that holds all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.head = nn.Linear(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.block = Attention()

    def forward(self, x: Tensor) -> Tensor:
        is_word = x.sum(-1) > 0
        samples = torch.arange(len(x)).repeat_interleave(is_word.sum(1))
        hidden = self.project(x[is_word]).unsqueeze(0)
        hidden = hidden + self.block(functional.layer_norm(hidden, (WIDTH,)))
        sums = torch.zeros(len(x), WIDTH, dtype=hidden.dtype).index_add(0, samples, hidden[0])
        return self.head(sums).unsqueeze(1).expand(-1, x.shape[1], -1)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Packed()

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(functional.one_hot(ids, WORDS).to(self.model.head.weight.dtype))


class Recomputes(nn.Module):
    """Computes the hidden features of an input without a gradient again in a backward, by torch's checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WORDS, 4 * WIDTH), nn.Linear(4 * WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = functional.one_hot(ids, WORDS).to(self.up.weight.dtype)
        return self.down(checkpoint(self.hidden, x, use_reentrant=False))

    def hidden(self, x: Tensor) -> Tensor:
        return functional.relu(self.up(x)).sin()


class Sampled(nn.Module):
    """Draws a latent feature for each word around what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mean, self.up = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        mean = self.mean(self.embed(ids))
        return self.head(functional.gelu(self.up(mean + torch.randn_like(mean))))


class Named(nn.Module):
    """Passes operands of matmuls by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.wide, self.narrow = nn.Parameter(torch.randn(WIDTH, 64) / 4), nn.Parameter(torch.randn(64, WORDS) / 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        hidden = functional.gelu(functional.linear(weight=self.up.weight, input=x, bias=self.up.bias))
        added = torch.addmm(input=self.down.bias, mat1=hidden.flatten(0, 1), mat2=self.down.weight.T)
        inner = functional.relu(torch.matmul(x + added.view_as(x), other=self.wide))
        return torch.matmul(input=inner, other=self.narrow)


class Chosen(Sampled):
    """Draws which hidden features it takes, and noise into a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor) -> Tensor:
        mean = self.mean(self.embed(ids))
        taken = functional.gumbel_softmax(self.gate(mean), 0.7) + functional.gumbel_softmax(mean[..., :2], hard=True)
        hidden = functional.gelu(self.up(mean + torch.empty_like(mean).uniform_())).unflatten(-1, (2, -1))
        return self.head((hidden * taken[..., None]).flatten(-2))


MODELS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "a module among arguments": (Given, 0.9),
    "random buckets": (Hashes, 0.95),
    "a model in a wrapper": (Around, 0.9),
    "a checkpoint of a function": (Recomputes, 0.9),
    "a latent sample": (Sampled, 0.95),
    "operands by name": (Named, 0.9),
    "a choice by chance": (Chosen, 0.9),
}


def ids(rows: int, tokens: int) -> Tensor:
    return torch.randint(1, WORDS, (rows, tokens), generator=torch.Generator().manual_seed(rows))


def trained(ctx: accel.DistContext, name: str, mesh: str, *, sequence: bool = False) -> tuple[Any, float]:
    ctx = accel.replace(ctx, mesh=mesh) if mesh else ctx
    torch.manual_seed(0)
    model = MODELS[name][0]().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    plan = accel.parallel.Plan(sequence=True) if sequence else None
    model, optimizer = accel.prepare(ctx, model, optimizer, example=[ids(1, 4)], plan=plan)
    batch = ids(2, 8)
    with accel.seeding.seeded(ctx, 5):
        losses = two_steps(ctx, model, optimizer, lambda: functional.cross_entropy(model(batch).mT, batch))
    return (losses, accel.get_state_dict(ctx, model, dst=None)), divided_share(model)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_layers_in_it_are_divided_and_train_as_in_one_process(ranks: Simulator, name: str, size: int) -> None:
    want, _ = trained(accel.single(), name, "")
    for got, share in ranks.run(lambda ctx: trained(ctx, name, f"tp={size}"), size, default_group=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
        assert share > MODELS[name][1]


@pytest.mark.parametrize("name", ["a module among arguments", "random buckets", "a latent sample"])
def test_ranks_can_share_its_tokens(ranks: Simulator, name: str) -> None:
    want, _ = trained(accel.single(), name, "")
    for got, _ in ranks.run(lambda ctx: trained(ctx, name, "tp=2", sequence=True), 2, default_group=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
