# SPDX-License-Identifier: Apache-2.0
"""Tensors of one rank reach ranks that know neither their shapes nor their dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share

import accel
from accel.errors import ConfigError, TreeError
from accel.testing import simulate

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
SHAPES = st.lists(st.integers(0, 3), max_size=3)
LEAVES = st.none() | st.builds(lambda dtype, shape: torch.ones(shape, dtype=dtype), DTYPES, SHAPES)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(-9, 9), inner, max_size=3)
    ),
    max_leaves=6,
).filter(lambda tree: tree is not None)


def facts(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.dtype, tree.shape, tree.tolist()
    if isinstance(tree, dict):
        return {key: facts(each) for key, each in tree.items()}
    return [type(tree), *map(facts, tree)] if isinstance(tree, list | tuple) else tree


@settings(max_examples=share(0.4))
@given(tree=TREES, world_size=st.integers(1, 4), data=st.data())
def test_every_rank_gets_the_holders_tree(tree: Any, world_size: int, data: st.DataObject) -> None:
    holder = data.draw(st.integers(0, world_size - 1))
    found = simulate(lambda ctx: accel.broadcast_from_holder(ctx, tree if ctx.rank == holder else None), world_size)
    assert [facts(each) for each in found] == [facts(tree)] * world_size


@pytest.mark.parametrize("holders", [(), (0, 1)])
def test_none_or_several_holders_are_refused_on_every_rank(holders: tuple[int, ...]) -> None:
    def run(ctx: accel.DistContext) -> bool:
        with assert_raises(ConfigError, problem="one rank must pass"):
            accel.broadcast_from_holder(ctx, torch.ones(2) if ctx.rank in holders else None)
        return True

    assert simulate(run, 3) == [True] * 3


def test_what_cannot_be_described_is_named_on_every_rank() -> None:
    def run(ctx: accel.DistContext) -> bool:
        with assert_raises(TreeError, where=r"tree\['a'\]\[1\]"):
            accel.broadcast_from_holder(ctx, {"a": [None, {1, 2}]} if ctx.rank == 1 else None)
        return True

    assert simulate(run, 2) == [True] * 2
