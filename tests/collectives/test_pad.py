# SPDX-License-Identifier: Apache-2.0
"""Padding fills up to the largest size and changes nothing else: no value, no dtype, no graph."""

from __future__ import annotations

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share

import accel
from accel.errors import CollectiveMismatch, ConfigError, TreeError

DTYPES = (
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64,
    torch.float8_e4m3fn,
)  # fmt: skip
relaxed = settings(deadline=None, max_examples=share(1.6))


@relaxed
@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    others=st.lists(st.integers(0, 3), max_size=2),
    data=st.data(),
    value=st.sampled_from([0, 1, 1.0, True]),
    first=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_all_ranks_get_the_largest_size_with_values_where_they_were(ranks, sizes, others, data, value, first, dtype):
    dim = data.draw(st.integers(-len(others) - 1, len(others)))
    place = dim % (len(others) + 1)
    most = max(sizes)
    shapes = [[*others[:place], size, *others[place:]] for size in sizes]
    inputs = [torch.full(shape, rank + 1.0).to(dtype) for rank, shape in enumerate(shapes)]
    results = ranks.run(
        lambda ctx: accel.pad_across_processes(
            ctx, {"x": inputs[ctx.rank], "n": None}, dim=dim, pad_index=value, pad_first=first
        ),
        len(sizes),
    )
    for result, own, size in zip(results, inputs, sizes, strict=True):
        assert result["n"] is None
        assert result["x"].dtype == dtype
        assert list(result["x"].shape) == [*others[:place], most, *others[place:]]
        wide = result["x"].to(torch.complex128)
        kept, filled = (wide.narrow(place, start, length) for start, length in _parts(size, most, first))
        assert torch.equal(kept, own.to(torch.complex128))
        assert bool((filled == 1 if value else filled == 0).all())


def _parts(size: int, most: int, first: bool) -> list[tuple[int, int]]:
    return [(most - size, size), (0, most - size)] if first else [(0, size), (size, most - size)]


def test_gradients_flow_through_the_kept_part(ranks):
    def rank(ctx):
        x = torch.ones(ctx.rank + 1, requires_grad=True)
        padded = accel.pad_across_processes(ctx, x * 2, pad_index=5)
        padded.sum().backward()
        return x.grad.tolist(), padded.tolist()

    assert ranks.run(rank, 3)[1] == ([2.0, 2.0], [2.0, 2.0, 5.0])


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.bool, 2),
        (torch.uint8, -1),
        (torch.uint8, 256),
        (torch.int64, 0.5),
        (torch.int64, float("nan")),
        (torch.int32, 2**31),
        (torch.float16, 1e6),
        (torch.float32, 1j),
        (torch.float8_e4m3fn, float("inf")),  # a format without infinities
        (torch.float8_e4m3fn, 1000),
    ],
)
def test_a_value_that_the_dtype_cannot_hold_is_refused_on_every_rank_by_path(ranks, dtype, value):
    def rank(ctx):
        with assert_raises(TreeError, problem="a value to pad with", where=r"\$\.ids"):
            accel.pad_across_processes(ctx, {"ids": torch.ones(2).to(dtype)}, pad_index=value)
        return True

    assert ranks.run(rank, 2) == [True] * 2
    assert rank(accel.single())


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -(2**10), 1e4])
def test_a_value_that_it_can_hold_is_taken(value):
    x = torch.zeros(2, dtype=torch.float16)
    assert accel.pad_across_processes(accel.single(), x, pad_index=value).tolist() == [0, 0]


@pytest.mark.parametrize(("shape", "dim"), [((), 0), ((2,), 1), ((2, 2), -3)])
def test_a_tensor_without_the_dimension_is_refused_on_every_rank_by_path(ranks, shape, dim):
    def rank(ctx):
        with assert_raises(TreeError, problem="without the dimension", where=r"\$\[1\]"):
            accel.pad_across_processes(ctx, [torch.ones(2, 2, 2), torch.ones(shape)], dim=dim)
        return True

    assert ranks.run(rank, 2) == [True] * 2


@pytest.mark.parametrize("dim", [True, 0.0, "0", None])
def test_a_dimension_is_an_int(ranks, dim):
    def rank(ctx):
        with assert_raises(ConfigError, problem="the dimension is not valid"):
            accel.pad_across_processes(ctx, torch.ones(2), dim=dim)
        return True

    assert ranks.run(rank, 2) == [True] * 2


def test_other_dimensions_and_options_must_agree(ranks):
    def rank(ctx):
        with assert_raises(CollectiveMismatch, expected=r"\$: float32\[\*, 2\]", got=r"\$: float32\[\*, 3\]"):
            accel.pad_across_processes(ctx, torch.ones(ctx.rank, 2 + ctx.rank))
        with assert_raises(CollectiveMismatch, expected="pad_first=False", got="pad_first=True"):
            accel.pad_across_processes(ctx, torch.ones(1), pad_first=bool(ctx.rank))
        with assert_raises(ConfigError, problem="the value is not a number"):
            accel.pad_across_processes(ctx, torch.ones(1), pad_index="0")
        return True

    assert ranks.run(rank, 2) == [True] * 2


def test_rows_of_a_ragged_last_batch_are_padded_to_one_width_and_gathered(ranks):
    def rank(ctx):
        rows = torch.full((3 - ctx.rank, 2 + ctx.rank), float(ctx.rank))
        wide = {dim: accel.pad_across_processes(ctx, rows, dim=dim, pad_index=-1) for dim in (1, -1)}
        assert accel.tree.tensors_equal(wide[1], wide[-1])
        with assert_raises(CollectiveMismatch, expected=r"float32\[\*, \*, 2\]", got=r"float32\[\*, \*, 3\]"):
            accel.pad_across_processes(ctx, torch.ones(1, 1, 2 + ctx.rank), dim=1)
        return accel.gather(ctx, wide[1]).tolist()

    assert ranks.run(rank, 2) == [[[0, 0, -1]] * 3 + [[1, 1, 1]] * 2] * 2


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize(
    "collective",
    [accel.pad_across_processes, accel.gather, accel.reduce, accel.broadcast, accel.broadcast_from_holder],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_on_every_rank_by_path_and_lists_of_tensors_pass(ranks, collective, layout):
    def rank(ctx):
        parts = [torch.ones(2, 3), torch.ones(3, 3)]
        holds = ctx.rank == 1 or collective is not accel.broadcast_from_holder
        nested = torch.nested.nested_tensor(parts, layout=layout)
        with assert_raises(TreeError, got="a nested ", where=r"x.*\[0\]", fix="to_padded_tensor"):
            collective(ctx, {"x": [nested if ctx.rank == 1 else parts[0]]} if holds else None)
        assert collective(ctx, {"x": parts} if holds else None)["x"][0].shape[1] == 3
        return True

    assert ranks.run(rank, 2) == [True] * 2
