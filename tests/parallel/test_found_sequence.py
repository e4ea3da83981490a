# SPDX-License-Identifier: Apache-2.0
"""Found styles by which ranks share the tokens between layers: they are proved, and train as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from steps import two_steps
from torch import Tensor, nn
from torch.nn import functional

import accel

WIDTH, WORDS = 16, 11


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.o = 4, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong, self.attention, self.mlp = wrong, Attention(), Mlp()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.attention(self.first(x))
        mixed += x  # in place, on what the ranks have summed
        if self.wrong == "mean":
            mixed = mixed + x.mean(1, keepdim=True)
        if self.wrong == "position":
            mixed = mixed + torch.arange(x.shape[1]).to(x.dtype)[:, None]
        return mixed + self.mlp(self.second(mixed))


class Body(nn.Module):
    """Blocks with norms before their parts and one behind all."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong, self.embed = wrong, nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(wrong) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        seen = x.new_zeros(())
        for block in self.blocks:
            x = block(x)
            if self.wrong == "between":
                x = x + x.mean(1, keepdim=True)
            if self.wrong == "read":
                seen = x.mean()
        return self.norm(x) + (seen if self.wrong == "read" else 0)


class Model(nn.Module):
    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.body, self.head = Body(wrong), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(ids))


@pytest.mark.parametrize(
    ("wrong", "tokens"), [("", 6), ("", 7), ("mean", 7), ("position", 7), ("between", 7), ("read", 7)]
)
def test_found_styles_train_with_shared_tokens_as_in_one_process(ranks: Any, wrong: str, tokens: int) -> None:
    """Also in a model that mixes tokens between its layers, and with tokens that ranks do not divide."""
    ids = torch.randint(0, WORDS, (3, tokens), generator=torch.Generator().manual_seed(1))

    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh="tp=2") if ctx.world_size > 1 else ctx
        torch.manual_seed(4)
        model = Model(wrong).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        plan = accel.parallel.Plan(sequence=True, overlap=True)  # layers of styles overlap, and parts of features not
        model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan, example=[ids[:1, :6]])

        def loss() -> torch.Tensor:
            return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

        return two_steps(ctx, model, optimizer, loss), accel.get_state_dict(ctx, model, dst=None)

    expected = rank(accel.single())
    for got in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
