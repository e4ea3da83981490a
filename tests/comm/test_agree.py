# SPDX-License-Identifier: Apache-2.0
"""Work that fails on a rank fails on all, with one error; work that succeeds gives every rank's value."""

from __future__ import annotations

import pytest
import torch
from catching import caught
from hypothesis import given, settings, strategies as st
from profiles import share

import accel
from accel.comm import Call, agreed, agreed_values, shared_failure
from accel.errors import CheckpointError, CollectiveMismatch, PeerError

seeds = st.none() | st.integers(0, 1000)
relaxed = settings(deadline=None, max_examples=share(0.8))


def _agree(ctx: accel.DistContext, error: Exception | None) -> None:
    with agreed(ctx.comm, Call("saving")):
        if error is not None:
            raise error


@relaxed
@given(size=st.integers(2, 8), data=st.data(), seed=seeds)
def test_all_raise_the_lowest_failing_ranks_error_or_none_does(ranks, size, data, seed):
    failing = data.draw(st.sets(st.integers(0, size - 1)))

    def rank(ctx):
        mine = (
            CheckpointError(f"no room for {ctx.rank}", where="disk", fix="Free some.") if ctx.rank in failing else None
        )
        error = caught(_agree, ctx, mine)
        accel.wait_for_everyone(ctx)  # ranks are still in step
        return error

    for error in ranks.run(rank, size, seed=seed):
        if failing:
            lowest = min(failing)
            assert type(error) is CheckpointError
            assert str(error) == f"rank {lowest}: no room for {lowest} - at disk. Free some."
        else:
            assert error is None


def test_the_failing_rank_keeps_its_own_error_as_the_cause(ranks):
    mine = OSError("no space")
    errors = ranks.run(lambda ctx: caught(_agree, ctx, mine if ctx.rank == 1 else None), 3)
    assert [type(error) for error in errors] == [PeerError] * 3
    assert {str(error) for error in errors} == {"rank 1: OSError: no space"}
    assert [error.__cause__ for error in errors] == [None, mine, None]


def test_ranks_that_fail_alike_are_not_numbered(ranks):
    errors = ranks.run(lambda ctx: caught(_agree, ctx, CheckpointError("no such folder")), 3)
    assert [str(error) for error in errors] == ["no such folder"] * 3


def test_a_single_rank_raises_its_error_as_it_is():
    mine = OSError("no space")
    assert caught(_agree, accel.single(), mine) is mine
    assert caught(_agree, accel.single(), None) is None


@pytest.mark.parametrize("text", ["x" * 100_000, "\0" * 3000, "é😀" * 2000, "a file \udcff name", 'a "quote"\n' * 600])
def test_any_message_reaches_the_others_with_its_kind(ranks, text):
    def rank(ctx):
        mine = CheckpointError("cannot write", got=text, where=text, fix="Free some.") if ctx.rank == 1 else None
        return caught(_agree, ctx, mine)

    for error in ranks.run(rank, 2):
        assert type(error) is CheckpointError
        assert error.problem == "rank 1: cannot write"
        assert error.fix == "Free some."
        assert error.got.startswith(text[:7])


@pytest.mark.parametrize(
    "elsewhere",
    [
        accel.wait_for_everyone,
        lambda ctx: accel.gather(ctx, torch.zeros(3)),
        lambda ctx: accel.reduce(ctx, torch.zeros(5000)),
        lambda ctx: _agree(ctx, None),
    ],
    ids=["barrier", "gather", "reduce", "block"],
)
def test_a_failure_reaches_ranks_in_another_call(ranks, elsewhere):
    def rank(ctx):
        if ctx.rank == 2:
            return caught(_agree, ctx, CheckpointError("broken"))
        return caught(elsewhere, ctx)

    for error in ranks.run(rank, 4):
        assert type(error) is CheckpointError
        assert str(error) == "rank 2: broken"


def test_an_agreed_block_that_fails_somewhere_fails_everywhere(ranks):
    def rank(ctx):
        done = []

        def work():
            with agreed(ctx.comm, Call("work")):
                if ctx.rank == 1:
                    raise KeyError("lost")
                done.append(ctx.rank)

        return caught(work), done

    results = ranks.run(rank, 3)
    assert [str(error) for error, _ in results] == ["rank 1: KeyError: 'lost'"] * 3
    assert [done for _, done in results] == [[0], [], [2]]


@relaxed
@given(size=st.integers(1, 8), seed=seeds)
def test_values_of_all_ranks_reach_every_rank(ranks, size, seed):
    squares = ranks.run(lambda ctx: agreed_values(ctx.comm, Call("work"), lambda: ctx.rank**2, int), size, seed=seed)
    assert squares == [[rank**2 for rank in range(size)]] * size


@relaxed
@given(size=st.integers(2, 8), data=st.data(), seed=seeds)
def test_no_rank_gets_values_where_work_fails_on_one(ranks, size, data, seed):
    failing = data.draw(st.integers(0, size - 1))

    def rank(ctx):
        def work():
            if ctx.rank == failing:
                raise OSError("no space")
            return ctx.rank

        error = caught(agreed_values, ctx.comm, Call("work"), work, int)
        accel.wait_for_everyone(ctx)
        return error

    for error in ranks.run(rank, size, seed=seed):
        assert type(error) is PeerError
        assert str(error) == f"rank {failing}: OSError: no space"


def test_ranks_whose_work_differs_are_named(ranks):
    def rank(ctx):
        return caught(agreed_values, ctx.comm, Call("work", f"part {ctx.rank % 2}"), lambda: b"", bytes)

    for error in ranks.run(rank, 3):
        assert type(error) is CollectiveMismatch
        assert "part 0" in error.expected
        assert "part 1" in error.got


def test_a_shared_failure_is_raised_by_the_collective_that_follows(ranks):
    def rank(ctx):
        def work():
            with shared_failure(ctx.comm, Call("gather")):
                if ctx.rank == 1:
                    raise ValueError("odd")
            accel.gather(ctx, torch.zeros(1))

        return caught(work), accel.any_rank(ctx, ctx.rank == 0)

    results = ranks.run(rank, 3)
    assert [str(error) for error, _ in results] == ["rank 1: ValueError: odd"] * 3
    assert [flag for _, flag in results] == [True] * 3
