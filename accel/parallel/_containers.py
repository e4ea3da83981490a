# SPDX-License-Identifier: Apache-2.0
"""Containers that modules change: a list to which a block appends a loss is the caller's, though hooks copy inputs.

FSDP gives a unit a copy of each list, dict or dataclass in which a tensor requires a gradient, and a model on several
devices one of each in which a tensor goes to another device. A stage of a pipeline repeats the changes of other stages.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from accel.mixins import Mixin, add_mixin, remove_mixin

_PLAIN = frozenset({torch.Tensor, nn.Parameter, type(None), bool, int, float, str})  # of inputs, as most are
_DEEPEST = 16
_VALUES = (type(None), bool, int, float, complex, str, bytes)  # Python has one object for several equal ones


class _CallersInputs:
    """Arguments of a module as its caller gave them. Hooks look for tensors in no such object."""

    __slots__ = ("inputs",)

    def __init__(self, inputs: tuple[object, ...]) -> None:
        self.inputs = inputs


class _CopiedContainer(NamedTuple):
    """A container of the caller's, the copy that a module gets, and what both hold before it runs."""

    own: Any
    copy: Any
    own_contents: list[Any]
    copy_contents: list[Any]


class FillsContainers(Mixin, nn.Module):
    """Mixin that copies a module's changes of copied containers to the caller's containers."""

    def forward(self, *args: Any, accel_given: _CallersInputs | None = None, **kwargs: Any) -> Any:
        """Run the module's own forward, and change the caller's containers as it has changed the copies."""
        if accel_given is None:
            return super().forward(*args, **kwargs)
        copied = list(_copied(accel_given.inputs, (*args, *kwargs.values())))
        try:
            return super().forward(*args, **kwargs)
        finally:
            _fill(copied)


def fill_containers(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Let modules change the containers that they are given; return what ends it. Mutates the modules.

    Call it after other hooks that copy inputs were registered: it looks at the inputs before them.
    """
    modules = list(modules)
    give = cast(Any, torch.compiler).disable(_give)
    hooks = [each.register_forward_pre_hook(give, prepend=True, with_kwargs=True) for each in modules]
    add_mixin(modules, FillsContainers)

    def end() -> None:
        for hook in hooks:
            hook.remove()
        remove_mixin(modules, FillsContainers)

    return end


def known_parts(value: object) -> Iterable[object] | None:
    """Return what torch looks for tensors in: fields of a dataclass, values of a dict, elements; None of others."""
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, each.name) for each in fields(value)]
    if isinstance(value, dict):
        return cast("dict[object, object]", value).values()
    return cast("Sequence[object]", value) if isinstance(value, list | tuple) else None


def _give(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inputs = (*args, *kwargs.values())
    if all(type(each) in _PLAIN for each in inputs) or not any(map(_has_changeable, inputs)):
        return None
    return args, {**kwargs, "accel_given": _CallersInputs(inputs)}


def _can_change(value: Any) -> bool:
    return isinstance(value, list | dict) or (is_dataclass(value) and not cast(Any, value).__dataclass_params__.frozen)


def _has_changeable(value: object, depth: int = 0) -> bool:
    parts = known_parts(value) if depth < _DEEPEST else None
    return parts is not None and (_can_change(value) or any(_has_changeable(each, depth + 1) for each in parts))


def _copied(own: object, copy: object) -> Iterator[_CopiedContainer]:
    """Yield the containers that can change and were copied, inner ones first."""
    if own is copy or (parts := known_parts(own)) is None:
        return
    for each, other in zip(parts, known_parts(copy) or (), strict=True):
        yield from _copied(each, other)
    if _can_change(own):
        yield _CopiedContainer(own, copy, _contents(own), _contents(copy))


def _contents(value: Any) -> list[Any]:
    """Return what a container holds now, the keys of a dict before its values."""
    return [*value, *value.values()] if isinstance(value, dict) else list(known_parts(value) or ())


def _fill(copied: Sequence[_CopiedContainer]) -> None:
    """Give each container what a module has put into its copy; what hooks replaced in the copy stays as it was."""
    kept = {
        id(other): each for pair in copied for each, other in zip(pair.own_contents, pair.copy_contents, strict=True)
    }
    kept |= {id(pair.copy): pair.own for pair in copied}
    for pair in copied:
        now = _contents(pair.copy)
        if len(now) == len(pair.copy_contents) and all(map(operator.is_, now, pair.copy_contents)):
            continue
        _set(pair.own, pair.copy, kept)


def _set(own: Any, copy: Any, kept: Mapping[int, Any]) -> None:
    if isinstance(own, list):
        own[:] = [kept.get(id(each), each) for each in copy]
    elif isinstance(own, dict):
        now = {key: kept.get(id(each), each) for key, each in copy.items()}
        cast("dict[Any, Any]", own).clear()
        cast("dict[Any, Any]", own).update(now)
    else:
        for field in fields(own):
            each = getattr(copy, field.name)
            setattr(own, field.name, kept.get(id(each), each))


# --- changes that a call makes, to be repeated ------------------------------------------------------------------------


class HeldItem(NamedTuple):
    """An item of a container after a call."""

    key: Any  # its place in a list, its key in a dictionary, or the name of a field
    before: Any  # where it was before the call
    is_new: bool = False  # whether it was not there


def changeable_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the lists, dictionaries and dataclasses among a call's arguments, outermost first: a call may change their
    items."""
    found: list[Any] = []
    todo: list[Any] = [*args, *kwargs.values()]
    while todo:
        each = todo.pop(0)
        parts = known_parts(each)
        if parts is not None and _can_change(each):
            found.append(each)
        todo += parts or ()
    return found


def items_of(held: Any) -> dict[Any, Any]:
    """Return the items of a container, by place, key or name of a field."""
    if is_dataclass(held):
        return {each.name: getattr(held, each.name) for each in fields(held)}
    return dict(enumerate(cast("list[Any]", held)) if isinstance(held, list) else held)


def changed_items(before: Mapping[Any, Any], held: Any) -> tuple[HeldItem, ...] | None:
    """Return all items of a container that held other items, or in another order, `before`; None if it did not."""
    now = items_of(held)
    if [*now] == [*before] and all(value is before[key] for key, value in now.items()):
        return None
    places = {id(value): key for key, value in before.items() if not isinstance(value, _VALUES)}
    found: list[HeldItem] = []
    for key, value in now.items():
        if key in before and before[key] is value:
            found.append(HeldItem(key, key))
        else:
            found.append(HeldItem(key, places.get(id(value)), is_new=id(value) not in places))
    return tuple(found)


def new_items(held: Any, items: Sequence[HeldItem]) -> list[Any]:
    """Return the new items, in order."""
    now = items_of(held)
    return [now[each.key] for each in items if each.is_new]


def change_items(held: Any, before: Mapping[Any, Any], items: Sequence[HeldItem], new: Sequence[Any]) -> None:
    """Give a container that held some items `before` the items of after a call. Mutates it."""
    made = iter(new)
    set_items(held, {each.key: next(made) if each.is_new else before[each.before] for each in items})


def set_items(held: Any, items: Mapping[Any, Any]) -> None:
    """Replace the items of a container. Mutates it."""
    if is_dataclass(held):
        for name, value in items.items():
            setattr(held, name, value)
    elif isinstance(held, list):
        held[:] = items.values()
    else:
        held.clear()
        held.update(items)
