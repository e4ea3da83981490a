# SPDX-License-Identifier: Apache-2.0
"""All positions of parts, for functions that need them: gathered, changed in place, and selected."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from accel.parallel._private import map_kind, without_subclasses
from accel.parallel.axes.context._split import sorted_positions
from accel.parallel.parts import NoRuleError, PartTensor, leave, plain_of
from accel.parallel.parts._elementwise import writes
from accel.parallel.parts._layout import balanced, no_rule
from accel.parallel.parts._part import name_of, own_rows
from accel.parallel.parts._reductions import lost_weight

_Args = Sequence[Any]
_Named = Mapping[str, Any]


def whole_of(tensor: Any) -> Any:
    """Return all positions of a part, plain, in their order; others as they are. A collective, as its backward."""
    if not isinstance(tensor, PartTensor):
        return tensor
    if tensor.ranks.nests:
        raise no_rule("all positions of a tensor that ranks along tp divide too")
    layout = tensor.division
    if layout is None:
        return tensor.current if isinstance(tensor, SelectedTensor) else plain_of(tensor)
    if layout.cut == balanced(layout.cut.total, tensor.ranks.size):
        joined = tensor.ranks.joined(plain_of(tensor), layout.dim)
        return sorted_positions(joined, layout.dim, tensor.ranks.size)
    return leave(tensor)


def all_whole(tree: Any) -> Any:
    return map_kind(PartTensor, whole_of, tree)


def changed(func: Any, args: _Args, kwargs: _Named) -> Any:
    """Change all positions of a tensor in place, and keep the own ones."""
    target = args[0]
    if not isinstance(target, PartTensor) or target.division is None:
        return func(target, *all_whole(args[1:]), **all_whole(kwargs))
    whole = whole_of(target)
    _ = func(whole, *all_whole(args[1:]), **all_whole(kwargs))
    _keep(target, whole)
    return target


def _keep(target: PartTensor, whole: Tensor) -> None:
    """Write the own ones of all positions into a part."""
    assert target.division is not None
    rows = own_rows(whole, target.division.dim, target.division.cut, target.ranks)
    with without_subclasses():
        _ = plain_of(target).copy_(rows)


class SelectedTensor(PartTensor):
    """A selection of gathered positions, equal on all ranks. It acts as a view: a write into it also changes the own
    positions, and it is gathered again after they have changed.
    """

    base: PartTensor  # the part that has the positions
    whole: Tensor  # all positions of it, plain
    value: Tensor  # the selection, a view of them
    version: float  # of `base` when it was gathered

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: _Args = (), kwargs: _Named | None = None, scope: object = None
    ) -> Any:
        name = name_of(func)
        target = args[0] if args else None
        named_ones = dict(kwargs or {})
        if isinstance(named_ones.get("out"), SelectedTensor):
            raise refused(name, "with out=")
        if lost := lost_weight(func):
            raise refused(name, lost)
        is_written = writes(name) or named_ones.get("inplace")
        if isinstance(target, SelectedTensor) and is_written:
            return target.write(func, all_whole(args[1:]), all_whole(named_ones))
        found = func(*_of_selected(tuple(args)), **_of_selected(named_ones))
        return _views(found, target.base, target.whole) if isinstance(target, SelectedTensor) else found

    @property
    def current(self) -> Tensor:
        """The selection, plain; gathered again where the positions have changed. That is a collective."""
        if _version_of(self.base) != self.version:
            _ = self.whole.copy_(whole_of(self.base))
            self.version = _version_of(self.base)
        return self.value

    def write(self, func: Any, args: _Args, kwargs: _Named) -> Any:
        """Change the selection in place, and with it the own positions. A collective if the positions have changed."""
        found = func(self.current, *args, **kwargs)
        _keep(self.base, self.whole)
        self.version = _version_of(self.base)
        return found if found is None else self


def _version_of(part: Tensor) -> float:
    with without_subclasses():  # tensors of inference mode count no changes: gathered for each use
        return math.nan if part.is_inference() else part._version


def _of_selected(tree: Any) -> Any:
    return map_kind(SelectedTensor, lambda each: each.current, tree)


def selected(func: Any, args: _Args, kwargs: _Named) -> Any:
    """Compute a function of all positions; views of them stay selections of the own ones."""
    given = all_whole(tuple(args))
    found = func(*given, **all_whole(dict(kwargs)))
    base = args[0] if args else None
    if not isinstance(base, PartTensor) or base.division is None:
        return found
    return _views(found, base, given[0])


def _views(found: Any, base: PartTensor, whole: Tensor) -> Any:
    """Return what a function gave, tensors in it that share memory with all positions of a part as selections."""
    if isinstance(found, tuple | list):
        listed = cast("Sequence[Any]", found)
        kind: Any = type(listed)
        return kind([_views(each, base, whole) for each in listed])
    if is_dynamo_compiling() and found._base is None and cast(Any, base.ranks).counts_changes:
        return found  # no view; a graph breaks at others
    if type(found) is not Tensor or found.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        return found
    with without_subclasses():
        chosen = found.as_subclass(SelectedTensor)
    chosen.division = None
    chosen.ranks = base.ranks
    chosen.base = base
    chosen.whole = whole
    chosen.value = found
    chosen.version = _version_of(base)
    return chosen


def refused(name: str, problem: str) -> NoRuleError:
    return NoRuleError(
        "a function has no rule for positions that ranks along cp share",
        expected="functions of each position alone, or attention: softmax(q @ k.transpose(-1, -2)) @ v, einsum, or "
        "torch's scaled_dot_product_attention",
        got=problem if problem == name else f"{name}, {problem}",
        where="forward of a model on a mesh with cp",
        fix="Attend by accel.parallel.context_attention, or leave cp out of the mesh.",
    )
