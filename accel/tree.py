# SPDX-License-Identifier: Apache-2.0
"""Nested containers: take them apart into leaves with paths, and put them together again.

A container is a dict (or a subclass), list, tuple, namedtuple, dataclass or `msgspec.Struct`. Everything else is a
leaf, except a container of a kind that is not known here: that is an error with its path, because treating it as a
leaf would leave the tensors inside untouched without a word.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeGuard, TypeVar, cast

import msgspec
import torch

from accel.errors import TreeError

T = TypeVar("T")
Leaf = tuple[str, Any]

_ATOMS = (torch.Tensor, str, bytes, bytearray, memoryview, int, float, complex, type(None))


def leaves(tree: object) -> list[Leaf]:
    """List the leaves of a tree with their paths, depth first, in the containers' own order.

    Args:
        tree: any nesting of containers.

    Returns:
        Pairs of path (such as `$.inputs[0]`) and leaf.

    Raises:
        TreeError: a container of an unknown kind, named by its path.
    """
    found: list[Leaf] = []
    _collect(tree, "$", found)
    return found


def tensors(tree: object) -> list[tuple[str, torch.Tensor]]:
    """List the tensors of a tree with their paths; other leaves are left out."""
    return [(path, leaf) for path, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def map_tensors(function: Callable[[torch.Tensor], object], tree: T) -> T:
    """Return a copy of the tree in which every tensor is replaced by `function(tensor)`."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def map_leaves(function: Callable[[Any], object], tree: T, *, is_leaf: Callable[[object], bool] | None = None) -> T:
    """Return a copy of the tree in which every leaf is replaced by `function(leaf)`; containers keep type and order.

    Args:
        function: from a leaf to what replaces it.
        tree: any nesting of containers.
        is_leaf: takes what it holds for as a leaf, even if it is a container, known or not.

    Raises:
        TreeError: a container of an unknown kind, named by its path.
    """
    return cast(T, _map(function, tree, "$", is_leaf or _never))


def replace_tensors(tree: T, new: Iterable[object]) -> T:
    """Return a copy of the tree with its tensors replaced, in the order of `tensors`, by the values of `new`."""
    source = iter(new)
    return map_tensors(lambda _: next(source), tree)


def structure(tree: object) -> str:
    """Describe containers, keys and kinds of leaves as text: equal for trees that can be packed together."""
    return "".join(_describe(tree, "$"))


def _collect(node: object, path: str, found: list[Leaf]) -> None:
    children = _children(node, path)
    if children is None:
        found.append((path, node))
        return
    for step, child in children:
        _collect(child, path + step, found)


def _map(function: Callable[[Any], object], node: object, path: str, is_leaf: Callable[[object], bool]) -> object:
    children = None if is_leaf(node) else _children(node, path)
    if children is None:
        return function(node)
    return _rebuild(node, [_map(function, child, path + step, is_leaf) for step, child in children])


def _never(node: object) -> bool:
    return False


def _describe(node: object, path: str) -> Iterator[str]:
    children = _children(node, path)
    if children is None:
        yield "T" if isinstance(node, torch.Tensor) else type(node).__name__
        return
    yield f"{type(node).__name__}("
    for step, child in children:
        yield step
        yield ":"
        yield from _describe(child, path + step)
        yield ","
    yield ")"


def _children(node: object, path: str) -> list[tuple[str, Any]] | None:
    """The steps and children of a container, or None for a leaf."""
    if isinstance(node, _ATOMS):
        return None
    if isinstance(node, dict):
        items = cast(dict[Any, Any], node).items()
        return [(f".{key}" if isinstance(key, str) else f"[{key!r}]", value) for key, value in items]
    if type(node) is list or type(node) is tuple:
        return [(f"[{i}]", child) for i, child in enumerate(cast("Sequence[Any]", node))]
    if _is_namedtuple(node):
        return [(f".{name}", getattr(node, name)) for name in cast(Any, node)._fields]
    if isinstance(node, msgspec.Struct):
        return [(f".{name}", getattr(node, name)) for name in node.__struct_fields__]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(f".{field.name}", getattr(node, field.name)) for field in dataclasses.fields(node)]
    if _is_unknown_container(node):
        raise TreeError(
            "a container of a kind that cannot be taken apart",
            expected="dict, list, tuple, namedtuple, dataclass or msgspec.Struct",
            got=type(node).__name__,
            where=path,
            fix=f"Pass plain containers, for example dict(...) or list(...) of the {type(node).__name__}.",
        )
    return None


def _rebuild(node: object, children: list[object]) -> object:
    if isinstance(node, dict):
        mapping = cast(dict[Any, object], node)
        if type(mapping) is dict:
            return dict(zip(mapping, children, strict=True))
        clone = copy.copy(mapping)  # keeps a subclass's own settings, such as a default factory
        for key, child in zip(mapping, children, strict=True):
            clone[key] = child
        return clone
    if type(node) is list:
        return children
    if type(node) is tuple:
        return tuple(children)
    if _is_namedtuple(node):
        return cast(Any, type(node))._make(children)
    if isinstance(node, msgspec.Struct):
        return msgspec.structs.replace(node, **dict(zip(node.__struct_fields__, children, strict=True)))
    names = [field.name for field in dataclasses.fields(cast(Any, node))]
    clone = copy.copy(node)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(clone, name, child)  # frozen dataclasses too, and no second run of __post_init__
    return clone


def _is_namedtuple(node: object) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(node, tuple) and hasattr(cast(object, node), "_fields")


def _is_unknown_container(node: object) -> bool:
    if isinstance(node, Mapping | Set):
        return True
    return isinstance(node, tuple | list) or (isinstance(node, Sequence) and not isinstance(node, range))
