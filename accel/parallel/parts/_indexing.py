# SPDX-License-Identifier: Apache-2.0
"""Rules of indices: slices of the divided dimension at borders of its segments, anything along the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from accel.parallel.parts._elementwise import written_rows, written_whole
from accel.parallel.parts._layout import RowLayout, finest, no_rule, stepped
from accel.parallel.parts._part import (
    Args,
    Named,
    PartTensor,
    aligned,
    entered,
    layouts_of,
    make,
    name_of,
    named,
    own_rows,
    placed,
    plain_of,
    ranks_of,
    whole_shape,
)
from accel.parallel.parts._shapes import narrowed


class _Index(NamedTuple):
    """An index with an entry for each dimension, and None for new ones."""

    entries: list[Any]  # in order
    place: int  # of the divided dimension's entry; -1 where nothing is divided


def _width(entry: Any) -> int:
    """The number of dimensions that an entry of an index takes."""
    if entry is None or entry is Ellipsis:
        return 0
    return entry.dim() if isinstance(entry, Tensor) and entry.dtype == torch.bool else 1


def _complete(index: Any, part: PartTensor) -> _Index:
    given = list(cast("tuple[Any, ...]", index)) if isinstance(index, tuple) else [index]
    missing = [slice(None)] * (part.dim() - sum(map(_width, given)))
    where = next((at for at, each in enumerate(given) if each is Ellipsis), None)
    entries = [*given, *missing] if where is None else [*given[:where], *missing, *given[where + 1 :]]
    if any(isinstance(each, PartTensor) for each in entries):
        entries = [_alike(each) for each in entries]
    if part.division is None:
        return _Index(entries, -1)
    dim = 0
    for place, each in enumerate(entries):
        if dim == part.division.dim and each is not None:
            return _Index(entries, place)
        dim += _width(each)
        if dim > part.division.dim:
            raise no_rule("a mask as the index of a part")
    raise no_rule("an index of fewer dimensions")


def _alike(entry: Any) -> Any:
    if isinstance(entry, PartTensor) and entry.division is not None:
        raise no_rule("an index that ranks divide")
    return plain_of(entry) if isinstance(entry, Tensor) else entry


def _of_divided(part: PartTensor, layout: RowLayout, entry: Any) -> tuple[PartTensor, Any]:
    """The part with the rows that an entry names along the divided dimension, and the entry for what is left."""
    length = layout.cut.total
    listed: list[Any] = cast("list[Any]", entry) if isinstance(entry, list) else []
    if listed and all(type(each) is int for each in listed):
        rows = [each % length for each in listed]
        if rows == list(range(rows[0], rows[-1] + 1)):
            entry = slice(rows[0], rows[-1] + 1)
    if isinstance(entry, int) and not isinstance(entry, bool):
        row = entry % length
        found = narrowed(part, layout.dim, row, row + 1)
        if found.division is not None:
            raise no_rule("one row of a dimension that ranks divide")
        return found, 0
    if not isinstance(entry, slice):
        raise no_rule("an index of the divided dimension that is no slice")
    start, stop, step = cast("slice[Any, Any, Any]", entry).indices(length)
    if (start, stop, step) == (0, length, 1):
        return part, slice(None)
    if step == 1:
        return narrowed(part, layout.dim, start, max(start, stop)), slice(None)
    if stop != length or step < 1:
        raise no_rule("a step along the divided dimension that ends before it")
    piece, step = stepped(layout.cut, start, step)
    before = (slice(None),) * layout.dim
    assert piece.cut is not None
    return make(part[(*before, slice(piece.first, None, step))], RowLayout(layout.dim, piece.cut), part.ranks), slice(
        None
    )


def get(func: Any, args: Args, kwargs: Named) -> Any:
    """An index in brackets."""
    if not isinstance(args[0], PartTensor):
        raise no_rule("a plain tensor indexed by parts")
    part, index = args[0], args[1]
    entries, place = _complete(index, part)
    if place < 0:
        return make(part[tuple(entries)], None, part.ranks)
    assert part.division is not None
    source, entries[place] = _of_divided(part, part.division, entries[place])
    rows = source[tuple(entries)]
    layout = source.division
    return make(rows, layout and RowLayout(_place_after(entries, place), layout.cut), part.ranks)


def _place_after(entries: Sequence[Any], place: int) -> int:
    """The dimension of the result for the slice at a place of an index."""
    kept = sum(each is None or isinstance(each, slice) for each in entries[:place])
    # an int together with tensors counts as one of the tensors
    tensors = [at for at, each in enumerate(entries) if isinstance(each, Tensor | list)]
    if not tensors:
        return kept
    advanced = [at for at, each in enumerate(entries) if isinstance(each, Tensor | list) or type(each) is int]
    widths = [torch.as_tensor(entries[at]).dim() if not _is_mask(entries[at]) else 1 for at in tensors]
    is_split = advanced[-1] - advanced[0] + 1 != len(advanced)
    return kept + (max(widths) if is_split or advanced[0] < place else 0)


def _is_mask(entry: Any) -> bool:
    return isinstance(entry, Tensor) and entry.dtype == torch.bool


def put(func: Any, args: Args, kwargs: Named) -> Any:
    """An index in brackets that is assigned; of a part only by slices and numbers."""
    part, index, value = args
    if not isinstance(part, PartTensor):
        return written_whole(func, args, kwargs)
    entries, _ = _complete(index, part)
    if any(isinstance(each, Tensor | list) for each in entries):
        raise no_rule("a part written at places that a tensor names")
    target = get(func, (part, index), {})
    if not isinstance(value, Tensor):
        target.fill_(value)
        return None
    own, alignment = aligned([target, value], part.ranks)
    if alignment.layout(target.dim()) != target.division:
        raise no_rule("a part written into a tensor that more ranks hold")
    own[0].copy_(own[1])
    return None


def index_select(func: Any, args: Args, kwargs: Named) -> Any:
    """index_select, along a dimension that all ranks hold."""
    given = named("input dim index", args, kwargs)
    part, index = given["input"], _alike(given["index"])
    if not isinstance(part, PartTensor):
        return func(part, given["dim"], index)
    dim = given["dim"] % part.dim()
    if part.division is not None and part.division.dim == dim:
        raise no_rule("of the divided dimension")
    return make(part.index_select(dim, index), part.division, part.ranks)


def gathered_along(func: Any, args: Args, kwargs: Named) -> Any:
    """gather, take_along_dim: along a dimension that all ranks hold."""
    given = named("input dim index", args, kwargs)
    source, index = given["input"], given["index"]
    ranks = ranks_of(source, index)
    dim = given["dim"] % source.dim()
    (rows, own), alignment = aligned([source, index], ranks)
    if alignment.cut is not None:
        divided = source.dim() - alignment.right
        if divided == dim or whole_shape(source)[divided] != whole_shape(index)[divided]:
            raise no_rule("along the divided dimension, or of some of its rows")
    return placed(torch.gather(rows, dim, own), alignment, ranks)


_BY_ROWS = ("index_add", "index_copy", "index_add_", "index_copy_")
_BY_ELEMENTS = ("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")


def scattered(func: Any, args: Args, kwargs: Named) -> Any:
    """scatter, scatter_add, scatter_reduce, index_add, index_copy: along a dimension that all ranks hold, to as many
    rows as the index has."""
    name = name_of(func)
    takes_rows = name in _BY_ROWS  # by an index of one dimension
    given = named("input dim index source" if takes_rows else "input dim index src reduce", args, kwargs)
    target = given.pop("input")
    if takes_rows:
        given["index"] = _alike(given["index"])
    if not isinstance(given.get("src", target), Tensor):
        given["value"] = given.pop("src")
    cut = [key for key, each in given.items() if isinstance(each, Tensor) and not (takes_rows and key == "index")]
    tensors = {"input": target, **{key: given[key] for key in cut}}
    ranks = ranks_of(*tensors.values())
    if name.endswith("_") and not isinstance(target, PartTensor):
        return written_whole(func, args, kwargs)
    layouts = layouts_of(tensors.values())
    layout = None
    own = {key: entered(each, ranks) for key, each in tensors.items()}
    if layouts:
        layout = RowLayout(layouts[0].dim, finest([each.cut for each in layouts]))
        lengths = {whole_shape(each)[layout.dim] for each in tensors.values()}
        if layout.dim == given["dim"] % target.dim() or len({each.dim for each in layouts}) > 1 or len(lengths) > 1:
            raise no_rule("along the divided dimension, or of some of its rows")
        own = {key: own_rows(each, layout.dim, layout.cut, ranks) for key, each in tensors.items()}
    rows = own.pop("input")
    if name.endswith("_") and rows is not target:
        raise no_rule("in place, of a tensor that more ranks hold than the others")
    found = func(written_rows(rows) if name.endswith("_") else rows, **{**given, **own})
    return target if name.endswith("_") else make(found, layout, ranks)


RULES = {
    "__getitem__": get,
    "__setitem__": put,
    "index_select": index_select,
    "gather": gathered_along,
    **dict.fromkeys((*_BY_ROWS, *_BY_ELEMENTS), scattered),
}
