# SPDX-License-Identifier: Apache-2.0
"""Calls of a large group, whose first messages are reduced, do as those of a small one, whose go to all."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from catching import caught
from hypothesis import given, settings, strategies as st
from profiles import share

import accel
from accel.comm import (
    Call,
    Comm,
    agreed,
    agreed_values,
    all_reduce_flat,
    as_tensor,
    broadcast_bytes,
    exchange,
    reduce_ints,
)
from accel.comm._group import MOST_GATHERED
from accel.errors import CheckpointError, CollectiveMismatch

Program = Callable[[accel.DistContext], Any]
few = settings(max_examples=share(0.5))
seeds = st.none() | st.integers(0, 9)


def _large(program: Program, *, shares: bool) -> Program:
    """Run a program in a group that counts as large; with messages between pairs of ranks, or as ranks of one process.

    Args:
        program: the rank's.
        shares: whether ranks hand messages to each other in memory.
    """

    def rank(ctx: accel.DistContext) -> Any:
        ctx.comm.most_gathered = 1
        if not shares:
            ctx.comm._share = None
        return program(ctx)

    return rank


def _both_ways(ranks: Any, program: Program, size: int, seed: int | None = None) -> tuple[list[Any], list[Any]]:
    """Return the results of a small group and of a large one, which are the same in memory and between pairs."""
    small = ranks.run(program, size, seed=seed)
    large = ranks.run(_large(program, shares=True), size, seed=seed)
    pairs = ranks.run(_large(program, shares=False), size, seed=seed)
    assert repr(large) == repr(pairs)
    return small, large


def test_groups_up_to_64_ranks_are_small(ranks):
    assert ranks.run(lambda ctx: ctx.comm.is_large, MOST_GATHERED) == [False] * MOST_GATHERED
    assert all(ranks.run(lambda ctx: ctx.comm.is_large, MOST_GATHERED + 1))


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int64)


@few
@given(
    size=st.integers(2, 7),
    op=st.sampled_from(["sum", "max", "min", "product"]),
    plan=st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from([0, 1, 3, 40, 3000])), max_size=3),
    seed=seeds,
)
def test_reductions_are_equal_on_both_sides_of_the_switch(ranks, size, op, plan, seed):
    """Of small whole numbers, which all dtypes add without rounding."""

    def rank(ctx):
        values = [torch.arange(count).add(ctx.rank).remainder(3).to(dtype) for dtype, count in plan]
        return [(each.dtype, each.tolist()) for each in accel.reduce(ctx, values, op)]

    small, large = _both_ways(ranks, rank, size, seed)
    assert small == large


@few
@given(size=st.integers(2, 9), dtype=st.sampled_from(DTYPES[:4]), op=st.sampled_from(["sum", "mean"]), seed=seeds)
def test_sums_in_pairs_are_the_same_bits_on_all_ranks_and_close_to_the_sum_in_rank_order(ranks, size, dtype, op, seed):
    values = torch.randn(size, 50, generator=torch.Generator().manual_seed(size)).to(dtype)
    small, large = _both_ways(ranks, lambda ctx: accel.reduce(ctx, values[ctx.rank], op), size, seed)
    assert all(torch.equal(each, large[0]) for each in large)
    assert large[0].dtype == dtype
    torch.testing.assert_close(small[0], large[0])


def test_halves_are_added_as_float32(ranks):
    """In 16 bits the sum of 64 times 256 and 64 ones would lose the ones."""

    def rank(ctx):
        return accel.reduce(ctx, torch.tensor([256.0, 1.0][ctx.rank % 2], dtype=torch.bfloat16))

    sums = ranks.run(_large(rank, shares=True), 128)
    assert float(sums[0]) == float(torch.tensor(64 * 257.0).bfloat16())


@few
@given(
    size=st.integers(2, 7),
    data=st.data(),
    most=st.sampled_from([1, 5, 300, 2000]),
    one=st.booleans(),
    seed=seeds,
)
def test_gathers_of_ragged_rows_are_equal_on_both_sides_of_the_switch(ranks, size, data, most, one, seed):
    rows = data.draw(st.lists(st.integers(0, most), min_size=size, max_size=size))
    dst = data.draw(st.integers(0, size - 1)) if one else None

    def rank(ctx):
        tree = {"a": torch.full((rows[ctx.rank], 2), ctx.rank), "b": torch.tensor(float(ctx.rank)), "c": None}
        joined = accel.gather(ctx, tree, dst=dst)
        return joined and {key: leaf if leaf is None else leaf.tolist() for key, leaf in joined.items()}

    small, large = _both_ways(ranks, rank, size, seed)
    assert small == large


@few
@given(size=st.integers(2, 7), data=st.data(), seed=seeds)
def test_payloads_of_any_sizes_are_equal_on_both_sides_of_the_switch(ranks, size, data, seed):
    lengths = data.draw(
        st.lists(st.sampled_from([0, 1, 2, 895, 896, 897, 1024, 1025, 9000]), min_size=size, max_size=size)
    )
    source = data.draw(st.integers(0, size - 1))

    def rank(ctx):
        mine = as_tensor(bytes([ctx.rank + 1]) * lengths[ctx.rank])
        parts = exchange(ctx.comm, Call("all"), mine)
        to_one = exchange(ctx.comm, Call("one"), mine, dst=source)
        sent = mine if ctx.rank == source else as_tensor(b"")
        first = broadcast_bytes(ctx.comm, Call("first"), sent, source=source)
        return [part.tolist() for part in (*parts, *to_one, first)]

    small, large = _both_ways(ranks, rank, size, seed)
    assert small == large


@few
@given(size=st.integers(1, 7), count=st.sampled_from([0, 1, 3, 112, 113, 2000]), data=st.data())
def test_integers_are_reduced_whatever_their_number(ranks, size, count, data):
    drawn = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3)
    values = [(data.draw(drawn) * count)[:count] for _ in range(size)]

    def rank(ctx):
        mine = values[ctx.rank]
        return [reduce_ints(ctx.comm, Call("ints", f"{len(mine)}"), mine, op) for op in ("max", "min")]

    small, large = _both_ways(ranks, rank, size)
    assert small == large
    columns = list(zip(*values, strict=True))
    assert small == [[[max(each) for each in columns], [min(each) for each in columns]]] * size


def _others(ctx: accel.DistContext) -> list[Any]:
    """Return what small calls give of every kind."""
    rank = ctx.rank
    lists = accel.broadcast_object_list(ctx, [rank, "x" * 2000] if rank == 1 else [None, None], src=1)
    return [
        accel.any_rank(ctx, rank == 1),
        accel.any_rank(ctx, False),
        accel.gather_object(ctx, {"rank": rank, "text": "x" * rank}),
        accel.gather_object(ctx, rank, dst=1),
        lists[0],
        len(lists[1]),
        accel.broadcast(ctx, {"a": torch.full((3,), rank), "b": torch.ones(2)}, src=1)["a"].tolist(),
        accel.broadcast(ctx, torch.full((900,), float(rank)), src=1).sum().item(),
        accel.pad_across_processes(ctx, torch.ones(rank + 1), dim=0).tolist(),
        agreed_values(ctx.comm, Call("values"), lambda: [rank] * rank, list[int]),
    ]


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_every_kind_of_call_gives_the_same(ranks, size):
    small, large = _both_ways(ranks, _others, size)
    assert small == large


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_group_without_messages_between_pairs_gives_the_same(ranks, monkeypatch, size):
    """NCCL's groups reduce headers by an all-reduce."""
    small = ranks.run(_others, size)
    monkeypatch.setattr(Comm, "has_pairs", property(lambda self: False))
    assert ranks.run(_large(_others, shares=False), size) == small
    assert ranks.run(_large(_others, shares=True), size) == small


@few
@given(size=st.integers(2, 9), op=st.sampled_from(["sum", "max", "min", "product"]), count=st.sampled_from([0, 1, 9]))
def test_plain_reductions_of_a_large_group_are_those_of_one_process(ranks, size, op, count):
    values = torch.randint(1, 4, (size, count), generator=torch.Generator().manual_seed(size))

    def rank(ctx):
        return all_reduce_flat(ctx.comm, values[ctx.rank].clone(), op).tolist()

    small, large = _both_ways(ranks, rank, size)
    expected = {"sum": values.sum(0), "product": values.prod(0), "max": values.amax(0), "min": values.amin(0)}[op]
    assert small == large == [expected.tolist()] * size


def _fails(ctx: accel.DistContext, text: str) -> None:
    with agreed(ctx.comm, Call("saving")):
        if ctx.rank in (2, 3):
            raise CheckpointError(text, got=f"{ctx.rank}")


X = torch.zeros(2, 3)
DIFFERENCES: dict[str, Program] = {
    "operation": lambda ctx: accel.reduce(ctx, X, "max" if ctx.rank == 2 else "sum"),
    "shape": lambda ctx: accel.reduce(ctx, [torch.zeros(3 if ctx.rank == 2 else 2, 3)]),
    "dtype": lambda ctx: accel.gather(ctx, {"a": X.half() if ctx.rank == 2 else X}),
    "structure": lambda ctx: accel.broadcast(ctx, (X,) if ctx.rank == 2 else [X]),
    "trailing shape": lambda ctx: accel.gather(ctx, torch.zeros(2, 3 + (ctx.rank == 2))),
    "much": lambda ctx: accel.reduce(ctx, torch.zeros(5000 + (ctx.rank == 2))),
    "call": lambda ctx: accel.any_rank(ctx, True) if ctx.rank == 2 else accel.gather(ctx, X),
    "barrier": lambda ctx: accel.wait_for_everyone(ctx) if ctx.rank == 2 else accel.reduce(ctx, X),
    "tag": lambda ctx: accel.reduce(ctx, X, tag=f"{ctx.rank == 2}"),
    "all different": lambda ctx: accel.reduce(ctx, torch.zeros(ctx.rank + 1)),
    "objects": lambda ctx: accel.broadcast_object_list(ctx, [1] * (1 + (ctx.rank == 2))),
    "error": lambda ctx: _fails(ctx, "no room"),
    "long error": lambda ctx: _fails(ctx, "no room" * 1000),
    "error in another call": lambda ctx: _fails(ctx, "broken") if ctx.rank == 2 else accel.gather(ctx, X),
}


def _swapped_in_a_loop(ctx: accel.DistContext) -> Any:
    calls = [lambda: accel.reduce(ctx, X), lambda: accel.reduce(ctx, X + 1)]
    return [call() for call in (reversed(calls) if ctx.rank == 2 else calls)]


@pytest.mark.parametrize("name", DIFFERENCES)
@pytest.mark.parametrize(("size", "has_pairs"), [(3, True), (4, True), (5, True), (4, False)])
def test_a_difference_is_reported_in_the_same_words(ranks, monkeypatch, name, size, has_pairs):
    """Ranks, sites and paths included; and all ranks are in step afterwards."""

    def rank(ctx):
        error = caught(DIFFERENCES[name], ctx)
        accel.wait_for_everyone(ctx)
        return type(error), str(error), error.__cause__ is not None

    monkeypatch.setattr(Comm, "has_pairs", property(lambda self: has_pairs))
    small, large = _both_ways(ranks, rank, size)
    assert small == large
    assert len({text for _, text, _ in large}) == 1
    if "error" not in name:
        assert {kind for kind, _, _ in large} == {CollectiveMismatch}


@pytest.mark.parametrize("size", [3, 5])
def test_swapped_calls_are_reported_in_the_same_words(ranks, size):
    small, large = _both_ways(ranks, lambda ctx: str(caught(_swapped_in_a_loop, ctx)), size)
    assert small == large
    assert "opposite orders" in large[0]


@few
@given(steps=st.lists(st.integers(0, 2), min_size=1, max_size=8), size=st.integers(2, 5), seed=seeds)
def test_branches_in_any_order_stay_right(ranks, steps, size, seed):
    def rank(ctx):
        total = 0
        for odd in steps:
            if ctx.rank == odd:
                total += int(accel.reduce(ctx, torch.tensor(1)))
            else:
                total += int(accel.reduce(ctx, torch.tensor(2)))
        return total

    small, large = _both_ways(ranks, rank, size, seed)
    assert small == large


def test_a_pair_of_places_is_compared_once(ranks, monkeypatch):
    """A branch for rank 0 in a loop costs its comparison in the first steps alone."""
    gathers = [0]

    def rank(ctx):
        share = ctx.comm._share

        def counting(mine, combine):
            gathers[0] += ctx.rank == 0
            return share(mine, combine)

        ctx.comm.most_gathered = 1
        ctx.comm._share = counting
        seen = []
        for _ in range(6):
            if ctx.rank == 0:
                accel.any_rank(ctx, True)
            else:
                accel.any_rank(ctx, False)
            accel.wait_for_everyone(ctx)
            seen.append(gathers[0])
        return seen

    seen = ranks.run(rank, 3)[0]
    assert [after - before for before, after in pairwise(seen)] == [3, 2, 2, 2, 2]
