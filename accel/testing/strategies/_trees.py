# SPDX-License-Identifier: Apache-2.0
"""Trees of tensors: one for all, or one for each rank with the same structure and other numbers of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import msgspec
import torch
from hypothesis import strategies as st
from torch import Tensor

from accel.testing.strategies._tensors import DTYPES, Layout, TensorValues, build, check_tensors, contents, tensors
from accel.testing.strategies._worlds import check_sizes
from accel.tree import map_leaves

_MOST_SHIFT = 6
_SLOTS = 2


class Pair(NamedTuple):
    """The namedtuple of generated trees."""

    first: Any
    second: Any


@dataclass
class Point:
    """The dataclass of generated trees."""

    x: Any
    y: Any


class Record(msgspec.Struct):
    """The `msgspec.Struct` of generated trees."""

    a: Any
    b: Any


class _Rank(NamedTuple):
    """Properties of one rank: numbers of rows to pick from, if ranks differ, and values of its tensors."""

    rows: tuple[int, ...] | None
    look: int

    @property
    def layout(self) -> Layout:
        return get_args(Layout)[self.look % len(get_args(Layout))]

    @property
    def shift(self) -> int:
        return self.look // len(get_args(Layout))


class _Column:
    """Properties of a leaf that all ranks share.

    Args:
        dtype: of its elements.
        trailing: its shape without the first dimension; None for a 0-d leaf.
        content: its elements on a rank whose shift is 0.
        slot: index of its length among the numbers of rows.
    """

    __slots__ = ("content", "dtype", "slot", "trailing")

    def __init__(self, dtype: torch.dtype, trailing: Sequence[int] | None, content: TensorValues, slot: int) -> None:
        self.dtype = dtype
        self.trailing = trailing
        self.content = content
        self.slot = slot

    def on_rank(self, rank: _Rank, rows: Sequence[int]) -> Tensor:
        """The leaf of one rank; `rows` where ranks do not differ."""
        shape = () if self.trailing is None else ((rank.rows or rows)[self.slot], *self.trailing)
        return build(self.dtype, shape, self.content._replace(start=self.content.start + rank.shift), rank.layout)


def trees(leaf: st.SearchStrategy[Any] | None = None, *, max_depth: int = 2) -> st.SearchStrategy[Any]:
    """Generate nestings of list, tuple, dict, `Pair`, `Point` and `Record`; they shrink to an empty list or a leaf.

    Args:
        leaf: the leaves; `tensors()` if left out.
        max_depth: most containers inside each other; 0 for lone leaves.

    Raises:
        ConfigError: a negative number.
    """
    check_tensors(DTYPES, max_depth=max_depth)
    return _trees(tensors() if leaf is None else leaf, max_depth)


def rank_trees(
    *,
    ragged: bool = True,
    min_size: int = 1,
    max_size: int = 8,
    max_rows: int = 3,
    max_depth: int = 2,
    dtypes: Sequence[torch.dtype] = DTYPES,
    special: bool = False,
) -> st.SearchStrategy[list[Any]]:
    """Generate one tree of tensors for each rank of a world: `trees[ctx.rank]` in a world of `len(trees)`.

    Structure, dtypes and trailing shapes are the same on all ranks; memory layouts and elements are not. They shrink to
    few ranks and small trees.

    Args:
        ragged: whether a leaf's number of rows differs between ranks; if not, shapes are the same on all.
        min_size: the fewest ranks, 1 or more.
        max_size: the most ranks.
        max_rows: the most rows of a leaf on one rank; the fewest are 0.
        max_depth: most containers inside each other; 0 for lone leaves.
        dtypes: to choose from; the first is the simplest.
        special: whether elements may be special, as for `tensors`.

    Raises:
        ConfigError: sizes out of range, no dtypes, or a negative number.
    """
    check_sizes(min_size, max_size)
    check_tensors(dtypes, max_rows=max_rows, max_depth=max_depth)
    column = st.builds(
        _Column,
        st.sampled_from(list(dtypes)),
        st.none() | st.lists(st.integers(0, 3), max_size=2),
        contents(special=special),
        st.integers(0, _SLOTS - 1),
    )
    rows = st.tuples(*[st.integers(0, max_rows)] * _SLOTS)
    looks = st.integers(0, len(get_args(Layout)) * (_MOST_SHIFT + 1) - 1)
    ranks = st.lists(st.builds(_Rank, rows if ragged else st.none(), looks), min_size=min_size, max_size=max_size)
    return _per_rank(_trees(column, max_depth), rows, ranks)


@st.composite
def _per_rank(
    draw: st.DrawFn,
    columns: st.SearchStrategy[Any],
    rows: st.SearchStrategy[tuple[int, ...]],
    ranks: st.SearchStrategy[list[_Rank]],
) -> list[Any]:
    tree = draw(columns)
    same_rows = draw(rows)
    each = draw(ranks)
    return [map_leaves(lambda column, rank=rank: column.on_rank(rank, same_rows), tree) for rank in each]


@st.composite  # one strategy for every depth, so that a tree can shrink to a part of itself
def _trees(draw: st.DrawFn, leaf: st.SearchStrategy[Any], depth: int) -> Any:
    node = _trees(leaf, depth - 1)
    match draw(st.integers(0, 6)) if depth else 0:
        case 0:
            return draw(leaf)
        case 1:
            return draw(st.lists(node, max_size=3))
        case 2:
            return tuple(draw(st.lists(node, max_size=3)))
        case 3:
            keys = st.text("ab.é", max_size=2) | st.integers(0, 2)
            return draw(st.dictionaries(keys, node, max_size=3))
        case kind:
            return (Pair, Point, Record)[kind - 4](draw(node), draw(node))
