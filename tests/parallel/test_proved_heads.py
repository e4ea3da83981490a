# SPDX-License-Identifier: Apache-2.0
"""Found plans of attention with few keys, projections in groups, and biases of heads: right ones, and planted ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planned_parts import Verdict, found_plan, rules_of, verdict_of
from steps import two_steps
from torch import Tensor, nn
from torch.nn import functional

import accel

HEADS, WIDTH = 8, 4


class Table(nn.Module):
    """A bias with an entry for each head, or one for all of them."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(7, heads))

    def forward(self) -> Tensor:
        at = torch.arange(5)
        return self.table[(at[:, None] - at).abs()].permute(2, 0, 1)[None].contiguous()


class Attention(nn.Module):
    """Counts its heads and those of its keys; the layout of the projection is one of three, or three layers."""

    def __init__(self, layout: str, keys: int, *, biases: int = 0) -> None:
        super().__init__()
        self.layout, self.num_heads, self.head_dim = layout, HEADS, WIDTH
        self.all_head_size = HEADS * WIDTH
        if layout == "apart":
            self.q = nn.Linear(16, HEADS * WIDTH)
            self.k, self.v = (nn.Linear(16, keys * WIDTH) for _ in range(2))
        else:
            self.qkv = nn.Linear(16, (HEADS + 2 * keys) * WIDTH)
            self.num_kv_heads = keys
        self.o = nn.Linear(HEADS * WIDTH, 16)
        self.bias = Table(biases) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in self._parts(x))
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        bias = None if self.bias is None else self.bias() + torch.zeros(x.shape[0], 1, 5, 5, dtype=x.dtype)
        mixed = functional.scaled_dot_product_attention(q, k, v, bias)
        return self.o(mixed.transpose(1, 2).reshape(*x.shape[:2], self.all_head_size))

    def _parts(self, x: Tensor) -> list[Tensor]:
        if self.layout == "apart":
            return [each(x).unflatten(-1, (-1, WIDTH)) for each in (self.q, self.k, self.v)]
        fused = self.qkv(x)
        if self.layout == "behind":
            keys = self.num_kv_heads
            return list(fused.unflatten(-1, (-1, WIDTH)).split([self.num_heads, keys, keys], 2))
        if self.layout == "grouped":
            parts = fused.unflatten(-1, (self.num_kv_heads, -1, WIDTH))
            return [each.flatten(2, 3) for each in parts.split([self.num_heads // self.num_kv_heads, 1, 1], 3)]
        q, v, k = fused.unflatten(-1, (4, -1)).split(self.num_heads * WIDTH // 4, -1)
        return [each.unflatten(-1, (-1, WIDTH)).flatten(2, 3) for each in (q, k, v)]


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(3, 16), attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(functional.layer_norm(self.first(x), [16]))


EXAMPLE = [torch.empty(2, 5, 3)]
GATHERED = {"k": "colwise_gather_output", "v": "colwise_gather_output"}
FOUND: dict[str, tuple[Attention, int, dict[str, str]]] = {  # styles, or none where layouts divide the module
    "one key behind the queries": (Attention("behind", 1), 2, {}),
    "two keys behind the queries": (Attention("behind", 2), 4, {}),
    "four keys behind the queries, on two ranks": (Attention("behind", 4), 2, {}),
    "groups of queries with a key each": (Attention("grouped", 2), 4, {}),
    "as many groups as ranks": (Attention("grouped", 2), 2, {}),
    "four groups of packs": (Attention("packs", HEADS), 2, {}),
    "a key in a layer of its own": (Attention("apart", 1), 2, GATHERED),
    "a table of biases": (Attention("apart", HEADS, biases=HEADS), 2, {}),
    "one bias for all heads": (Attention("behind", 1, biases=1), 2, {}),
}


@pytest.mark.parametrize("what", FOUND)
def test_attention_is_divided(what: str) -> None:
    module, size, styles = FOUND[what]
    found = found_plan(Block(module), size, EXAMPLE)
    inside = {path: style for path, style in found.styles.items() if path != "first"}
    assert inside == {f"attention.{path}".strip("."): each for path, each in styles.items()}
    divided = {name.rpartition(".")[0] for name in found.regions.get("attention", ())}
    assert divided >= {"attention.o"}
    rules = rules_of(Block(module), found.styles, size, regions=found.regions)
    assert {"attention.q", "attention.qkv"}.intersection(path for path, rule in rules.items() if rule.dims)


PLANTED: dict[str, tuple[Attention, int, dict[str, str]]] = {
    "groups of packs cut as packs": (Attention("packs", HEADS), 2, {"qkv": "packed_colwise_3"}),
}  # fmt: skip


def _verdict(module: nn.Module, size: int, styles: Any) -> Verdict:
    return verdict_of(Block(module), EXAMPLE, "attention", {**styles, "o": "rowwise"}, size)


@pytest.mark.parametrize("what", PLANTED)
def test_a_wrong_division_of_heads_is_found(what: str) -> None:
    assert _verdict(*PLANTED[what]).problem


def test_attention_with_few_keys_and_biases_trains_as_in_one_process(ranks: Any) -> None:
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def rank(ctx: accel.DistContext) -> Any:
        size = ctx.world_size
        ctx = accel.replace(ctx, mesh="tp=4") if size > 1 else ctx
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(3, 16), Attention("grouped", 2, biases=HEADS), Attention("behind", 2)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer = accel.prepare(ctx, model, optimizer, example=[x])
        figures = two_steps(ctx, model, optimizer, lambda: model(x).square().mean())
        return figures, accel.get_state_dict(ctx, model, dst=None)

    expected = rank(accel.single())
    for got in ranks.run(rank, 4, default_group=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
