# SPDX-License-Identifier: Apache-2.0
"""Strategies for worlds of ranks, their schedules and faults, and for tensors and trees of them on each rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import torch
from hypothesis import strategies as st
from torch import Tensor

from accel.errors import ConfigError
from accel.errors._checks import check_choice
from accel.testing._faults import CallAction, Fault, WriteAction, WriteFault
from accel.tree._walk import map_leaves

_LARGEST_SEED = 2**32 - 1
_LARGEST_BYTE = 2**16 - 1


class World(msgspec.Struct, frozen=True):
    """Arguments of `simulate` after the function: `simulate(fn, world.size, seed=world.seed)`."""

    size: int  # number of ranks
    seed: int | None  # of the schedule; None for rank order


def worlds(*, min_size: int = 1, max_size: int = 8) -> st.SearchStrategy[World]:
    """Generate worlds; they shrink to few ranks that go in rank order.

    Args:
        min_size: the fewest ranks, 1 or more.
        max_size: the most ranks.

    Raises:
        ConfigError: sizes out of range.
    """
    check_sizes(min_size, max_size)
    return st.builds(World, size=st.integers(min_size, max_size), seed=schedules())


def schedules() -> st.SearchStrategy[int | None]:
    """Generate values for `seed=`; they shrink to None, which lets ranks go in rank order."""
    return st.none() | st.integers(0, _LARGEST_SEED)


def faults(
    world_size: int, calls: int, *, actions: Sequence[CallAction] = get_args(CallAction)
) -> st.SearchStrategy[Fault]:
    """Generate faults; they shrink to rank 0 and call 0.

    Args:
        world_size: number of ranks, 1 or more.
        calls: number of calls of every rank without faults, 1 or more. Where it is too large, the run raises
            `FaultNotReached`, with their number.
        actions: kinds of faults; the first is the one to shrink to.

    Raises:
        ConfigError: a number below 1, no actions or an unknown one.
    """
    _check_points(world_size, calls, "calls")
    kinds = _checked_actions(actions, get_args(CallAction))
    return st.builds(Fault, rank=st.integers(0, world_size - 1), call=st.integers(0, calls - 1), action=kinds)


def write_faults(
    world_size: int, writes: int, *, actions: Sequence[WriteAction] = get_args(WriteAction)
) -> st.SearchStrategy[WriteFault]:
    """Generate bad writes; they shrink to rank 0 and write 0.

    Args:
        world_size: number of ranks, 1 or more.
        writes: number of files that every rank writes through accel, 1 or more.
        actions: kinds of faults; the first is the one to shrink to.

    Raises:
        ConfigError: a number below 1, no actions or an unknown one.
    """
    _check_points(world_size, writes, "writes")
    return st.builds(
        WriteFault,
        rank=st.integers(0, world_size - 1),
        write=st.integers(0, writes - 1),
        action=_checked_actions(actions, get_args(WriteAction)),
        byte=st.integers(0, _LARGEST_BYTE),
    )


def check_sizes(min_size: int, max_size: int) -> None:
    """Raise `ConfigError` unless there can be a world between these sizes."""
    if not 1 <= min_size <= max_size:
        raise ConfigError(
            "no world of such a size", expected="1 <= min_size <= max_size", got=f"{min_size} and {max_size}"
        )


def _check_points(world_size: int, points: int, where: str) -> None:
    if world_size < 1 or points < 1:
        raise ConfigError(
            "no fault can happen", expected=f"world_size and {where} from 1", got=f"{world_size} and {points}"
        )


def _checked_actions(actions: Sequence[str], known: Sequence[str]) -> st.SearchStrategy[str]:
    for action in actions:
        check_choice(action, known, "unknown action", where="actions=")
    if not actions:
        raise ConfigError("no action to choose from", expected=f"some of {', '.join(known)}", where="actions=")
    return st.sampled_from(list(actions))


Layout = Literal["contiguous", "transposed", "strided", "expanded", "conjugated"]

DTYPES = (
    torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.float64, torch.float16, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.complex128,
)  # fmt: skip

_ORDINARY = 7  # 0 to 6 are exact in every dtype, and so are their sums over a few ranks
_VALUES = 9  # of a dtype, at most


class TensorValues(NamedTuple):
    """Values of a tensor: ordinary or special ones, from one of them on."""

    special: bool
    start: int


def tensors(
    *, dtypes: Sequence[torch.dtype] = DTYPES, max_dims: int = 3, max_side: int = 3, special: bool = False
) -> st.SearchStrategy[Tensor]:
    """Generate tensors on the CPU, 0-d, empty, non-contiguous and lazily conjugated ones among them.

    They shrink to a 0-d zero of the first dtype. Elements are small integers, so that sums over ranks are exact
    and two results can be compared with `torch.equal`.

    Args:
        dtypes: to choose from; the first is the simplest.
        max_dims: the most dimensions.
        max_side: the most elements along one dimension.
        special: whether elements may be nan, infinite, -0.0, or the largest and smallest of their dtype.

    Raises:
        ConfigError: no dtypes, or a negative number.
    """
    check_tensors(dtypes, max_dims=max_dims, max_side=max_side)
    return _tensors(st.sampled_from(list(dtypes)), st.lists(st.integers(0, max_side), max_size=max_dims), special)


def contents(*, special: bool) -> st.SearchStrategy[TensorValues]:
    """Generate what a tensor holds; it shrinks to elements from 0 on."""
    return st.builds(TensorValues, st.booleans() if special else st.just(False), st.integers(0, _VALUES - 1))


def layouts() -> st.SearchStrategy[Layout]:
    """Generate layouts in memory; the first is the plain one."""
    return st.sampled_from(get_args(Layout))


def build(dtype: torch.dtype, shape: Sequence[int], content: TensorValues, layout: Layout) -> Tensor:
    """Make a tensor with consecutive values of its dtype as elements."""
    values = _values(dtype, special=content.special)
    elements = [values[(content.start + i) % len(values)] for i in range(math.prod(shape))]
    tensor = torch.tensor(elements, dtype=dtype).reshape(tuple(shape))
    match layout:
        case "transposed" if tensor.ndim > 1:
            return tensor.transpose(0, -1).contiguous().transpose(0, -1)
        case "strided" if tensor.ndim:
            return torch.stack([tensor, tensor], dim=-1)[..., 1]
        case "expanded" if tensor.ndim and tensor.shape[0]:
            return tensor[:1].expand(tensor.shape)
        case "conjugated" if dtype.is_complex:
            return tensor.conj()
        case _:
            return tensor


def check_tensors(dtypes: Sequence[torch.dtype], **numbers: int) -> None:
    """Raise `ConfigError` unless there are dtypes to choose from, and no number is negative."""
    if not dtypes:
        raise ConfigError("no dtype to choose from", expected="one dtype or more", got=repr(dtypes), where="dtypes=")
    for name, number in numbers.items():
        if number < 0:
            raise ConfigError("a negative number", expected="0 or more", got=str(number), where=f"{name}=")


@st.composite  # and not `builds`, so that failing examples show tensors
def _tensors(
    draw: st.DrawFn, dtypes: st.SearchStrategy[torch.dtype], shapes: st.SearchStrategy[list[int]], special: bool
) -> Tensor:
    return build(draw(dtypes), draw(shapes), draw(contents(special=special)), draw(layouts()))


def _values(dtype: torch.dtype, *, special: bool) -> list[complex]:
    """Some values of a dtype: ordinary ones, or those that are easily spoilt."""
    if dtype == torch.bool:
        return [False, True]
    if dtype.is_complex:
        parts = _values(dtype.to_real(), special=special)
        return [complex(real.real, imaginary.real) for real, imaginary in zip(parts, reversed(parts), strict=True)]
    if not special:
        return list(range(_ORDINARY))
    if dtype.is_floating_point:
        limits = torch.finfo(dtype)
        return [math.nan, math.inf, -math.inf, -0.0, limits.max, limits.min, limits.smallest_normal, limits.eps, 1.0]
    limits = torch.iinfo(dtype)
    return [limits.max, limits.min, 0, 1]


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
        content: its elements on a rank with shift 0.
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
