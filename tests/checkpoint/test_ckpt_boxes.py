# SPDX-License-Identifier: Apache-2.0
"""Boxes of tensors: what tiles a tensor, and what torch lays out on a mesh is where the arithmetic says."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from ckpt_helpers import Box
from hypothesis import given, strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from accel.checkpoint._boxes import Split, intersect, local_box, shape_problem, tiling_problem, whole, within
from accel.checkpoint._live_tensors import held_box


@st.composite
def cut(draw: st.DrawFn, box: Box, depth: int = 3) -> list[Box]:
    """Boxes that tile a box, by cuts upon cuts."""
    dims = [dim for dim, extent in enumerate(box.shape) if extent > 1]
    if not dims or not depth or draw(st.booleans()):
        return [box]
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(1, box.shape[dim] - 1))
    low = Box(box.offset, (*box.shape[:dim], at, *box.shape[dim + 1 :]))
    start = (*box.offset[:dim], box.offset[dim] + at, *box.offset[dim + 1 :])
    high = Box(start, (*box.shape[:dim], box.shape[dim] - at, *box.shape[dim + 1 :]))
    return draw(cut(low, depth - 1)) + draw(cut(high, depth - 1))


SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@given(data=st.data(), shape=SHAPES)
def test_cuts_of_a_tensor_tile_it_in_any_order(data: st.DataObject, shape: tuple[int, ...]) -> None:
    boxes = data.draw(cut(whole(shape)).flatmap(st.permutations))
    assert tiling_problem(shape, boxes) == ""
    if len(boxes) > 1:
        assert tiling_problem(shape, boxes[1:])
        assert tiling_problem(shape, [*boxes, boxes[0]])


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    boxes=st.lists(
        st.builds(
            Box, st.tuples(st.integers(-1, 3), st.integers(-1, 3)), st.tuples(st.integers(0, 3), st.integers(0, 3))
        ),
        max_size=5,
    ),
)
def test_boxes_tile_a_tensor_if_each_element_is_in_one_of_them(shape: tuple[int, ...], boxes: list[Box]) -> None:
    sides = [side for box in boxes for side in zip(box.offset, box.shape, shape, strict=True)]
    inside = all(start >= 0 and extent > 0 and start + extent <= limit for start, extent, limit in sides)
    counts = torch.zeros(shape)
    for box in boxes if inside else []:
        counts[within(box, whole(shape))] += 1
    assert (tiling_problem(shape, boxes) == "") == (inside and bool((counts == 1).all()))


@given(st.data(), SHAPES)
def test_what_two_boxes_share_is_what_both_hold(data: st.DataObject, shape: tuple[int, ...]) -> None:
    one, other = (data.draw(cut(whole(shape)).flatmap(st.sampled_from)) for _ in range(2))
    counts = torch.zeros(shape)
    counts[within(one, whole(shape))] += 1
    counts[within(other, whole(shape))] += 1
    shared = intersect(one, other)
    assert (counts == 2).sum() == (shared.size if shared else 0)
    assert shared is None or (counts[within(shared, whole(shape))] == 2).all()


@pytest.mark.parametrize(
    ("shape", "boxes", "problem"),
    [
        ((), [], "do not cover"),
        ((), [Box((), ())] * 2, "do not cover"),
        ((2,), [Box((0, 0), (2, 1))], "number of dimensions"),
        ((0, 3), [], "in one piece"),
        ((0, 3), [Box((0, 0), (0, 2))], "in one piece"),
        ((2, 3), [Box((0, 0), (2, 0)), whole((2, 3))], "empty"),
        ((10**17,), [Box((0,), (10**17 + 1,))], "reaches out"),
        ((2,) * 9, [Box((0,) * 9, (1,) * 9)], "split along 9 dimensions"),
        ((3, 3), [Box((0, 0), (1, 3)), Box((1, 0), (1, 3)), Box((1, 0), (1, 3))], "do not cover"),
    ],
)
def test_pieces_that_are_no_tiling_are_told(shape: tuple[int, ...], boxes: list[Box], problem: str) -> None:
    assert problem in tiling_problem(shape, boxes)


def test_a_pinwheel_tiles_and_absurd_shapes_are_told_at_once() -> None:
    wheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert tiling_problem((3, 3), [Box(*each) for each in wheel]) == ""
    assert all(map(shape_problem, [(2**40, 2**40), (2**80, 0), (1,) * 10**6]))
    assert not shape_problem((2**30, 2**20, 0))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_a_mesh_holds_each_element_once_but_for_copies(mesh: list[int], data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=2))
    dims = data.draw(st.lists(st.none() | st.integers(0, len(shape) - 1), min_size=len(mesh), max_size=len(mesh)))
    inner = [math.prod(mesh[j] for j in range(i + 1, len(mesh)) if dims[j] == dims[i]) for i in range(len(mesh))]
    strided = data.draw(st.booleans())  # each splits what the later ones have split, or the other way round
    splits = [None if dim is None else Split(dim, inner[i] if strided else 1) for i, dim in enumerate(dims)]
    copies = math.prod(extent for extent, dim in zip(mesh, dims, strict=True) if dim is None)
    counts = torch.zeros(shape)
    for place in product(*map(range, mesh)):
        box = local_box(shape, mesh, place, splits)
        assert box is not None
        counts[within(box, whole(shape))] += 1
    assert bool((counts == copies).all())


def test_splits_that_contradict_each_other_hold_nothing() -> None:
    assert local_box((8,), (2, 2), (0, 0), [Split(0, 3), Split(0)]) is None
    assert local_box((8,), (2, 2), (0, 0), [Split(0), Split(0, 2)]) is None


def _numbered(rows: int, columns: int) -> torch.nn.Linear:
    layer = torch.nn.Linear(columns, rows)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(rows * columns).view(rows, columns))
        layer.bias.copy_(torch.arange(rows))
    return layer


def _matches(tensor: torch.Tensor) -> bool:
    """Whether what this rank holds are the elements of its box, in a tensor of which each element is its index."""
    assert isinstance(tensor, DTensor)
    box = held_box(tensor, "tensor")
    expected = torch.arange(math.prod(tensor.shape)).view(tensor.shape)
    local = tensor.to_local()
    return local.numel() == 0 if box is None else torch.equal(expected[within(box, whole(tensor.shape))].float(), local)


@pytest.mark.parametrize("mesh", [(1,), (3,), (2, 2), (2, 3), (3, 2), (2, 2, 2)])
def test_torch_lays_tensors_out_where_the_arithmetic_says(ranks, mesh) -> None:
    names = ("a", "b", "c")[: len(mesh)]

    def body(ctx):
        device_mesh, found = init_device_mesh("cpu", mesh, mesh_dim_names=names), []
        for placements in product([Replicate(), Shard(0), Shard(1)], repeat=len(mesh)):
            for shape in [(7, 5), (2, 1), (8, 6)]:
                full = torch.arange(math.prod(shape)).view(shape).float()
                found.append(_matches(distribute_tensor(full, device_mesh, placements, src_data_rank=None)))
        if len(mesh) == 2:
            for plan in (ColwiseParallel(), RowwiseParallel()):
                for rows, columns in [(8, 12), (7, 5), (10, 14), (3, 3)]:
                    layer = parallelize_module(_numbered(rows, columns), device_mesh["b"], plan)
                    fully_shard(layer, mesh=device_mesh["a"])
                    found += [_matches(each) for each in layer.parameters()]
            hybrid = fully_shard(_numbered(7, 5), mesh=device_mesh)
            found += [_matches(each) for each in hybrid.parameters()]
        if len(mesh) == 3:
            for plan in (ColwiseParallel(), RowwiseParallel()):
                layer = parallelize_module(_numbered(10, 14), device_mesh["c"], plan)
                fully_shard(layer, mesh=device_mesh["a", "b"])
                found += [_matches(each) for each in layer.parameters()]
        return all(found)

    assert all(ranks.run(body, math.prod(mesh), default_group=True))
