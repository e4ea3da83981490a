# SPDX-License-Identifier: Apache-2.0
"""Found plans by which blocks work on parts of the tokens: they are proved, and what mixes tokens is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from catching import assert_raises
from steps import two_steps
from torch import Tensor, nn
from torch.nn import functional

import accel
from accel.errors import PrepareError

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


def _styles(wrong: str = "", tokens: int = 6) -> Any:
    ids = torch.zeros(2, tokens, dtype=torch.long)
    return accel.parallel.tensor_plan(Model(wrong), sequence=True, example=[ids])


def test_blocks_of_a_found_plan_work_on_parts_of_the_tokens() -> None:
    assert _styles() == {
        "body.blocks.0": "split_sequence",
        "body.blocks.*.attention": "gather_sequence",
        "body.blocks.*.attention.qkv": "packed_colwise_3",
        "body.blocks.*.attention.o": "rowwise_sequence",
        "body.blocks.*.mlp": "gather_sequence",
        "body.blocks.*.mlp.up": "colwise",
        "body.blocks.*.mlp.down": "rowwise_sequence",
        "body.blocks.*.first": "sequence_parallel",
        "body.blocks.*.second": "sequence_parallel",
        "body.norm": "sequence_parallel_gather_output",
    }


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("mean", r"body\.blocks\.0: output 0"),
        ("position", r"body\.blocks\.0: output 0"),
        ("between", r"body\.blocks\.1: the gradient of input 0"),
        ("read", "read behind a block, by mean"),
    ],
)
def test_what_mixes_tokens_is_refused(wrong: str, said: str) -> None:
    with assert_raises(PrepareError, got=said):
        _ = _styles(wrong)


def test_tokens_that_ranks_cannot_share_are_refused() -> None:
    with assert_raises(PrepareError, got="the sequence cannot be divided among the ranks"):
        _ = _styles(tokens=7)


def test_parts_of_tokens_train_as_in_one_process(ranks: Any) -> None:
    ids = torch.randint(0, WORDS, (3, 6), generator=torch.Generator().manual_seed(1))

    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh="tp=2") if ctx.world_size > 1 else ctx
        torch.manual_seed(4)
        model = Model().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        plan = accel.parallel.Plan(tensor=_styles() if ctx.world_size > 1 else {})
        model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan)

        def loss() -> torch.Tensor:
            return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

        return two_steps(ctx, model, optimizer, loss), accel.get_state_dict(ctx, model, dst=None)

    expected = rank(accel.single())
    for got in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
