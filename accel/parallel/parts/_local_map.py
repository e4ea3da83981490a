# SPDX-License-Identifier: Apache-2.0
"""Functions without a rule, such as custom kernels, that compute with plain tensors of this rank's rows.

The caller declares in which way the function is independent: its results for some rows of its tensors are these rows
of its results. So a rank computes with its rows alone, and the results are parts again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils import _pytree as pytree

from accel.errors import PrepareError
from accel.parallel._private import flat_tensors, with_subclasses
from accel.parallel.parts._layout import RowCut, RowLayout, at, even, no_rule
from accel.parallel.parts._part import (
    Args,
    Named,
    Ranks,
    aligned,
    entered,
    layout_of,
    make,
    own_rows,
    plain_of,
    ranks_of,
    whole_shape,
)

P = ParamSpec("P")
R = TypeVar("R")
Rows = Literal["elements", "rows"]
_ROWS = ("elements", "rows")


class Independence(NamedTuple):
    """The declaration of a function.

    Attributes:
        over: places that it computes independently: of elements, of rows (the last dimension is needed in full), or
            of a dimension: its number in all tensors, or in each in order, None for a tensor that is needed in full.
        out: numbers of that dimension in each result in order; one for all.
        like: number of the tensor with the places of all results; None if their number shows it.
    """

    over: Rows | int | tuple[int | None, ...]
    out: tuple[int, ...] = ()
    like: int | None = None


class _LocalMap(Generic[P, R]):
    """A function that gets this rank's rows."""

    def __init__(self, function: Callable[P, R], declared: Independence, on_cpu: Callable[P, R] | None) -> None:
        self.function = function
        self.declared = declared
        self.on_cpu = on_cpu

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        function = self.function
        if self.on_cpu is not None and all(each.device.type == "cpu" for each in flat_tensors((args, kwargs))):
            function = self.on_cpu
        return on_own_rows(function, self.declared, args, kwargs)


def local_map(
    function: Callable[P, R],
    over: Literal["elements", "rows"] | int | Sequence[int | None],
    *,
    out: int | Sequence[int] | None = None,
    on_cpu: Callable[P, R] | None = None,
) -> Callable[P, R]:
    """Return a function that tensor-parallel layers can surround, such as a custom kernel.

    Between split layers the function gets plain tensors of this rank's rows, and its results are parts again. On other
    tensors it runs unchanged. It must take all sizes from its tensors.

    Args:
        function: independent for each place of `over`. Its results for some places must equal the results for all,
            at these places.
        over: `"elements"`; `"rows"`, if it needs the last dimension in full; or a dimension, such as the dimension of
            heads: its number in all tensors, or a number for each tensor argument in order, None for a tensor that it
            needs in full.
        out: the number of this dimension in all results, or in each; by default as in the first tensor.
        on_cpu: the same function for tensors on the CPU, in functions of torch. The search for a plan computes there.

    Raises:
        PrepareError: a declaration that is none of these; in a call, tensors or results that do not fit it.

    Example:
        >>> import torch
        >>> double = accel.parallel.local_map(lambda x: x * 2, "elements")
        >>> double(torch.ones(2))
        tensor([2., 2.])
    """
    if isinstance(over, str):
        is_known = over in _ROWS and out is None
        declared = Independence(over)
    else:
        dims = _numbers(over)
        known = [each for each in dims if each is not None]
        results = known[:1] if out is None else _numbers(out)
        is_known = bool(known and results) and all(type(each) is int for each in (*known, *results))
        declared = Independence(over if isinstance(over, int) else dims, tuple(results))
    if not is_known:
        raise PrepareError(
            "a function for split layers is declared in a way that is not known",
            expected='"elements" or "rows" without out=; or numbers of a dimension, one or one for each tensor',
            got=f"over={over!r}, out={out!r}",
            where="local_map",
            fix='Declare what the function computes independently: accel.parallel.local_map(function, "elements").',
        )
    return _LocalMap(function, declared, on_cpu)


def _numbers(given: Any) -> tuple[Any, ...]:
    return tuple(cast("Sequence[Any]", given)) if isinstance(given, tuple | list) else (given,)


def on_own_rows(function: Callable[..., Any], declared: Independence, args: Args, kwargs: Named) -> Any:
    """Call a function; of parts, with plain tensors of this rank's rows."""
    tensors = flat_tensors((args, kwargs))
    are_parts = any(getattr(type(each), "takes_collectives", False) for each in tensors)
    if are_parts and has_torch_function(tensors):
        return handle_torch_function(on_own_rows, tensors, function, declared, args, kwargs)
    return function(*args, **kwargs)


def mapped(func: Any, args: Args, kwargs: Named) -> Any:
    """on_own_rows, of parts."""
    function, declared, given, by_name = args
    leaves, tree = pytree.tree_flatten((given, by_name))
    tensors = flat_tensors(leaves)
    ranks = ranks_of(tuple(tensors))
    own, layout_for = (_over_rows if isinstance(declared.over, str) else _over_dim)(declared, tensors, ranks)
    rows = iter([plain_of(each) for each in own])
    given, by_name = pytree.tree_unflatten([next(rows) if isinstance(each, Tensor) else each for each in leaves], tree)
    # the function may have tensors of other classes, but in a trace
    with nullcontext() if is_dynamo_compiling() else with_subclasses():
        found, tree = pytree.tree_flatten(on_own_rows(function, declared, given, by_name))
    placed = [
        make(each.view_as(each), layout_for(number, each), ranks) if isinstance(each, Tensor) else each
        for number, each in enumerate(found)
    ]
    return pytree.tree_unflatten(placed, tree)


_LayoutFor = Callable[[int, Tensor], RowLayout | None]  # of a result, by its number


def _over_rows(declared: Independence, tensors: list[Tensor], ranks: Ranks) -> tuple[list[Tensor], _LayoutFor]:
    """Rows of tensors that are broadcast, and the layouts of results."""
    own, alignment = aligned(tensors, ranks)
    is_of_rows = declared.over == "rows"
    if is_of_rows and alignment.right == 1:
        raise no_rule("local_map over rows, which ranks divide")
    shapes = [each.shape[:-1] if is_of_rows else each.shape for each in map(plain_of, own)]
    places = cast(torch.Size, cast(Any, torch).broadcast_shapes(*shapes))

    def layout_for(_: int, result: Tensor) -> RowLayout | None:
        shape = result.shape
        if shape != places and not (is_of_rows and shape[:-1] == places):
            raise no_rule(f"local_map over {declared.over} of {list(places)}, with a result of {list(shape)}")
        return alignment.layout(len(places) + is_of_rows)

    return own, layout_for


def _over_dim(declared: Independence, tensors: list[Tensor], ranks: Ranks) -> tuple[list[Tensor], _LayoutFor]:
    """This rank's rows of a dimension, and the layouts of results."""
    over = cast("int | tuple[int | None, ...]", declared.over)
    listed = over if isinstance(over, tuple) else [over if each.dim() else None for each in tensors]
    if len(listed) != len(tensors):
        raise no_rule(f"local_map over a dimension of {len(listed)} tensors, with {len(tensors)} tensors")
    dims = [_counted(dim, each) for dim, each in zip(listed, tensors, strict=True)]
    cut = _cut_along(dims, tensors, ranks.size)
    if cut is None:
        return [entered(each, ranks) for each in tensors], lambda _number, _result: None
    needs: list[RowCut | None] = []
    own: list[Tensor] = []
    for dim, each in zip(dims, tensors, strict=True):
        length = 1 if dim is None else whole_shape(each)[dim]  # of one row all ranks have it
        if not isinstance(over, tuple) and layout_of(each) is None and length not in (1, cut.total):
            raise no_rule(
                f"local_map over dimension {dim}, with a full tensor of {length} rows and a part of {cut.total}"
            )
        need = share_of(cut, length, ranks) if length > 1 else None
        needs.append(need)
        own.append(entered(each, ranks) if dim is None or need is None else own_rows(each, dim, need, ranks))

    def layout_for(number: int, result: Tensor) -> RowLayout | None:
        out = declared.out
        if number >= len(out) > 1:
            raise no_rule(f"local_map with more results than the {len(out)} that out= declares")
        dim = cast(int, _counted(out[number if len(out) > 1 else 0], result))
        known = {
            need
            for at, (each, length_dim, need) in enumerate(zip(own, dims, needs, strict=True))
            if declared.like in (None, at)
            and length_dim is not None
            and plain_of(each).shape[length_dim] == result.shape[dim]
        }
        if len(known) != 1:
            several = "which a part and a full tensor have" if None in known else "which several arguments have"
            reason = several if known else "which no argument has"
            raise no_rule(f"local_map with a result of {result.shape[dim]} rows along dimension {dim}, {reason}")
        return at(dim, known.pop())

    return own, layout_for


def _cut_along(dims: Sequence[int | None], tensors: Sequence[Tensor], size: int) -> RowCut | None:
    """The cut of the dimension by which no two ranks compute the same rows, if there is one; None if no tensor is
    divided."""
    cuts: list[RowCut] = []
    for dim, each in zip(dims, tensors, strict=True):
        layout = layout_of(each)
        if layout is not None and layout.dim != dim:
            raise no_rule(f"local_map over dimension {dim} of a tensor that ranks divide along dimension {layout.dim}")
        if layout is not None:
            cuts.append(layout.cut)
    return next((each for each in cuts if not each.is_shared(size)), cuts[0] if cuts else None)


def _counted(dim: int | None, tensor: Tensor) -> int | None:
    """The number of a dimension, counted from the front."""
    if dim is not None and not -tensor.dim() <= dim < tensor.dim():
        raise no_rule(f"local_map over dimension {dim} of a tensor of {tensor.dim()}")
    return dim if dim is None else dim % tensor.dim()


def share_of(cut: RowCut, length: int, ranks: Ranks) -> RowCut | None:
    """Return the cut of so many rows next to another cut, such as of the keys of groups of queries: each rank holds the
    rows of its own groups. None if each rank needs all of them."""
    if length == cut.total:
        return cut
    ways = math.gcd(length, ranks.size)
    if not cut.is_equal or cut != even(cut.total, ranks.size) or ways not in (length, ranks.size):
        raise no_rule(f"local_map over {length} rows of a tensor next to {cut.total} of another")
    return None if ways == 1 else RowCut(1, ((length, ways),))


RULES = {"on_own_rows": mapped}
