# SPDX-License-Identifier: Apache-2.0
"""Positions and blocks of context parallelism, as plain integers: cover, balance, order."""

from __future__ import annotations

import itertools

from hypothesis import given, strategies as st

from accel.parallel.axes.context._split import (
    natural_order,
    near_keys,
    pieces,
    places,
    rank_order,
    ring_block,
    seen_keys,
)

sizes = st.integers(1, 12)


@given(size=sizes, each=st.integers(0, 5))
def test_places_of_all_ranks_are_the_sequence(size: int, each: int) -> None:
    length = 2 * size * each
    held = [places(length, rank, size) for rank in range(size)]
    assert {len(run) for runs in held for run in runs} <= {each}
    assert sorted(at for runs in held for run in runs for at in run) == list(range(length))


@given(size=sizes)
def test_orders_sort_pieces_and_undo_each_other(size: int) -> None:
    listed = [piece for rank in range(size) for piece in pieces(rank, size)]
    assert [listed[at] for at in natural_order(size)] == list(range(2 * size))
    assert [natural_order(size)[at] for at in rank_order(size)] == list(range(2 * size))


@given(size=sizes)
def test_causal_work_is_equal_on_all_ranks(size: int) -> None:
    def pairs(rank: int, source: int) -> int:
        """Number of pairs of a half of queries and one of keys that are not all masked."""
        block = ring_block(rank, source, size, causal=True)
        queries, keys = (range(*each) for each in (block.queries, block.keys))
        return len(queries) * len(keys) - block.causal

    for rank in range(size):
        assert sum(pairs(rank, source) for source in range(size)) == 2 * size + 1


@given(size=sizes, causal=st.booleans())
def test_blocks_are_the_pairs_that_the_mask_leaves(size: int, causal: bool) -> None:
    seen: list[tuple[int, int]] = []
    for rank, source in itertools.product(range(size), repeat=2):
        block = ring_block(rank, source, size, causal=causal)
        queries = pieces(rank, size)[slice(*block.queries)]
        keys = pieces(source, size)[slice(*block.keys)]
        seen += [pair for pair in itertools.product(queries, keys) if not block.causal or pair[0] >= pair[1]]
        if causal and not block.causal:  # a block without a mask has no key that comes after a query
            assert all(query > key for query, key in itertools.product(queries, keys))
    whole = itertools.product(range(2 * size), repeat=2)
    assert sorted(seen) == [(query, key) for query, key in whole if not causal or query >= key]


@given(size=sizes, length=st.integers(1, 4), window=st.integers(1, 30), causal=st.booleans())
def test_a_rank_gets_the_keys_that_a_window_sees_and_no_more(size: int, length: int, window: int, causal: bool) -> None:
    whole = 2 * size * length

    def sees(query: int, key: int) -> bool:
        return abs(query - key) < window and (query >= key or not causal)

    for rank, source in itertools.product(range(size), repeat=2):
        queries = [at for run in places(whole, rank, size) for at in run]
        held = near_keys(rank, source, size, whole, window, causal=causal)
        for run, piece in zip(held, places(whole, source, size), strict=True):
            needed = {key for query, key in itertools.product(queries, piece) if sees(query, key)}
            assert needed <= set(run) <= set(piece)
            assert not run or {run.start, run.stop - 1} <= needed


@given(begin=st.integers(0, 20), count=st.integers(1, 9), window=st.none() | st.integers(1, 30), causal=st.booleans())
def test_the_keys_that_queries_see_are_those_of_the_mask(
    begin: int, count: int, window: int | None, causal: bool
) -> None:
    length = 30
    queries = range(begin, begin + count)
    seen = [
        key
        for key in range(length)
        if any((window is None or abs(query - key) < window) and (query >= key or not causal) for query in queries)
    ]
    assert [*seen_keys(queries, length, window, causal=causal)] == seen


def test_a_contiguous_cut_would_be_unequal() -> None:
    """The balance is the zigzag's: of n contiguous parts, the last sees n times the keys of the first."""
    size = 4
    work = [sum(max(0, 2 * rank + half + 1) for half in (0, 1)) for rank in range(size)]
    assert max(work) > 1.5 * sum(work) / size
    assert len({sum(piece + 1 for piece in pieces(rank, size)) for rank in range(size)}) == 1
