# SPDX-License-Identifier: Apache-2.0
"""Layouts: which rows of a whole tensor a rank holds, and what views and slices make of them. Pure; no tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, wraps
from typing import Any, NamedTuple, TypeVar, cast

from torch.compiler import is_dynamo_compiling

from accel.errors import PrepareError
from accel.parallel._private import in_function_transform

_KEPT = 4096  # results that each function of layouts keeps
_MOST_RUNS = 16  # pieces of a layout that are taken as slices
R = TypeVar("R")


def kept(function: Callable[..., R]) -> Callable[..., R]:
    """Keep the results of a pure function, but in a trace of torch.compile, which warns of caches."""
    known = lru_cache(_KEPT)(function)

    @wraps(function)
    def call(*args: Any) -> R:
        return function(*args) if is_dynamo_compiling() else known(*args)

    return call


class NoRuleError(PrepareError):
    """A function has no rule for parts, or none for these arguments."""


class TracedNoRuleError(Exception):
    """A `NoRuleError` in a trace of torch.compile, which follows no `__init__` of errors. Its problem is `args[2]`."""


_WHOLE = "Keep the module whole: plan=accel.parallel.Plan(tensor=accel.parallel.tensor_plan(model, example=batch))."
_LOCAL = (
    "If a kernel computes each element, row or head independently, let it have the rows of a rank: "
    'accel.parallel.local_map(kernel, "elements"). '
)


_DECLARED = (
    "Correct over= and out= of local_map: the function gets the rows of a rank. Pass None in over= for a tensor that "
    "it needs in full, or that has one row. "
)


_AROUND = (
    "Take gradients by torch.autograd, for example torch.autograd.functional.jacobian(model, x). "
    "Or keep the model whole: plan=accel.parallel.Plan(tensor={})."
)


def no_rule(problem: str, *, may_be_kernel: bool = False, fix: str = "") -> Exception:
    """Return the error of a function that cannot compute on parts; its name is put before the problem of arguments."""
    if is_dynamo_compiling():
        return TracedNoRuleError("", "", problem)
    return NoRuleError(
        "a function has no rule for a tensor that ranks along tp divide",
        expected="functions that give each rank, from its rows, its part of the result on all rows",
        got=problem,
        where="forward, in a module that ranks along tp divide",
        fix=fix or (_DECLARED if "local_map " in problem else _LOCAL if may_be_kernel else "") + _WHOLE,
    )


def refuse_transform(what: str, *, is_layer: bool = False) -> None:
    """Raise the error of a transform of torch.func, such as `vjp`, `grad` or `vmap`, if one runs the function around:
    it would compute with a rank's rows. One that runs a layer may be around the model."""
    if not is_dynamo_compiling() and in_function_transform():
        raise no_rule(f"{what}, in a transform of torch.func", may_be_kernel=True, fix=_AROUND if is_layer else "")


class RowCut(NamedTuple):
    """The division of the rows of one dimension among ranks."""

    repeat: int  # number of times that the segments follow each other
    # (length, ways) of each: its rows are cut in `ways` pieces, and rank r of n holds number `r * ways // n`; of
    # `-ways` pieces, counted from the last one. One way: all ranks hold all of it. Pieces are equal, but for the last
    # ones of a length that is no multiple of `ways`.
    segments: tuple[tuple[int, int], ...]

    @property
    def total(self) -> int:
        """Number of rows of the whole."""
        if len(self.segments) == 1:  # most often; every shape asks
            return self.repeat * self.segments[0][0]
        return self.repeat * sum(length for length, _ in self.segments)

    @property
    def local(self) -> int:
        """Number of rows of each rank; of unequal pieces the most that one has."""
        return self.repeat * sum(-(-length // abs(ways)) for length, ways in self.segments)

    @property
    def is_equal(self) -> bool:
        """Whether each rank has as many rows."""
        return not any(length % ways for length, ways in self.segments)

    @property
    def listed(self) -> list[tuple[int, int]]:
        """All segments in order."""
        return list(self.segments) * self.repeat

    def is_shared(self, size: int) -> bool:
        """Return whether several of `size` ranks hold the same row."""
        return any(abs(ways) != size for _, ways in self.segments)


class RowLayout(NamedTuple):
    """The dimension that ranks divide, and its cut."""

    dim: int
    cut: RowCut


def balanced(length: int, size: int) -> RowCut:
    """Return the cut into an early and a late piece for each rank, as positions of a sequence are cut."""
    return RowCut(1, ((length // 2, size), (length // 2, -size)))


def even(length: int, size: int) -> RowCut:
    """Return the cut into one piece for each rank, in order."""
    return RowCut(1, ((length, size),))


def cut_of(repeat: int, segments: Sequence[tuple[int, int]]) -> RowCut | None:
    """Return the cut of repeated segments in its shortest form; None where all ranks hold all rows."""
    if all(ways == 1 for _, ways in segments):
        return None
    if len(set(segments)) == 1:
        return RowCut(repeat * len(segments), (segments[0],))
    return RowCut(repeat, tuple(segments))


def at(dim: int, cut: RowCut | None) -> RowLayout | None:
    """Return the layout of a dimension; None for a cut of None."""
    return None if cut is None else RowLayout(dim, cut)


@kept
def shortest(layout: RowLayout) -> RowLayout | None:
    """Return the layout with its cut in its shortest form; None where all ranks hold all rows."""
    return at(layout.dim, cut_of(*layout.cut))


@kept
def rows_of(cut: RowCut, rank: int, size: int) -> tuple[int, ...]:
    """Return the rows of the whole that a rank holds, in order."""
    found: list[int] = []
    begin = 0
    for length, ways in cut.listed:
        piece = -(-length // abs(ways))
        number = rank * abs(ways) // size
        first = begin + (number if ways > 0 else -ways - 1 - number) * piece
        begin += length
        found += range(first, min(first + piece, begin))
    return tuple(found)


class Pieces(NamedTuple):
    """Rows of each of several pieces of a dimension."""

    repeat: int  # number of pieces
    rows: slice  # of each


Places = slice | tuple[slice, ...] | tuple[int, ...] | Pieces


def runs_of(rows: Sequence[int], pieces: int) -> Places:
    """Return rows as slices, or one by one where a layout has many pieces.

    Slices need no tensor of places, which autograd would save: a checkpoint that computes a forward again must save as
    many tensors, on each rank.
    """
    if not rows:
        return slice(0, 0)
    if pieces > _MOST_RUNS:
        return tuple(rows)
    found: list[slice] = []
    for row in rows:
        if found and found[-1].stop == row:
            found[-1] = slice(found[-1].start, row + 1)
        else:
            found.append(slice(row, row + 1))
    return found[0] if len(found) == 1 else tuple(found)


@kept
def places_of(need: RowCut, have: RowCut | None, rank: int, size: int) -> Places:
    """Return where a rank finds the rows that it needs among those that it has; `have` is None for all of them."""
    if have is None and len(need.segments) == 1 and need.segments[0][1] > 0:  # most often: no look at each row
        length, ways = need.segments[0]
        piece = -(-length // ways)
        first = min(rank * ways // size * piece, length)
        rows = slice(first, min(first + piece, length))
        return rows if need.repeat == 1 else Pieces(need.repeat, rows)
    own = range(need.total) if have is None else rows_of(have, rank, size)
    place = {row: number for number, row in enumerate(own)}
    try:
        found = [place[row] for row in rows_of(need, rank, size)]
    except KeyError:
        raise no_rule(f"a product or sum of parts: ranks hold {have}, not {need}") from None
    return runs_of(found, len(need.listed))


def whole_of(own: Sequence[int], layout: RowLayout) -> tuple[int, ...]:
    """Return the whole shape of a tensor with a layout, from the shape of a rank's rows or from the whole shape."""
    return (*own[: layout.dim], layout.cut.total, *own[layout.dim + 1 :])


@kept
def viewed(own: tuple[int, ...], layout: RowLayout, new: tuple[int, ...]) -> tuple[RowLayout, tuple[int, ...]]:
    """Return the layout and this rank's shape of a view of a tensor as another whole shape, which may have one -1;
    `own` is the shape of a rank's rows.

    All dimensions are merged into one. Its cut is the cut of the divided dimension, repeated by the dimensions before
    it and lengthened by the dimensions behind it. It is then split again: one dimension of the new shape must have all
    of the cut.
    """
    shape = whole_of(own, layout)
    count = math.prod(shape)
    if -1 in new:
        others = -math.prod(new)
        new = tuple(count // max(others, 1) if each == -1 else each for each in new)
    if math.prod(new) != count:
        raise no_rule(f"view of {list(shape)} as {list(new)}, of another number of elements")
    if not count and layout.cut.total:  # of no rows along another dimension, such as a batch of none
        found, here = viewed(_at_least_one(shape), layout, _at_least_one(new))
        return found, tuple(length and rows for length, rows in zip(new, here, strict=True))
    if not layout.cut.is_equal:
        kept_dims = len(shape) - layout.dim
        if new[-kept_dims:] != shape[layout.dim :]:
            raise no_rule(f"view of {list(shape)} as {list(new)}, where ranks have {_UNEQUAL}")
        dim = len(new) - kept_dims
        return RowLayout(dim, layout.cut), (*new[:dim], -1, *new[dim + 1 :])
    behind = math.prod(shape[layout.dim + 1 :])
    repeat = layout.cut.repeat * math.prod(shape[: layout.dim])
    segments = [(length * behind, ways) for length, ways in layout.cut.segments]
    row = sum(length for length, _ in segments)
    before = 1
    for dim, length in enumerate(new):
        after = math.prod(new[dim + 1 :])
        fits = repeat % before == 0 and all(rows % (after * ways) == 0 for rows, ways in segments)
        if length > 1 and fits and repeat // before * row // after == length:
            cut = RowCut(repeat // before, tuple((rows // after, ways) for rows, ways in segments))
            return RowLayout(dim, cut), (*new[:dim], cut.local, *new[dim + 1 :])
        before *= length
    raise no_rule(f"view of {list(shape)} as {list(new)}: no dimension has all that ranks divide")


def _at_least_one(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(each or 1 for each in shape)


_UNEQUAL = "unequal numbers of rows"


def _check_equal(cut: RowCut) -> None:
    if not cut.is_equal:
        raise no_rule(f"some of {cut.total} rows, where ranks have {_UNEQUAL}")


class RowPiece(NamedTuple):
    """Neighbouring rows of a divided dimension, as a rank holds them."""

    first: int  # this rank's first row of them
    length: int  # number of this rank's rows
    cut: RowCut | None  # theirs; None where all ranks hold them all


@kept
def piece_of(cut: RowCut, start: int, stop: int) -> RowPiece:
    """Return the piece [start, stop) of the whole, which begins and ends at borders of segments, or inside of one that
    all ranks hold."""
    _check_equal(cut)
    first: int | None = None
    segments: list[tuple[int, int]] = []
    begin = own = 0
    for length, ways in cut.listed:
        low = max(start, begin)
        high = min(stop, begin + length)
        if low < high:
            if ways != 1 and high - low != length:
                raise no_rule(f"rows {start} to {stop} of {cut}: ranks hold pieces of a segment")
            first = own + low - begin if first is None else first
            segments.append((high - low, ways))
        begin += length
        own += length // abs(ways)
    if first is None:
        return RowPiece(0, 0, None)
    return RowPiece(first, sum(length // abs(ways) for length, ways in segments), cut_of(1, segments))


@kept
def pieces_of(cut: RowCut, sizes: tuple[int, ...]) -> tuple[RowPiece, ...]:
    """Return pieces of so many rows of the whole that follow each other."""
    ends = itertools.accumulate(sizes, initial=0)
    return tuple(piece_of(cut, start, stop) for start, stop in itertools.pairwise(ends))


@kept
def stepped(cut: RowCut, start: int, step: int) -> tuple[RowPiece, int]:
    """Return every `step`-th row from `start` on, with the step among this rank's rows; each piece must have as many
    of each kind, as interleaved gates do."""
    _check_equal(cut)
    if start >= step or any(length // abs(ways) % step for length, ways in cut.segments):
        raise no_rule(f"every {step}-th row from {start} on of {cut}")
    fewer = RowCut(cut.repeat, tuple((length // step, ways) for length, ways in cut.segments))
    return RowPiece(start, fewer.local, fewer), step


def scaled(cut: RowCut, times: int) -> RowCut:
    """Return the cut where each row becomes so many neighbours."""
    _check_equal(cut)
    return RowCut(cut.repeat, tuple((length * times, ways) for length, ways in cut.segments))


def finest(cuts: Sequence[RowCut]) -> RowCut:
    """Return the cut that leaves ranks the fewest rows, the first of several."""
    found = cuts[0]
    for each in cuts[1:]:  # torch.compile knows no min with a key
        if each != found and each.local < found.local:
            found = each
    return found


class Alignment(NamedTuple):
    """The rows to take of broadcast tensors, so that a rank computes with the rows of one cut."""

    # Of each tensor, the dimension and the rows to take; None for all of them.
    places: tuple[tuple[int, Places] | None, ...]
    right: int = 0  # number of the divided dimension, counted from the right, 1 for the last
    cut: RowCut | None = None  # of it; None where nothing is divided

    def layout(self, rank: int) -> RowLayout | None:
        """Return the layout of a result of so many dimensions."""
        return None if self.cut is None else RowLayout(rank - self.right, self.cut)


@kept
def alignment_of(kinds: tuple[tuple[RowLayout | None, tuple[int, ...], bool], ...], rank: int, size: int) -> Alignment:
    """Return how tensors are cut alike, broadcast from the right as torch does. Of each: its layout, the shape of the
    rows of a rank, and whether it may be a gradient of this rank's rows."""
    rights = {len(own) - layout.dim for layout, own, _ in kinds if layout is not None}
    if not rights:
        return Alignment((None,) * len(kinds))
    if len(rights) > 1:
        raise no_rule(f"a function of parts that ranks divide along dimensions {sorted(rights)} from the right")
    right = rights.pop()
    need = finest([layout.cut for layout, _, _ in kinds if layout is not None])
    places: list[tuple[int, Places] | None] = []
    for layout, own, may_be_gradient in kinds:
        shape = own if layout is None else whole_of(own, layout)
        dim = len(shape) - right
        if dim < 0 or shape[dim] == 1 or (layout is not None and layout.cut == need):
            places.append(None)
        elif shape[dim] == need.total:
            places.append((dim, places_of(need, layout and layout.cut, rank, size)))
        elif layout is None and shape[dim] == need.local and may_be_gradient:
            places.append(None)
        else:
            raise no_rule(f"a function of {shape[dim]} rows and a part of {need.total}")
    return Alignment(tuple(places), right, need)


def fit(needed: Sequence[frozenset[int]], length: int) -> RowCut | None:
    """Return the cut by which each rank holds the rows that it needs; None where no cut does, or all need the same.

    `needed` has the rows of each rank. Rows that no rank needs, such as rows of inactive units, may be anywhere; if
    there are some, equal packs are tried first.
    """
    size = len(needed)
    if not all(needed) or all(len(each) == length for each in needed):
        return None
    exact = _fit_segments(needed, length)
    if exact is not None and len(frozenset[int]().union(*needed)) == length:
        return exact
    for cut in _packs(length, size):
        held = [frozenset(rows_of(cut, rank, size)) for rank in range(size)]
        alike = zip(needed, held, strict=True)
        if all(own <= rows and len(own) * 4 > len(rows) for own, rows in alike):
            return cut
    return exact


def _packs(length: int, size: int) -> Iterator[RowCut]:
    for ways in sorted((each for each in range(2, size + 1) if size % each == 0), reverse=True):
        for packs in (1, 2, 3, 4, 6):
            if length % (packs * ways) == 0:
                yield RowCut(packs, ((length // packs, ways),))


def _fit_segments(needed: Sequence[frozenset[int]], length: int) -> RowCut | None:
    """The cut by runs of rows that the same ranks need."""
    size = len(needed)
    runs: list[tuple[tuple[int, ...], int]] = []
    owners = [tuple(rank for rank in range(size) if row in needed[rank]) for row in range(length)]
    last = next(each for each in owners if each)
    for each in owners:
        last = each or last  # a row that no rank needs belongs to those before it
        if runs and runs[-1][0] == last:
            runs[-1] = (last, runs[-1][1] + 1)
        else:
            runs.append((last, 1))
    segments: list[tuple[int, int]] = []
    while runs:
        ranks, own = runs[0]
        ways = size // len(ranks)
        group, runs = runs[:ways], runs[ways:]
        wanted = [(tuple(range(at * len(ranks), (at + 1) * len(ranks))), own) for at in range(ways)]
        if size % len(ranks) or group != wanted:
            return None
        segments.append((own * ways, ways))
    return cut_of(1, segments)


def dims_of(given: Any, rank: int) -> list[int]:
    """Return the dimensions of an argument, an int or several or None for all, counted from the front."""
    listed = range(rank) if given is None else [given] if isinstance(given, int) else cast("Sequence[int]", given)
    return sorted({each % rank for each in listed}) if rank else []
