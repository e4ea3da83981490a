# SPDX-License-Identifier: Apache-2.0
"""Found plans of attention with few keys, projections in groups, and biases of heads: right ones, and planted ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from steps import two_steps
from torch import Tensor, nn
from torch.nn import functional

import accel
from accel.errors import PrepareError
from accel.parallel.axes.tensor._found_plan import found_plan
from accel.parallel.axes.tensor._prove import Verdict, prove
from accel.parallel.axes.tensor._rules import rules_of
from accel.parallel.axes.tensor._styles import needed_grouped, needed_groups, needed_queries, row_exchange
from accel.parallel.axes.tensor._trace import trace

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
APART = {"q": "colwise", "k": "replicated_with_grad_allreduce", "v": "replicated_with_grad_allreduce"}
FOUND: dict[str, tuple[Attention, int, dict[str, str]]] = {
    "one key behind the queries": (Attention("behind", 1), 2, {"qkv": "multi_query_colwise"}),
    "two keys behind the queries": (Attention("behind", 2), 4, {"qkv": "multi_query_colwise"}),
    "four keys behind the queries, on two ranks": (Attention("behind", 4), 2, {"qkv": "multi_query_colwise"}),
    "groups of queries with a key each": (Attention("grouped", 2), 4, {"qkv": "grouped_query_colwise"}),
    "as many groups as ranks": (Attention("grouped", 2), 2, {"qkv": "colwise"}),
    "four groups of packs": (Attention("packs", HEADS), 2, {"qkv": "packed_colwise_4x3"}),
    "a key in a layer of its own": (Attention("apart", 1), 2, {"": "copy_input", **APART}),
    "a table of biases": (
        Attention("apart", HEADS, biases=HEADS),
        2,
        {"": "copy_input", "q": "colwise", "k": "colwise", "v": "colwise", "bias": "split_heads"},
    ),
    "one bias for all heads": (
        Attention("behind", 1, biases=1),
        2,
        {"qkv": "multi_query_colwise", "bias": "replicated_with_grad_allreduce"},
    ),
}


@pytest.mark.parametrize("what", FOUND)
def test_attention_is_divided(what: str) -> None:
    module, size, styles = FOUND[what]
    found = found_plan(Block(module), size, EXAMPLE)
    assert found.left == {}
    assert found.styles == {f"attention.{path}".strip("."): each for path, each in {**styles, "o": "rowwise"}.items()}


PLANTED: dict[str, tuple[Attention, int, dict[str, str]]] = {
    "keys behind the queries cut as groups": (Attention("behind", 2), 4, {"qkv": "grouped_query_colwise"}),
    "groups cut as queries with keys behind": (Attention("grouped", 2), 4, {"qkv": "multi_query_colwise"}),
    "groups of packs cut as packs": (Attention("packs", HEADS), 2, {"qkv": "packed_colwise_3"}),
    "packs cut as groups of packs": (Attention("behind", HEADS), 2, {"qkv": "packed_colwise_4x3"}),
    "two keys, both on each of two ranks": (Attention("apart", 2), 2, {"": "copy_input", **APART}),
    "a whole key whose gradient is not summed": (Attention("apart", 1), 2, {"q": "colwise"}),
    "biases of all heads beside some": (Attention("behind", 1, biases=HEADS), 2, {"qkv": "multi_query_colwise"}),
    "one bias for all heads, cut": (
        Attention("behind", 1, biases=1), 2, {"qkv": "multi_query_colwise", "bias": "split_heads"},
    ),
}  # fmt: skip


def _verdict(module: nn.Module, size: int, styles: Any) -> Verdict:
    block = Block(module)
    call = next(each for each in trace(block, EXAMPLE).calls if each.path == "attention")
    return prove(module, call, {**styles, "o": "rowwise"}, size)


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
        plan: Any = {
            "1.qkv": "grouped_query_colwise",
            "1.o": "rowwise",
            "1.bias": "split_heads",
            "2.qkv": "multi_query_colwise",
            "2.o": "rowwise",
        }
        model, optimizer = accel.prepare(
            ctx, model, optimizer, plan=accel.parallel.Plan(tensor=plan if size > 1 else {})
        )
        figures = two_steps(ctx, model, optimizer, lambda: model(x).square().mean())
        return figures, accel.get_state_dict(ctx, model, dst=None)

    expected = rank(accel.single())
    for got in ranks.run(rank, 4, default_group=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


@given(
    size=st.integers(1, 6), keys=st.integers(1, 6), times=st.integers(1, 3), width=st.integers(1, 3),
    packs=st.integers(1, 4),
)  # fmt: skip
def test_ranks_get_the_rows_that_they_need_in_their_order(
    size: int, keys: int, times: int, width: int, packs: int
) -> None:
    queries = size * keys * times * width
    ways = [(needed_groups(queries * packs, keys, packs, size), queries * packs)]
    if size % keys == 0:
        ways.append((needed_grouped(queries + 2 * keys * width, width, keys, size), queries + 2 * keys * width))
    if size % keys == 0 or keys % size == 0:
        ways.append((needed_queries(queries + 2 * keys * width, width, keys, size), queries + 2 * keys * width))
    for needed, rows in ways:
        assert {row for own in needed for each in own for row in each} == set(range(rows))
        if rows % size:
            continue
        stored = torch.arange(rows).chunk(size)
        plans = [row_exchange(rows, needed, rank) for rank in range(size)]
        sent = [stored[rank][list(each.order)].split(list(each.to)) for rank, each in enumerate(plans)]
        for rank, each in enumerate(plans):
            received = torch.cat([parts[rank] for parts in sent])
            computed = received[list(each.places)] if each.places else received
            assert computed.tolist() == [row for own in needed[rank] for row in own]


def test_queries_keys_and_packs_have_their_places() -> None:
    # two heads of one row each and a key and a value; two groups of a query, a key and a value; two groups of two packs
    assert needed_queries(4, 1, 1, 2) == [[range(1), range(2, 3), range(3, 4)], [range(1, 2), range(2, 3), range(3, 4)]]
    assert needed_grouped(8, 1, 2, 4)[1:3] == [[range(1, 2), range(2, 4)], [range(4, 5), range(6, 8)]]
    assert needed_groups(8, 2, 2, 2) == [
        [range(1), range(2, 3), range(1, 2), range(3, 4)],
        [range(4, 5), range(6, 7), range(5, 6), range(7, 8)],
    ]


@pytest.mark.parametrize(
    ("styles", "said"),
    [
        ({"qkv": "grouped_query_colwise"}, "3 heads of keys, which 2 ranks along tp cannot share"),
        ({"bias": "split_heads"}, "bias: split_heads is of modules in one with divided heads"),
    ],
)
def test_heads_that_ranks_cannot_share_are_refused(styles: Any, said: str) -> None:
    with pytest.raises(PrepareError, match=said):
        _ = rules_of(Attention("grouped", 3, biases=HEADS), styles, 2)
