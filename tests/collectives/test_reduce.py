# SPDX-License-Identifier: Apache-2.0
"""`reduce` is the same reduction in one process, for any tree, on every rank."""

from __future__ import annotations

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share

import accel
from accel.errors import CollectiveMismatch, ConfigError, TreeError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
ALLOWED = {
    "sum": (*FLOATS, *INTEGERS, *COMPLEX),
    "mean": (*FLOATS, *COMPLEX),
    "max": (*FLOATS, *INTEGERS, torch.bool),
    "min": (*FLOATS, *INTEGERS, torch.bool),
    "product": (*FLOATS, *INTEGERS),
}
ALL = (*FLOATS, *INTEGERS, *COMPLEX, torch.bool, torch.int16, torch.float8_e4m3fn)
relaxed = settings(deadline=None, max_examples=share(1.2))


def _reference(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """In wide numbers, then back: small values keep it exact but for a mean's rounding."""
    dtype = parts[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    stacked = torch.stack(parts).to(wide)
    if op == "sum":
        return stacked.sum(0).to(dtype)
    if op == "mean":
        return (stacked.sum(0) / len(parts)).to(dtype)
    if op == "product":
        return stacked.prod(0).to(dtype)
    return (stacked.amax(0) if op == "max" else stacked.amin(0)).to(dtype)


def _values(shape: tuple[int, ...], dtype: torch.dtype, seed: int, *, strided: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 2, (*shape, 2) if strided else shape, generator=generator)
    x = (x + 1).to(dtype) if dtype.is_complex or dtype.is_floating_point else x.to(dtype)
    return x[..., 0] if strided else x


@relaxed
@given(size=st.integers(1, 8), op=st.sampled_from(list(ALLOWED)), data=st.data(), seed=st.none() | st.integers(0, 9))
def test_reduce_is_the_reduction_of_all_ranks_values(ranks, size, op, data, seed):
    big = data.draw(st.booleans())  # above the first message, so that an all-reduce does it
    shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
    plans = data.draw(st.lists(st.tuples(shapes, st.sampled_from(ALLOWED[op]), st.booleans()), max_size=4))
    plans += [((9000,), ALLOWED[op][0], False)] if big else []
    inputs = [
        {
            "x": [_values(shape, dtype, rank * 7 + i, strided=cut) for i, (shape, dtype, cut) in enumerate(plans)],
            "n": None,
        }
        for rank in range(size)
    ]
    results = ranks.run(lambda ctx: accel.reduce(ctx, inputs[ctx.rank], op), size, seed=seed)
    expected = [_reference(list(parts), op) for parts in zip(*(tree["x"] for tree in inputs), strict=True)]
    for result in results:
        assert result["n"] is None
        assert len(result["x"]) == len(expected)
        for one, other in zip(result["x"], expected, strict=True):
            assert one.dtype == other.dtype
            tolerance = 2**-7 if one.dtype in (torch.bfloat16, torch.float16) else 1e-6
            torch.testing.assert_close(one, other, rtol=tolerance, atol=0)
    assert all(torch.equal(a, b) for each in results for a, b in zip(each["x"], results[0]["x"], strict=True))


@relaxed
@given(size=st.integers(1, 5), shape=st.lists(st.integers(0, 3), max_size=2).map(tuple))
def test_results_are_new_and_inputs_stay(ranks, size, shape):
    for rows in ((), (5000,)):
        inputs = [torch.ones(rows + shape, requires_grad=True) for _ in range(size)]
        for result in ranks.run(lambda ctx, inputs=inputs: accel.reduce(ctx, inputs[ctx.rank]), size):
            assert not result.requires_grad
            result.zero_()
        assert all(bool((each == 1).all()) for each in inputs)


def test_sum_is_the_default(ranks):
    assert [int(each) for each in ranks.run(lambda ctx: accel.reduce(ctx, torch.tensor(ctx.rank)), 4)] == [6] * 4


@pytest.mark.parametrize("op", ALLOWED)
@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("rows", [3, 9000])
def test_a_dtype_is_reduced_or_refused_by_path_whatever_the_size_of_the_tree(ranks, op, dtype, rows):
    tree = {"a": torch.zeros(2), "b": torch.ones(rows).to(dtype)}

    def rank(ctx):
        try:
            return accel.reduce(ctx, tree, op)["b"].dtype
        except TreeError as error:
            return error

    for result in [*ranks.run(rank, 2), rank(accel.single())]:
        if dtype in ALLOWED[op]:
            assert result == dtype
        else:
            assert result.where == "$.b"
            assert f"{op} of {dtype}" in result.got


X = torch.zeros(2, 3)
MISMATCHES = {
    "operation": ((X, "sum"), (X, "max"), ("sum", "max")),
    "shape": (([X], "sum"), ([torch.zeros(3, 3)], "sum"), ("$[0]: float32[2, 3]", "$[0]: float32[3, 3]")),
    "rows of much": ((torch.zeros(5000), "sum"), (torch.zeros(5001), "sum"), ("$: float32[5000]", "$: float32[5001]")),
    "dtype": (({"a": X}, "sum"), ({"a": X.half()}, "sum"), ("$.a: float32[2, 3]", "$.a: float16[2, 3]")),
    "key": (({"a": X}, "sum"), ({"b": X}, "sum"), ("$.a", "$.b")),
    "structure": (((X,), "sum"), ([X], "sum"), ("$: tuple", "$: list")),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_every_rank_names_both_ranks_and_what_differs(ranks, name):
    usual, odd, said = MISMATCHES[name]

    def rank(ctx):
        try:
            accel.reduce(ctx, *(odd if ctx.rank == 3 else usual))
        except CollectiveMismatch as error:
            accel.wait_for_everyone(ctx)
            return error
        return None

    for error in ranks.run(rank, 5):
        assert error.expected.startswith("rank 0: reduce at test_reduce.py:")
        assert error.got.startswith("rank 3: reduce at test_reduce.py:")
        assert said[0] in error.expected
        assert said[1] in error.got


@pytest.mark.parametrize(
    ("op", "fields"),
    [
        ("avg", {"expected": "one of sum, mean"}),
        ("sun", {"fix": "Did you mean `sum`"}),
        (None, {"expected": "one of sum, mean"}),
    ],
)
def test_an_unknown_operation_on_one_rank_is_refused_on_all(ranks, op, fields):
    def rank(ctx):
        with assert_raises(ConfigError, problem="unknown operation", **fields):
            accel.reduce(ctx, X, op if ctx.rank == 1 else "sum")
        return True

    assert ranks.run(rank, 3) == [True] * 3
    with assert_raises(ConfigError, **fields):
        accel.reduce(accel.single(), X, op)


def test_a_container_that_cannot_be_taken_apart_is_refused_on_every_rank(ranks):
    def rank(ctx):
        with assert_raises(TreeError, problem="rank 2: a container", where=r"\$\.a"):
            accel.reduce(ctx, {"a": {X} if ctx.rank == 2 else X})
        return True

    assert ranks.run(rank, 3) == [True] * 3


def test_reductions_of_a_tree_are_those_of_its_leaves(ranks):
    def rank(ctx):
        tree = {"a": torch.full((2,), float(ctx.rank)), "b": torch.full((1500,), ctx.rank, dtype=torch.int64)}
        together = accel.reduce(ctx, tree, "max")
        apart = {key: accel.reduce(ctx, leaf, "max") for key, leaf in tree.items()}
        return together.keys() == apart.keys() and all(torch.equal(together[key], apart[key]) for key in apart)

    assert ranks.run(rank, 4) == [True] * 4
