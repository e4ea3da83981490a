# SPDX-License-Identifier: Apache-2.0
"""Nested parts: tensors with one dimension that ranks along tp divide, and one that ranks along cp divide.

The rows of a nested part are a part themselves, of positions. A rule of the table computes with this rank's rows along
tp, and each function that it calls computes with parts of positions, by the same table. So no rule knows of two axes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accel.parallel._private import map_kind, tensors_of, without_subclasses
from accel.parallel.parts._elementwise import FACTS
from accel.parallel.parts._layout import RowLayout, balanced, no_rule
from accel.parallel.parts._part import Args, Named, PartTensor, Ranks, make, name_of
from accel.tensors import same_memory


class NestedPart(PartTensor):
    """A rank's rows of a tensor, which may be a part of positions. A rule sees rows of all positions."""

    made_of: PartTensor | None  # this rank's rows, if they were a part of positions when this one was made

    @property
    def rows(self) -> Tensor:
        """This rank's rows: a part of positions, or a plain tensor. Of the tensor itself, which has the history of
        gradients, as functions with a backward of their own may have given it another one."""
        if self.made_of is not None and self.made_of.division is None:
            return self.made_of  # a selection, which knows the positions that it is of
        with without_subclasses():
            rows = self.as_subclass(Tensor)
            return rows if self.made_of is None else make(rows, self.made_of.division, self.made_of.ranks)

    @property
    def shape(self) -> torch.Size:  # pyright: ignore[reportIncompatibleVariableOverride, reportImplicitOverride]
        """The full shape; in a rule, the shape of the rows."""
        return self.size()

    def plain_rows(self) -> Tensor:
        """Return the rows as a rule sees them."""
        return seen(self.rows)

    def remake(self) -> Callable[[Tensor], Tensor]:
        """Return a function that makes such a part of rows; it holds no tensor."""
        remake = None if self.made_of is None else self.made_of.remake()
        return partial(_nested_again, remake, layout=self.division, ranks=self.ranks)

    @classmethod
    def __torch_function__(  # pyright: ignore[reportImplicitOverride]
        cls, func: Any, types: Any, args: Args = (), kwargs: Named | None = None, scope: object = None
    ) -> Any:
        if name_of(func) in FACTS:  # of the tensor itself, such as a hook of its gradient
            with without_subclasses():
                return func(*args, **(kwargs or {}))
        parts = [each for each in tensors_of((*args, *(kwargs or {}).values())) if isinstance(each, NestedPart)]
        ranks, *others = [each.ranks.of_region for each in parts]
        if any(each is not ranks for each in others):
            raise no_rule("parts of two models")
        if ranks.in_rule:
            return _on_rows(func, args, kwargs or {})
        given, named = map_kind(PartTensor, seen, (tuple(args), dict(kwargs or {})))
        return rows_in(super().__torch_function__(func, types, given, named, partial(rule_runs, ranks)))


@contextlib.contextmanager
def rule_runs(ranks: Ranks) -> Generator[None]:
    """Let functions of nested parts compute with their rows, in a block."""
    before, ranks.in_rule = ranks.in_rule, True
    try:
        yield
    finally:
        ranks.in_rule = before


def nested(rows: Tensor, layout: RowLayout | None, ranks: Ranks) -> NestedPart:
    """Return this rank's rows of a tensor, plain or a part of positions, as a part."""
    rows = rows.rows if isinstance(rows, NestedPart | RowsTensor) else rows
    with without_subclasses():
        part = rows.as_subclass(NestedPart)
    part.made_of = rows if isinstance(rows, PartTensor) else None
    part.division = layout
    part.ranks = ranks
    return part


def _nested_again(
    remake: Callable[[Tensor], Tensor] | None, rows: Tensor, layout: RowLayout | None, ranks: Ranks
) -> NestedPart:
    return nested(rows if remake is None else remake(rows), layout, ranks)


def no_views(output: Any) -> Any:
    """Return the output of a module, nested parts in it as tensors that are no views: a change of a view in place would
    drop the hooks that `fully_shard` has on it."""

    def own(part: NestedPart) -> NestedPart:
        with without_subclasses():
            found: Any = same_memory(part.as_subclass(Tensor))
        found.__class__ = type(part)
        found.made_of, found.division, found.ranks = part.made_of, part.division, part.ranks
        return found

    return map_kind(NestedPart, own, output)


def position_pieces(tensor: Tensor) -> int:
    """Return the number of pieces of the second dimension of a tensor in a rule, if ranks along cp divide it: 1 for
    none, 0 for pieces of several lengths."""
    rows = tensor.rows if isinstance(tensor, RowsTensor) else None
    layout = None if rows is None else rows.division
    if rows is None or layout is None or layout.dim != 1:
        return 1
    size = rows.ranks.size
    return 2 * size if layout.cut == balanced(layout.cut.total, size) else 0


def entered_rows(tensor: Tensor, enter: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor that a rule takes for plain, entered by a function of the tensor itself."""
    return seen(enter(tensor.rows)) if isinstance(tensor, RowsTensor) else enter(tensor)


def rows_in(tree: Any) -> Any:
    """Return parts of positions in the place of what rules take for plain tensors."""
    return map_kind(RowsTensor, lambda each: each.rows, tree)


class RowsTensor(Tensor):
    """A part of positions, or of this rank's rows of a nested part, which a rule takes for a plain tensor."""

    takes_collectives = True

    rows: PartTensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Args = (), kwargs: Named | None = None) -> Any:
        parts = [each for each in tensors_of((*args, *(kwargs or {}).values())) if isinstance(each, NestedPart)]
        if parts and not parts[0].ranks.of_region.in_rule:  # torch asks the class of the first argument
            return NestedPart.__torch_function__(func, types, args, kwargs)
        return _on_rows(func, args, kwargs or {})


def _on_rows(func: Any, args: Args, kwargs: Named) -> Any:
    """Compute a function of the rows of tensors, by the rules for positions."""
    owners: dict[int, Tensor] = {}

    def rows_of(each: Any) -> Tensor:
        rows = each.rows
        owners[id(rows)] = each
        return rows

    given, named = map_kind((NestedPart, RowsTensor), rows_of, (tuple(args), dict(kwargs)))
    found = func(*given, **named)
    return map_kind(Tensor, lambda each: owners.get(id(each), seen(each)), found)


def seen(each: Tensor) -> Tensor:
    """Return a tensor as a rule sees it."""
    if not isinstance(each, PartTensor) or isinstance(each, NestedPart):
        return each
    with without_subclasses():
        found = each.as_subclass(RowsTensor)
    found.rows = each
    return found
