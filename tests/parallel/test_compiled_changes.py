# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks that change tensors in place, on meshes with parts of heads and of positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accel
from accel.testing import Simulator

WIDTH, HEADS, WORDS, LENGTH = 16, 4, 12, 16


def _changed(scores: Tensor, mask: Tensor) -> Tensor:
    """Change a tensor in place by a call of no other name, by an operator, and where a mask says so."""
    scores.add_(mask)
    scores.mul_(0.5)
    scores += mask
    scores.masked_fill_(mask < 0, -1e9)
    return scores


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v = (each.view(rows, tokens, HEADS, -1).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        mask = torch.full((tokens, tokens), -1e9, dtype=x.dtype).triu(1)
        scores = _changed(q @ k.transpose(-1, -2), mask).softmax(-1)
        grouped = scores.view(rows, 2, 2, tokens, tokens).flatten(1, 2)  # of the full shape
        return x + self.out((grouped @ v).transpose(1, 2).reshape(rows, tokens, -1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.filterwarnings("ignore")  # of torch.compile
@pytest.mark.parametrize("axis", ["tp", pytest.param("cp", marks=pytest.mark.slow)])
def test_compiled_blocks_change_parts_in_place(ranks: Simulator, axis: str) -> None:
    ids = torch.randint(WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(0))

    def gradients(ctx: accel.DistContext, mesh: str) -> dict[str, Tensor]:
        torch.manual_seed(1)
        model: Any = Model().double()
        part = ids
        if mesh:
            ctx = accel.replace(ctx, mesh=mesh)
            model = accel.compile_model(accel.prepare_model(ctx, model, example=[ids]), "repeated", backend="aot_eager")
            part = accel.parallel.split_sequence(ctx, {"ids": ids})["ids"] if axis == "cp" else ids
        for _ in range(2):  # calls after the first are compiled along cp
            model.zero_grad()
            model(part).square().sum().backward()
        named = accel.unwrap_model(model).named_parameters()
        grads = {key: each.grad for key, each in named if each.grad is not None}
        whole = {key: each.full_tensor() if hasattr(each, "full_tensor") else each for key, each in grads.items()}
        return {key: accel.reduce(ctx, each) if axis == "cp" and mesh else each for key, each in whole.items()}

    expected = gradients(accel.single(), "")
    for got in ranks.run(lambda ctx: gradients(ctx, f"{axis}=2"), 2, default_group=True):
        for key, each in expected.items():
            torch.testing.assert_close(got[key], each, rtol=1e-9, atol=1e-9)
