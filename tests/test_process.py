# SPDX-License-Identifier: Apache-2.0
"""All ranks return or all raise; work goes to the ranks it is meant for; parts put together are the whole."""

from __future__ import annotations

import collections
import dataclasses
import functools
import io
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from catching import assert_raises, caught
from hypothesis import given, settings, strategies as st
from profiles import share

import accel
from accel.comm import Call, agreed
from accel.errors import CheckpointError, CollectiveMismatch, ConfigError, PeerError, TreeError

worlds = st.integers(1, 8)
seeds = st.none() | st.integers(0, 1000)
relaxed = settings(deadline=None, max_examples=share(0.8))


@relaxed
@given(flags=st.lists(st.booleans(), min_size=1, max_size=8), seed=seeds)
def test_any_rank_is_any(ranks, flags, seed):
    results = ranks.run(lambda ctx: accel.any_rank(ctx, flags[ctx.rank]), len(flags), seed=seed)
    assert results == [any(flags)] * len(flags)


def test_a_flag_that_is_neither_is_an_error_on_all(ranks):
    def rank(ctx):
        with assert_raises(PeerError, problem="rank 1: RuntimeError: Boolean value of Tensor"):
            accel.any_rank(ctx, torch.ones(2) if ctx.rank == 1 else True)
        return accel.any_rank(ctx, torch.tensor(ctx.rank == 0))

    assert ranks.run(rank, 3) == [True] * 3


@relaxed
@given(size=worlds, seed=seeds, per_node=st.sampled_from([1, 2, 4]))
def test_the_first_go_first(ranks, size, seed, per_node):
    size *= per_node

    def run(first):
        happened = []

        def rank(group):
            ctx = accel.from_group(group, device="cpu", local_world_size=per_node)
            with first(ctx):
                happened.append((ctx.rank, ctx.local_rank))
            return ctx.rank

        assert ranks.run_groups(rank, size, seed=seed) == list(range(size))
        return happened

    if size > 16:
        size = 16
    order = run(accel.main_process_first)
    assert order[0] == (0, 0)
    assert sorted(rank for rank, _ in order) == list(range(size))
    order = run(accel.local_main_process_first)
    assert {local for _, local in order[: size // per_node]} == {0}
    assert sorted(rank for rank, _ in order) == list(range(size))


@pytest.mark.parametrize("first", [accel.main_process_first, accel.local_main_process_first])
def test_a_failure_of_the_first_reaches_the_others_before_their_turn(ranks, first):
    began = []

    def rank(ctx):
        def work():
            with first(ctx):
                began.append(ctx.rank)
                raise KeyError("download")

        error = caught(work)
        accel.wait_for_everyone(ctx)
        return error

    main, *others = ranks.run(rank, 3)
    assert began == [0]
    assert type(main) is KeyError  # its own, with its traceback
    assert [str(error) for error in others] == ["rank 0: KeyError: 'download'"] * 2
    assert all(type(error) is PeerError for error in others)
    assert isinstance(caught(functools.partial(rank, accel.single())), type(None))


def test_a_failure_on_one_node_reaches_the_other_nodes(ranks):
    def rank(group):
        ctx = accel.from_group(group, device="cpu", local_world_size=2)

        def work():
            with accel.local_main_process_first(ctx):
                if ctx.node_rank == 1:
                    raise CheckpointError("node 1 is full")

        return caught(work)

    assert [str(error) for error in ranks.run_groups(rank, 4)] == [
        "rank 2: node 1 is full",
        "rank 2: node 1 is full",
        "node 1 is full",
        "rank 2: node 1 is full",
    ]


def _agree(ctx: accel.DistContext) -> None:
    with agreed(ctx.comm, Call("saving")):
        pass


def test_different_calls_are_named_with_their_sites(ranks):
    def rank(ctx):
        if ctx.rank == 1:
            return caught(_agree, ctx)
        return caught(lambda: accel.wait_for_everyone(ctx))

    for error in ranks.run(rank, 3):
        assert type(error) is CollectiveMismatch
        assert error.expected.startswith("rank 0: wait_for_everyone at test_process.py:")
        assert error.got.startswith("rank 1: saving at test_process.py:")
        assert "in _agree" in error.got


def test_work_runs_where_it_is_meant_to(ranks):
    def work(value, *, plus):
        """Documented."""
        return value + plus

    def rank(group):
        ctx = accel.from_group(group, device="cpu", local_world_size=2)
        chosen = {
            "main": accel.on_main_process(ctx, work),
            "local main": accel.on_local_main_process(ctx, work),
            "last": accel.on_last_process(ctx, work),
            "2": accel.on_process(ctx, work, 2),
            "local 1": accel.on_local_process(ctx, work, 1),
        }
        assert all((each.__name__, each.__doc__) == ("work", "Documented.") for each in chosen.values())
        return {name for name, each in chosen.items() if each(1, plus=2) == 3 or each(1, plus=2) is not None}

    assert ranks.run_groups(rank, 4) == [{"main", "local main"}, {"local 1"}, {"local main", "2"}, {"last", "local 1"}]


@pytest.mark.parametrize("number", [-1, 2])
def test_a_rank_that_does_not_exist_is_refused_on_every_rank(ranks, number):
    def rank(ctx):
        return [caught(on, ctx, print, number) for on in (accel.on_process, accel.on_local_process)]

    for errors in ranks.run(rank, 2):
        assert all(type(error) is ConfigError and error.expected == "0 to 1" for error in errors)


def test_printing_is_the_builtin_on_rank_0(ranks):
    def rank(ctx):
        file = io.StringIO()
        accel.print(ctx, "a", 1, sep="-", end="!", file=file)
        return file.getvalue()

    assert ranks.run(rank, 3) == ["a-1!", "", ""]


def test_printing_once_per_node_is_by_the_first_rank_of_each():
    shown = []
    for rank in range(4):
        position = {"rank": rank, "local_rank": rank % 2, "node_rank": rank // 2}
        ctx = dataclasses.replace(accel.single(), world_size=4, local_world_size=2, num_nodes=2, **position)
        file = io.StringIO()
        accel.print(ctx, "node", ctx.node_rank, once_per_node=True, file=file)
        shown.append(file.getvalue())
    assert shown == ["node 0\n", "", "node 1\n", ""]


def _parts(size: int, inputs: object, **options: bool) -> list:
    contexts = [dataclasses.replace(accel.single(), rank=rank, world_size=size) for rank in range(size)]
    return [accel.split_between_processes(ctx, inputs, **options) for ctx in contexts]


KINDS = {
    "list": (list, lambda parts: [each for part in parts for each in part]),
    "tuple": (tuple, lambda parts: [each for part in parts for each in part]),
    "tensor": (lambda xs: torch.tensor(xs, dtype=torch.int64), lambda parts: torch.cat(parts).tolist()),
    "array": (np.array, lambda parts: np.concatenate(parts).tolist()),
    "range": (lambda xs: range(len(xs)), lambda parts: [each for part in parts for each in part]),
}


@relaxed
@given(size=worlds, length=st.integers(0, 30), kind=st.sampled_from(list(KINDS)))
def test_parts_put_together_are_the_input_and_are_equally_long_but_for_one(size, length, kind):
    make, join = KINDS[kind]
    inputs = make(list(range(length)))
    parts = _parts(size, inputs)
    assert join(parts) == list(range(length))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert {type(part) for part in parts} == {type(inputs)}


@relaxed
@given(size=worlds, length=st.integers(0, 30), kind=st.sampled_from(["list", "tuple", "tensor"]))
def test_padded_parts_are_equally_long_and_begin_with_the_input(size, length, kind):
    make, join = KINDS[kind]
    inputs = make(list(range(length)))
    parts = _parts(size, inputs, pad=True)
    assert {len(part) for part in parts} == {-(-length // size)}
    assert {type(part) for part in parts} == {type(inputs)}
    plain = _parts(size, inputs)
    for part, real in zip(parts, plain, strict=True):
        assert list(part[: len(real)]) == list(real)
        assert all(each == length - 1 for each in part[len(real) :])
    assert list(range(length)) == join(plain)


@relaxed
@given(size=worlds, length=st.integers(0, 20))
def test_a_dict_is_split_value_by_value_and_left_as_it_was(size, length):
    inputs = {"x": list(range(length)), "y": torch.arange(length) * 2}
    before = {"x": list(inputs["x"]), "y": inputs["y"]}
    parts = _parts(size, inputs)
    assert [each for part in parts for each in part["x"]] == before["x"]
    assert torch.equal(torch.cat([part["y"] for part in parts]), before["y"])
    assert all(part["y"].tolist() == [2 * each for each in part["x"]] for part in parts)
    assert inputs["x"] == before["x"]
    assert inputs["y"] is before["y"]
    assert list(inputs) == ["x", "y"]


@pytest.mark.parametrize(
    ("inputs", "fields"),
    [
        ("a prompt", {"got": "str", "where": r", \$"}),
        (b"bytes", {"got": "bytes"}),
        (5, {"got": "int"}),
        (torch.tensor(5), {"got": "Tensor"}),
        (np.array(5), {"got": "ndarray"}),
        ({"a": [1, 2], "b": "cd"}, {"got": "str", "where": r", \$\.b"}),
        ({"a": {"b": [1], "c": 5}}, {"got": "int", "where": r", \$\.a\.c"}),
        ({"a": [1, 2], "b": {"c": [1]}}, {"problem": "different lengths", "got": r"2 at \$\.a, 1 at \$\.b\.c"}),
    ],
)
def test_what_has_no_positions_is_refused(inputs, fields):
    with assert_raises(ConfigError, **fields):
        accel.split_between_processes(accel.single(), inputs)


@pytest.mark.parametrize("inputs", [{1, 2}, collections.deque([1, 2])])
def test_unknown_containers_are_refused_by_their_path(inputs):
    with assert_raises(TreeError, got=f"^{type(inputs).__name__}$", where=r"\$\.x"):
        accel.split_between_processes(accel.single(), {"x": inputs})


class Batch(msgspec.Struct, frozen=True):
    ids: Any
    more: Any = None


@relaxed
@given(size=worlds, length=st.integers(0, 9), pad=st.booleans())
def test_containers_are_taken_apart_and_sequences_cut(size, length, pad):
    Pair = collections.namedtuple("Pair", "x y")
    rows = list(range(length))
    known = accel.tree.Container(collections.UserDict, dict, lambda old, children: collections.UserDict(children))
    whole = {"a": Batch(rows, Pair(torch.arange(length), None)), "b": collections.UserDict(ids=tuple(rows))}
    for rank, expected in enumerate(_parts(size, rows, pad=pad)):
        ctx = dataclasses.replace(accel.single(), rank=rank, world_size=size, containers=(known,))
        part = accel.split_between_processes(ctx, whole, pad=pad)
        assert type(part["a"]) is Batch
        assert part["a"].ids == part["a"].more.x.tolist() == list(part["b"]["ids"]) == expected
        assert type(part["b"]) is collections.UserDict
        assert part["a"].more.y is None


@pytest.mark.parametrize("length", [4, 5])
def test_what_cannot_be_padded_is_refused_on_every_rank(length):
    for rank in range(2):
        ctx = dataclasses.replace(accel.single(), rank=rank, world_size=2)
        with assert_raises(ConfigError, problem="can be padded"):
            accel.split_between_processes(ctx, np.zeros(length), pad=True)
