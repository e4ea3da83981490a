# SPDX-License-Identifier: Apache-2.0
"""Copies of modules: shallow ones, and deep ones with functions and hooks that hold what the copy has."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from types import CellType, FunctionType
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from accel.parallel._modules import wrapped_name


def shallow_copy(module: nn.Module) -> nn.Module:
    """Copy a module, whose attributes are shared; a parametrized one as well, which `copy.copy` refuses, and a compiled
    one, whose forward it makes anew."""
    if not is_parametrized(module) and wrapped_name(module) is None:
        return copy.copy(module)
    found = type(module).__new__(type(module))
    vars(found).update(vars(module))
    return found


def copied_model(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy of a model, with a `memo` of `copy.deepcopy`. Functions among its attributes that hold
    modules or lists of the model, as `self.mlp = lambda x: self.down(self.up(x))` and hooks do, hold those of the
    copy. A tensor that a forward left among the attributes or in containers of them, as a loss of its own, has no graph
    of gradients there."""
    for each in _tensors_kept(model):
        if not each.is_leaf:
            _ = memo.setdefault(id(each), each.detach().clone())
    found = copy.deepcopy(model, memo)
    for module in found.modules():
        vars(module).update({name: _rebound(value, memo) for name, value in vars(module).items()})
    return found


def _rebound(value: Any, memo: dict[int, Any]) -> Any:
    """An attribute of a copied module, where functions hold what the copy has in the place of what they held."""
    if type(value) in (list, tuple) and any(isinstance(each, FunctionType) for each in value):
        return type(value)(_rebound(each, memo) for each in value)
    if isinstance(value, dict):  # as of hooks
        held_by_name = cast("dict[Any, Any]", value)
        for key, each in held_by_name.items():
            if isinstance(each, FunctionType):
                held_by_name[key] = _rebound(each, memo)
        return held_by_name
    if not isinstance(value, FunctionType) or not (value.__closure__ or value.__defaults__):
        return value

    def of_copy(each: Any) -> Any:
        return copy.deepcopy(each, memo) if id(each) in memo or _holds_modules(each) else each

    cells = tuple(CellType(of_copy(cell.cell_contents)) for cell in value.__closure__ or ())
    defaults = tuple(map(of_copy, value.__defaults__ or ()))
    made = FunctionType(value.__code__, value.__globals__, value.__name__, defaults or None, cells or None)
    made.__dict__.update(vars(value))
    made.__kwdefaults__ = value.__kwdefaults__
    return made


def _holds_modules(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = [*cast("Mapping[Any, Any]", value).values()]
    return isinstance(value, nn.Module) or (
        isinstance(value, list | tuple) and any(isinstance(each, nn.Module) for each in cast("list[Any]", value))
    )


def _tensors_kept(model: nn.Module) -> Iterator[Tensor]:
    """The tensors among the attributes of modules and in containers there, which may hold themselves."""
    todo: list[Any] = [vars(module) for module in model.modules()]
    seen = set[int]()
    while todo:
        value = todo.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict | list | tuple) and id(cast(object, value)) not in seen:
            seen.add(id(cast(object, value)))
            todo += cast("dict[Any, Any]", value).values() if isinstance(value, dict) else cast("list[Any]", value)
