# SPDX-License-Identifier: Apache-2.0
"""`gather` is torch.cat over ranks for any tree, and every rank learns when it cannot be."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from leaves import form_of, tensors_of
from profiles import share

import accel
from accel.comm import inline_bytes
from accel.errors import CollectiveMismatch, ConfigError, TreeError

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
)  # fmt: skip
LAYOUTS = ("plain", "transposed", "strided", "expanded", "conjugated", "grad")
worlds = st.integers(1, 8)
relaxed = settings(deadline=None, max_examples=share(1.2))


class Pair(NamedTuple):
    left: object
    right: object


def _values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


def _laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in other memory."""
    if layout == "transposed" and x.ndim >= 2:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided" and x.ndim:
        return torch.stack([x, x], dim=-1)[..., 1]
    if layout == "conjugated" and x.is_complex():
        return x.conj().clone().resolve_conj().conj()
    if layout == "grad" and (x.is_floating_point() or x.is_complex()) and x.dtype.itemsize > 1:
        return x.clone().requires_grad_()
    if layout == "expanded" and x.ndim and x.shape[0] == 1:
        return x[0].expand(1, *x.shape[1:])
    return x


@st.composite
def leaf_plans(draw):
    """How a leaf looks on every rank: dtype, trailing shape (None for 0-d), rows by rank, layout by rank."""
    trailing = draw(st.none() | st.lists(st.integers(0, 3), max_size=2).map(tuple))
    big = draw(st.integers(0, 9)) == 0
    rows = draw(st.lists(st.integers(0, 600 if big else 4), min_size=8, max_size=8))
    layouts = draw(st.lists(st.sampled_from(LAYOUTS), min_size=8, max_size=8))
    return draw(st.sampled_from(DTYPES)), trailing, rows, layouts, draw(st.integers(0, 2**20))


def _leaf(plan, rank: int) -> torch.Tensor:
    dtype, trailing, rows, layouts, seed = plan
    shape = () if trailing is None else (rows[rank], *trailing)
    return _laid_out(_values(shape, dtype, seed + rank), layouts[rank])


def _wrapped(shape: int, leaves: list[torch.Tensor]) -> object:
    """One of several nestings."""
    if shape == 0:
        return leaves
    if shape == 1:
        return {"x": tuple(leaves), "nothing": None}
    if shape == 2:
        return Pair(dict(enumerate(leaves)), [None, {}])
    return {"deep": [{"deeper": Pair(leaf, None)} for leaf in leaves]}


@relaxed
@given(
    size=worlds, plans=st.lists(leaf_plans(), max_size=4), nesting=st.integers(0, 3), seed=st.none() | st.integers(0, 9)
)
def test_gather_is_cat_over_ranks(ranks, size, plans, nesting, seed):
    inputs = [_wrapped(nesting, [_leaf(plan, rank) for plan in plans]) for rank in range(size)]
    results = ranks.run(lambda ctx: accel.gather(ctx, inputs[ctx.rank]), size, seed=seed)
    flat = [[leaf.detach() for leaf in tensors_of(tree)] for tree in inputs]
    expected = [torch.cat([torch.atleast_1d(each) for each in parts]) for parts in zip(*flat, strict=True)]
    for rank, result in enumerate(results):
        assert type(result) is type(inputs[rank])
        assert form_of(result) == form_of(inputs[rank])
        for one, other in zip(tensors_of(result), expected, strict=True):
            assert one.dtype == other.dtype
            assert not one.requires_grad
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        if nesting == 1:
            assert result["nothing"] is None


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_a_column_of_few_rows_is_sent(ranks, rows):
    """Torch calls it contiguous whatever its stride, when it has less than two rows."""
    table = torch.arange(12.0).reshape(3, 4)
    for result in ranks.run(lambda ctx: accel.gather(ctx, table[:rows, 1]), 2):
        assert torch.equal(result, torch.cat([table[:rows, 1]] * 2))


@pytest.mark.parametrize("extra", [-17, -16, -15, 0, 1, 4096])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(
    "size", [3, 17, pytest.param(129, marks=pytest.mark.slow)]
)  # which have first messages of other sizes
def test_payloads_around_the_size_of_the_first_message(ranks, extra, ragged, size):
    def mine(ctx, rank):
        rows = max(inline_bytes(ctx.comm), 512) - 16 + extra  # 16 for the lengths
        return torch.arange(rows if rank or not ragged else 3).to(torch.uint8)

    def rank(ctx):
        joined = torch.cat([mine(ctx, rank) for rank in range(size)])
        return torch.equal(accel.gather(ctx, mine(ctx, ctx.rank)), joined)

    assert all(ranks.run(rank, size))


def test_results_are_copies_on_any_number_of_ranks(ranks):
    for size in (1, 2):
        inputs = [torch.ones(2) for _ in range(size)]

        def rank(ctx, inputs=inputs):
            accel.gather(ctx, inputs[ctx.rank]).zero_()
            accel.gather(ctx, inputs)[0].zero_()

        ranks.run(rank, size)
        assert all(bool((each == 1).all()) for each in inputs)


@relaxed
@given(size=worlds, plans=st.lists(leaf_plans(), max_size=3), data=st.data(), seed=st.none() | st.integers(0, 9))
def test_one_rank_gets_what_all_would(ranks, size, plans, data, seed):
    dst = data.draw(st.integers(0, size - 1))
    inputs = [{"x": [_leaf(plan, rank) for plan in plans]} for rank in range(size)]

    def rank(ctx):
        return accel.gather(ctx, inputs[ctx.rank], dst=dst, to="cpu"), accel.gather(ctx, inputs[ctx.rank])

    for number, (chosen, everyone) in enumerate(ranks.run(rank, size, seed=seed)):
        if number != dst:
            assert chosen is None
            continue
        for one, other in zip(tensors_of(chosen), tensors_of(everyone), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@relaxed
@given(rows=st.lists(st.integers(0, 3), min_size=1, max_size=5), large=st.lists(st.booleans(), min_size=5, max_size=5))
def test_large_tensors_of_any_length_beside_small_ones(ranks, rows, large):
    """Large on some ranks only, so that ranks must agree on what goes alone."""

    def tree(rank):
        wide = torch.arange(rows[rank] * 40_000 if large[rank] else rows[rank]) + rank
        return {"wide": wide, "flags": torch.ones(rows[rank], dtype=torch.bool), "loss": torch.tensor(float(rank))}

    for dst in (None, 0):
        results = ranks.run(lambda ctx, dst=dst: accel.gather(ctx, tree(ctx.rank), dst=dst), len(rows))
        for result in results if dst is None else results[:1]:
            for key, joined in result.items():
                assert torch.equal(joined, torch.cat([torch.atleast_1d(tree(rank)[key]) for rank in range(len(rows))]))


@pytest.mark.parametrize("dst", [None, 1])
@pytest.mark.parametrize("ragged", [False, True])
def test_tensors_without_elements_beside_large_ones(ranks, dst, ragged):
    """So that what travels together is nothing."""

    def rank(ctx):
        rows = ctx.rank if ragged else 1
        tree = {"large": torch.ones(40_000), "none": torch.ones(0, 3), "narrow": torch.ones(rows, 0).short()}
        return accel.gather(ctx, tree, dst=dst)

    results = ranks.run(rank, 3)
    for result in results if dst is None else [results[dst]]:
        shapes = {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in result.items()}
        assert shapes == {
            "large": ((120_000,), torch.float32),
            "none": ((0, 3), torch.float32),
            "narrow": ((3, 0), torch.int16),
        }


def test_more_tensors_than_the_first_message_can_count(ranks):
    tree = [[torch.full((rank,), i) for i in range(5000)] for rank in range(3)]
    for result in ranks.run(lambda ctx: accel.gather(ctx, tree[ctx.rank]), 3):
        assert [each.tolist() for each in result] == [[i] * 3 for i in range(5000)]


@pytest.mark.parametrize("options", [{"dst": 3}, {"dst": -1}, {"dst": True}, {"dst": "0"}, {"to": "cuda"}])
def test_options_that_cannot_be_are_refused_on_every_rank(ranks, options):
    ((name, value),) = options.items()

    def rank(ctx):
        with assert_raises(ConfigError, got=f"^{value!r}$", where=f"^gather, {name}=$"):
            accel.gather(ctx, X, **(options if ctx.rank == 1 else {}))
        return True

    assert ranks.run(rank, 3) == [True] * 3


def test_a_tensor_in_two_places_is_two_tensors(ranks):
    shared = torch.ones(2)
    for result in ranks.run(lambda ctx: accel.gather(ctx, [shared, {"again": shared}]), 2):
        result[0].zero_()
        assert result[1]["again"].tolist() == [1.0] * 4


def test_results_hold_memory_for_themselves_only(ranks):
    """A view of a packed buffer would keep it alive, be saved with all of it, and be refused by safetensors."""
    tree = {"a": torch.ones(5), "b": torch.ones(7, dtype=torch.int64), "c": torch.ones(100_000)}
    for call in (accel.gather, accel.reduce, accel.broadcast):
        for result in ranks.run(lambda ctx, call=call: call(ctx, tree), 2):
            for leaf in tensors_of(result):
                assert leaf.untyped_storage().nbytes() == leaf.nbytes


def test_subclasses_that_are_plain_memory_are_sent_and_others_refused(ranks):
    class Image(torch.Tensor):
        pass

    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError

    image, parameter = torch.ones(2).as_subclass(Image), torch.nn.Parameter(torch.ones(2))
    for result in ranks.run(lambda ctx: accel.gather(ctx, [image, parameter]), 2):
        assert all(type(each) is torch.Tensor and each.tolist() == [1.0] * 4 for each in result)
    wrapper = torch.ones(2).as_subclass(Wrapper)

    def rank(ctx):
        with assert_raises(TreeError, got="Wrapper", where=r"\$\.w", fix="of a DTensor"):
            accel.gather(ctx, {"w": wrapper if ctx.rank else torch.ones(2)})
        return True

    assert ranks.run(rank, 2) == [True, True]


def test_neither_tensor_nor_global_randomness_is_touched(ranks):
    def rank(ctx):
        before = torch.get_rng_state()
        accel.gather(ctx, {"a": torch.zeros(3000)})
        return torch.equal(before, torch.get_rng_state())

    assert all(ranks.run(rank, 2))


X = torch.zeros(2, 3)
MISMATCHES = {
    "structure": ([X], (X,), "$: list"),
    "missing": ({"a": X, "b": X}, {"a": X}, "$.b: float32[*, 3]"),
    "key": ({"a": X}, {"b": X}, "$.b"),
    "order of keys": ({"a": X, "b": X}, {"b": X, "a": X}, "$.b"),
    "dtype": ({"a": X, "b": {"c": X}}, {"a": X, "b": {"c": X.double()}}, "$.b.c: float64[*, 3]"),
    "trailing shape": ([X, X], [X, torch.zeros(2, 4)], "$[1]: float32[*, 4]"),
    "dimensions": (X, torch.zeros(2), "$: float32[*]"),
    "no dimension": (torch.zeros(2), torch.tensor(0.0), "$: float32[]"),
    "tensor or not": ([X, None], [X, X], "$[1]"),
}


@pytest.mark.parametrize("name", MISMATCHES)
@pytest.mark.parametrize("swapped", [False, True])
def test_every_rank_names_both_ranks_and_the_path(ranks, name, swapped):
    usual, odd, said = MISMATCHES[name]
    odd_rank = 0 if swapped else 2

    def rank(ctx):
        try:
            accel.gather(ctx, odd if ctx.rank == odd_rank else usual)
        except CollectiveMismatch as error:
            accel.wait_for_everyone(ctx)  # the ranks are still in step
            return error
        return None

    for error in ranks.run(rank, 4):
        assert error.expected.startswith("rank 0: gather at test_gather.py:")
        assert error.got.startswith(f"rank {1 if swapped else 2}: gather at test_gather.py:")
        assert "in rank" in error.got
        assert said in error.expected + error.got


def test_mismatches_in_large_trees_are_found(ranks):
    def rank(ctx):
        tree = {f"leaf{i}": torch.zeros(2) for i in range(400)}
        if ctx.rank == 1:
            tree["leaf399"] = torch.zeros(2, dtype=torch.int64)
        with assert_raises(CollectiveMismatch, expected=r"leaf399: float32\[\*\]", got=r"rank 1.*leaf399: int64\[\*\]"):
            accel.gather(ctx, tree)
        return True

    assert ranks.run(rank, 2) == [True, True]


@pytest.mark.parametrize(
    "other", [lambda ctx: accel.reduce(ctx, X), accel.wait_for_everyone], ids=["reduce", "barrier"]
)
def test_another_call_is_named(ranks, other):
    def rank(ctx):
        with assert_raises(
            CollectiveMismatch, expected="rank 0: gather at test_gather.py", got=r"rank 1: \w+ at test_gather.py"
        ):
            other(ctx) if ctx.rank else accel.gather(ctx, X)
        return True

    assert ranks.run(rank, 3) == [True] * 3


REFUSED = {
    "a set": ({"a": [X, {1}]}, "$.a[1]"),
    "sparse": ({"a": X.to_sparse()}, "$.a"),
    "another device": ([X, torch.zeros(2, device="meta")], "$[1]"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("where", [{0, 1, 2}, {1}])
def test_what_cannot_be_sent_is_refused_on_every_rank_by_its_path(ranks, name, where):
    tree, path = REFUSED[name]

    def rank(ctx):
        with pytest.raises(TreeError) as caught:
            accel.gather(ctx, tree if ctx.rank in where else X)
        accel.wait_for_everyone(ctx)
        return caught.value

    for error in ranks.run(rank, 3):
        assert error.where == path
        assert error.problem.startswith("a " if len(where) == 3 else "rank 1: a ")  # no rank, where all are wrong alike
    with assert_raises(TreeError, problem="^a "):
        accel.gather(accel.single(), tree)


@pytest.mark.parametrize("leaf", [1, 2.5, True, "name", np.ones(2)], ids=lambda leaf: type(leaf).__name__)
@pytest.mark.parametrize("call", [accel.gather, accel.reduce], ids=["gather", "reduce"])
def test_what_is_no_tensor_is_refused_on_every_rank(ranks, leaf, call):
    """A number that came back as this rank's own would look like a metric of all ranks."""

    def rank(ctx):
        with assert_raises(TreeError, problem="only tensors", where=r"\$\.loss"):
            call(ctx, {"loss": leaf if ctx.rank == 1 or ctx.world_size == 1 else X})
        return True

    assert ranks.run(rank, 1)
    assert ranks.run(rank, 3)
