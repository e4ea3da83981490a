# SPDX-License-Identifier: Apache-2.0
"""Objects reach other ranks equal and one for each rank; those that cannot travel are an error on all."""

from __future__ import annotations

import threading

import pytest
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share

import accel
from accel.errors import CollectiveMismatch, ConfigError

plain = st.recursive(
    st.none() | st.integers() | st.text(max_size=20) | st.binary(max_size=20) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner) | st.tuples(inner),
    max_leaves=6,
)
relaxed = settings(deadline=None, max_examples=share(1.2))


class Explosive:
    """Pickles, but only its own rank can unpickle it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __reduce__(self):
        return _open_on, (self.rank, threading.get_ident())


def _open_on(rank: int, thread: int) -> str:
    if threading.get_ident() != thread:
        raise ValueError(f"made for rank {rank}")
    return "opened"


@relaxed
@given(
    objects=st.lists(plain, min_size=1, max_size=6), large=st.booleans(), data=st.data(), seed=st.none() | st.integers()
)
def test_each_rank_gets_one_object_from_each(ranks, objects, large, data, seed):
    size = len(objects)
    objects = [[each, "x" * 9000 * (i % 2)] if large else each for i, each in enumerate(objects)]
    dst = data.draw(st.none() | st.integers(0, size - 1))
    results = ranks.run(lambda ctx: accel.gather_object(ctx, objects[ctx.rank], dst=dst), size, seed=seed)
    for rank, got in enumerate(results):
        assert got == (objects if dst in (None, rank) else None)


@relaxed
@given(size=st.integers(1, 6), objects=st.lists(plain, max_size=4), large=st.booleans(), data=st.data())
def test_all_get_the_objects_of_the_source(ranks, size, objects, large, data):
    src = data.draw(st.integers(0, size - 1))
    objects = [*objects, "y" * 10_000] if large else objects

    def rank(ctx):
        mine = objects if ctx.rank == src else [None] * len(objects)
        got = accel.broadcast_object_list(ctx, mine, src=src)
        assert got is not mine
        return got

    assert ranks.run(rank, size) == [objects] * size


@pytest.mark.parametrize(
    "call",
    [accel.gather_object, lambda ctx, obj: accel.broadcast_object_list(ctx, [obj], src=1)],
    ids=["gather_object", "broadcast_object_list"],
)
def test_an_object_that_cannot_be_pickled_on_one_rank_is_an_error_on_all(ranks, call):
    def rank(ctx):
        with assert_raises(ConfigError, problem="rank 1: the object cannot be pickled", got=r"\w+: "):
            call(ctx, threading.Lock() if ctx.rank == 1 else 0)
        accel.wait_for_everyone(ctx)
        return True

    assert ranks.run(rank, 3) == [True] * 3
    with assert_raises(ConfigError, problem="cannot be pickled"):
        accel.gather_object(accel.single(), threading.Lock())


def test_an_object_that_one_rank_cannot_unpickle_is_an_error_on_all(ranks):
    def rank(ctx):
        with assert_raises(ConfigError, problem="cannot be unpickled here", got="ValueError: made for rank"):
            accel.gather_object(ctx, Explosive(ctx.rank))
        with assert_raises(ConfigError, problem="rank 0: the object cannot be unpickled", got="made for rank 1"):
            accel.broadcast_object_list(ctx, [Explosive(ctx.rank)], src=1)
        accel.wait_for_everyone(ctx)
        return True

    assert ranks.run(rank, 2) == [True] * 2


def test_lists_of_other_lengths_and_other_ranks_are_told_of(ranks):
    def rank(ctx):
        with assert_raises(CollectiveMismatch, expected=r"\(1 objects\)", got=r"\(2 objects\)"):
            accel.broadcast_object_list(ctx, [0] * (1 + ctx.rank))
        with assert_raises(CollectiveMismatch, expected=r"\(dst=0\)", got=r"\(dst=1\)"):
            accel.gather_object(ctx, 0, dst=ctx.rank)
        with assert_raises(ConfigError, problem="there is no such rank"):
            accel.gather_object(ctx, 0, dst=2)
        return True

    assert ranks.run(rank, 2) == [True] * 2
