# SPDX-License-Identifier: Apache-2.0
"""Nested parts: tensors with one dimension that ranks along tp divide, and one that ranks along cp divide.

The rows of a nested part are a part themselves, of positions. A rule of the table computes with this rank's rows along
tp, and each function that it calls computes with parts of positions, by the same table. So no rule knows of two axes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from accel.parallel._modules import RANKS
from accel.parallel._private import without_subclasses
from accel.parallel.parts._layout import RowLayout, no_rule
from accel.parallel.parts._part import Args, Named, PartTensor, Ranks, make

# What nested parts cannot be.
AND_TOKENS = "sequence=True, where ranks along tp would divide the positions of a rank along cp again"


class NestedPart(PartTensor):
    """A rank's rows of a tensor, which may be a part of positions. A rule sees rows of all positions."""

    rows: Tensor  # this rank's: a part of positions, or a plain tensor

    @property
    def shape(self) -> torch.Size:  # pyright: ignore[reportIncompatibleVariableOverride, reportImplicitOverride]
        """The full shape; in a rule, the shape of the rows."""
        return self.size()

    def plain_rows(self) -> Tensor:
        """Return the rows as a rule sees them."""
        return _seen(followed_rows(self))

    @classmethod
    def __torch_function__(  # pyright: ignore[reportImplicitOverride]
        cls, func: Any, types: Any, args: Args = (), kwargs: Named | None = None, scope: object = None
    ) -> Any:
        ranks, *others = [each.ranks for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, NestedPart)]
        if any(each is not ranks for each in others):
            raise no_rule("parts of two models")
        if ranks.in_rule:
            return _on_rows(func, args, kwargs or {})
        given, named = pytree.tree_map_only(PartTensor, _seen, (tuple(args), dict(kwargs or {})))
        return rows_in(super().__torch_function__(func, types, given, named, partial(_rule_runs, ranks)))


@contextlib.contextmanager
def _rule_runs(ranks: Ranks) -> Generator[None]:
    ranks.in_rule = True
    try:
        yield
    finally:
        ranks.in_rule = False


def nested(rows: Tensor, layout: RowLayout | None, ranks: Ranks) -> NestedPart:
    """Return this rank's rows of a tensor, plain or a part of positions, as a part."""
    rows = followed_rows(rows) if isinstance(rows, NestedPart | RowsTensor) else rows
    with without_subclasses():
        part = rows.as_subclass(NestedPart)
    part.rows = rows
    part.division = layout
    part.ranks = ranks
    return part


def hold_plain_rows(model: nn.Module) -> None:
    """Let parts in a model's forward have plain rows, as no tensor there is a part of positions. Mutates its ranks."""
    for each in model.modules():
        ranks: Ranks | None = vars(each).get(RANKS)
        if ranks is not None and ranks.nests:
            ranks.nests = False


def entered_rows(tensor: Tensor, enter: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor that a rule takes for plain, entered by a function of the tensor itself."""
    return _seen(enter(followed_rows(tensor))) if isinstance(tensor, RowsTensor) else enter(tensor)


def rows_in(tree: Any) -> Any:
    """Return parts of positions in the place of what rules take for plain tensors."""
    return pytree.tree_map_only(RowsTensor, followed_rows, tree)


class RowsTensor(Tensor):
    """A part of positions, or of this rank's rows of a nested part, which a rule takes for a plain tensor."""

    takes_collectives = True

    rows: PartTensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Args = (), kwargs: Named | None = None) -> Any:
        return _on_rows(func, args, kwargs or {})


def followed_rows(part: NestedPart | RowsTensor) -> Tensor:
    """Return the rows of a part. An output of the user's `autograd.Function` has them in the graph of gradients only by
    itself, as torch adds the node after the function has computed."""
    rows = part.rows
    with without_subclasses():
        if rows.requires_grad or not part.requires_grad:
            return rows
        found = part.as_subclass(Tensor)
        rows = make(found, rows.division, rows.ranks) if isinstance(rows, PartTensor) else found
        cast(Any, part).rows = rows
        return rows


def _on_rows(func: Any, args: Args, kwargs: Named) -> Any:
    """Compute a function of the rows of tensors, by the rules for positions."""
    owners: dict[int, Tensor] = {}

    def rows_of(each: Any) -> Tensor:
        rows = followed_rows(each)
        owners[id(rows)] = each
        return rows

    given, named = pytree.tree_map_only((NestedPart, RowsTensor), rows_of, (tuple(args), dict(kwargs)))
    found = func(*given, **named)
    return pytree.tree_map_only(Tensor, lambda each: owners.get(id(each), _seen(each)), found)


def _seen(each: Tensor) -> Tensor:
    """Return a tensor as a rule sees it."""
    if not isinstance(each, PartTensor) or isinstance(each, NestedPart):
        return each
    with without_subclasses():
        seen = each.as_subclass(RowsTensor)
    seen.rows = each
    return seen
