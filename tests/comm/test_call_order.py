# SPDX-License-Identifier: Apache-2.0
"""Calls of one kind and shape, swapped on one rank, are an error; one call made from different places is right."""

from __future__ import annotations

import contextlib

import pytest
import torch
from catching import assert_raises
from hypothesis import given, strategies as st

import accel
from accel.errors import CollectiveMismatch, ConfigError

X, Y = torch.tensor([1.0]), torch.tensor([10.0])
TAGGED = {
    "gather": lambda ctx, tag: accel.gather(ctx, X, tag=tag),
    "reduce": lambda ctx, tag: accel.reduce(ctx, X, tag=tag),
    "broadcast": lambda ctx, tag: accel.broadcast(ctx, X, tag=tag),
    "pad_across_processes": lambda ctx, tag: accel.pad_across_processes(ctx, X, tag=tag),
    "gather_object": lambda ctx, tag: accel.gather_object(ctx, "x", tag=tag),
    "broadcast_object_list": lambda ctx, tag: accel.broadcast_object_list(ctx, ["x"], tag=tag),
    "any_rank": lambda ctx, tag: accel.any_rank(ctx, False, tag=tag),
}


def _first(ctx):
    return accel.reduce(ctx, X)


def _second(ctx):
    return accel.reduce(ctx, Y)


def _objects(ctx):
    return accel.gather_object(ctx, "a")


def _other_objects(ctx):
    return accel.gather_object(ctx, "b")


def _in_two_orders(ctx):
    if ctx.rank == 1:
        return _second(ctx), _first(ctx)
    return _first(ctx), _second(ctx)


def _in_a_loop_over_functions(ctx):
    calls = [_first, _second]
    return [call(ctx) for call in (calls if ctx.rank != 1 else reversed(calls))]


def _in_a_loop_over_lambdas(ctx):
    calls = {"a": lambda: accel.reduce(ctx, X), "b": lambda: accel.reduce(ctx, Y)}
    return [calls[key]() for key in ("ab" if ctx.rank != 1 else "ba")]


def _of_objects(ctx):
    calls = [_objects, _other_objects]
    return [call(ctx) for call in (calls if ctx.rank != 1 else reversed(calls))]


def _around_a_barrier(ctx):
    calls = [_first, accel.wait_for_everyone, _second]
    return [call(ctx) for call in (calls if ctx.rank != 1 else reversed(calls))]


SWAPPED = [_in_two_orders, _in_a_loop_over_functions, _in_a_loop_over_lambdas, _of_objects, _around_a_barrier]


@pytest.mark.parametrize("program", SWAPPED)
@pytest.mark.parametrize("world_size", [2, 3])
def test_two_calls_swapped_on_one_rank_are_an_error_on_every_rank(ranks, program, world_size):
    def rank(ctx):
        with pytest.raises(CollectiveMismatch) as caught:
            program(ctx)
        accel.wait_for_everyone(ctx)
        return caught.value

    errors = ranks.run(rank, world_size)
    assert len({str(error) for error in errors}) == 1
    name = "gather_object" if program is _of_objects else "reduce"
    places = [text.removeprefix(f"rank {n}: {name} at ") for n, text in enumerate([errors[0].expected, errors[0].got])]
    assert places[0].split(", then at ") == list(reversed(places[1].split(", then at ")))
    assert all("test_call_order.py:" in place for place in places)
    assert "tag=" in errors[0].fix


def _root_in_another_branch(ctx, step):
    if ctx.rank == step % 2:
        return accel.broadcast(ctx, X * step, src=step % 2)
    return accel.broadcast(ctx, torch.zeros(1), src=step % 2)


def _vote_in_two_branches(ctx, step):
    if ctx.rank == step % 2:
        return accel.any_rank(ctx, True)
    return accel.any_rank(ctx, False)


def _actor(ctx):
    return accel.gather_object(ctx, "what happened"), accel.broadcast(ctx, torch.zeros(1), src=0)


def _learner(ctx):
    return accel.gather_object(ctx, None), accel.broadcast(ctx, X, src=0)


def _actor_and_learner(ctx, step):
    return (_learner if ctx.rank == 0 else _actor)(ctx)


def _barrier_in_two_branches(ctx, step):
    calls = [lambda: accel.wait_for_everyone(ctx), lambda: accel.wait_for_everyone(ctx)]
    return calls[(ctx.rank + step) % 2]()


def _except(ctx, step):
    try:
        loss = X / (ctx.rank == step % 2)  # raises for nobody: a tensor's division gives inf
        if not torch.isfinite(loss):
            raise ArithmeticError
    except ArithmeticError:
        return accel.reduce(ctx, torch.zeros(1))
    else:
        return accel.reduce(ctx, X)


def _good(ctx):
    return accel.reduce(ctx, X)


def _bad(ctx):
    return accel.reduce(ctx, torch.zeros(1))


def _functions_of_two_branches(ctx, step):
    if ctx.rank == step % 2:
        return _good(ctx)
    return _bad(ctx)


def _first_rank_first(ctx, step):
    with accel.main_process_first(ctx):
        pass
    return accel.reduce(ctx, X)


RIGHT = [
    _root_in_another_branch,
    _vote_in_two_branches,
    _actor_and_learner,
    _barrier_in_two_branches,
    _except,
    _functions_of_two_branches,
    _first_rank_first,
]


@pytest.mark.parametrize("program", RIGHT)
@pytest.mark.parametrize("world_size", [2, 3])
def test_calls_that_belong_together_may_stand_in_different_places(ranks, program, world_size):
    def rank(ctx):
        return [str(program(ctx, step)) for step in range(4)]

    results = ranks.run(rank, world_size)
    if program in (_except, _functions_of_two_branches):
        assert results == [["tensor([1.])"] * 4] * world_size


def _total(ctx, ready):
    if ready:
        return accel.reduce(ctx, X)
    return accel.reduce(ctx, torch.zeros(1))


@contextlib.contextmanager
def _guard(ctx):
    try:
        yield
    except ArithmeticError:
        accel.any_rank(ctx, True)
    else:
        accel.any_rank(ctx, False)


def _helper_called_twice(ctx):
    return _total(ctx, ctx.rank == 0), _total(ctx, ctx.rank == 1)


def _guard_entered_twice(ctx):
    with _guard(ctx):
        if ctx.rank == 0:
            raise ArithmeticError
    with _guard(ctx):
        if ctx.rank == 1:
            raise ArithmeticError


def _before_recursion(ctx, depth=3):
    if depth:
        _ = _total(ctx, True) if (depth + ctx.rank) % 2 else _good(ctx)
        _before_recursion(ctx, depth - 1)


def _after_recursion(ctx, depth=3):
    if depth:
        _after_recursion(ctx, depth - 1)
        _ = _total(ctx, True) if (depth + ctx.rank) % 2 else _good(ctx)


def _within_calls_of_c(ctx):
    def passes(step):
        yield accel.any_rank(ctx, True) if (step + ctx.rank) % 2 else accel.any_rank(ctx, False)

    for step in range(40):  # CPython puts another instruction in the place of a call that is made often
        _ = list(passes(step))


IN_STEP = [_helper_called_twice, _guard_entered_twice, _before_recursion, _after_recursion, _within_calls_of_c]


@pytest.mark.parametrize("program", IN_STEP)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_come_by_the_same_lines_may_take_any_branch(ranks, program, world_size):
    assert ranks.run(lambda ctx: str(program(ctx)), world_size)


def test_an_early_stop_in_another_place_is_right(ranks):
    def rank(ctx):
        for step in range(10):
            if ctx.rank == 1 and step == 3:
                return accel.any_rank(ctx, True)
            if accel.any_rank(ctx, False):
                return step
        return None

    assert ranks.run(rank, 3) == [3, True, 3]


@given(taken=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=8))
def test_a_loop_may_take_any_branch_on_any_rank(ranks, taken):
    def rank(ctx):
        total = torch.zeros(1)
        for branches in taken:
            if branches[ctx.rank]:
                total += _good(ctx)
            else:
                total += accel.reduce(ctx, torch.zeros(1))
        return total.item()

    assert ranks.run(rank, 3) == [sum(map(sum, taken))] * 3


def test_one_tag_says_that_calls_from_two_places_belong_together(ranks):
    def rank(ctx):
        calls = [lambda: accel.reduce(ctx, X, tag="loss"), lambda: accel.reduce(ctx, Y, tag="loss")]
        return [call().item() for call in (calls if ctx.rank == 0 else reversed(calls))]

    assert ranks.run(rank, 2) == [[11.0, 11.0]] * 2


@pytest.mark.parametrize("name", TAGGED)
def test_tags_are_compared_where_any_rank_gives_one(ranks, name):
    def rank(ctx):
        order = ["loss", "error"] if ctx.rank == 0 else ["error", "loss"]
        with pytest.raises(CollectiveMismatch) as keys:
            [TAGGED[name](ctx, key) for key in order]
        with pytest.raises(CollectiveMismatch) as missing:
            TAGGED[name](ctx, "loss" if ctx.rank == 1 else None)
        with assert_raises(ConfigError, problem="tag"):
            TAGGED[name](ctx, 3 if ctx.rank == 1 else None)
        TAGGED[name](ctx, "loss")
        return keys.value, missing.value

    for keys, missing in ranks.run(rank, 2):
        assert "tag='loss'" in keys.expected
        assert "tag='error'" in keys.got
        assert "tag=" not in missing.expected
        assert "tag='loss'" in missing.got


def test_metrics_of_two_names_are_told_apart(ranks):
    def rank(ctx):
        loader = accel.prepare_loader(ctx, torch.utils.data.DataLoader(range(8)))
        batch = next(iter(accel.batches(ctx, loader, accel.Cursor(0))))
        with pytest.raises(CollectiveMismatch):
            accel.gather_for_metrics(ctx, batch.data, batch, tag=f"of {ctx.rank}")

    ranks.run(rank, 2)
