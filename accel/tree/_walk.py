# SPDX-License-Identifier: Apache-2.0
"""Nested containers: flattened to leaves with paths, and rebuilt."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeGuard, TypeVar, cast

import msgspec
import torch

from accel.errors import TreeError

_COMPARED = (str, int, float, bool, tuple)


def with_values(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any] | None:
    """Return a mapping of the same class and attributes with other values, in its order; None if it cannot be rebuilt.

    A UserDict is copied, so that a subclass keeps its attributes. Other classes must rebuild the mapping from its dict.
    """
    if isinstance(mapping, UserDict):
        clone = copy.copy(mapping)
        clone.data = values
        return clone
    if not is_its_values(mapping):
        return None
    return cast(Any, type(mapping))(values)


def can_be_rebuilt(mapping: Mapping[Any, Any]) -> bool:
    """Return whether `with_values` rebuilds a mapping."""
    return isinstance(mapping, UserDict) or is_its_values(mapping)


def is_its_values(mapping: Mapping[Any, Any]) -> bool:
    """Return whether a class called with the keys and values of a mapping gives all that the mapping is."""
    values = dict(mapping)
    try:
        again = cast(Any, type(mapping))(dict(values))
        same = type(again) is type(mapping) and list(again) == list(values)
        return same and all(again[key] is values[key] for key in values) and _same_attributes(mapping, again)
    except Exception:  # a class takes what it likes, and raises what it likes
        return False


def _same_attributes(old: object, new: object) -> bool:
    """Return whether two objects have equal attributes, except for attributes that store a mapping's values."""
    before, after = (cast(dict[str, Any], getattr(each, "__dict__", {})) for each in (old, new))
    return before.keys() == after.keys() and all(_same(before[name], after[name]) for name in before)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    return _stored(one) == _stored(other) if isinstance(one, dict) else type(one) in _COMPARED and bool(one == other)


def _stored(values: Any) -> dict[Any, int]:
    return {key: id(value) for key, value in values.items()}


class Container(msgspec.Struct, frozen=True):
    """Describes one more kind of container, subclasses included.

    Attributes:
        kind: the class.
        take_apart: maps a value to its children by name; equal structures give equal names in equal order.
        put_together: maps a value and its new children by name to the new value, of the same class.

    >>> from collections import deque
    >>> Container(deque, lambda old: dict(enumerate(old)), lambda old, new: deque(new.values(), old.maxlen)).kind
    <class 'collections.deque'>
    """

    kind: type[Any]
    take_apart: Callable[[Any], Mapping[Any, object]]
    put_together: Callable[[Any, dict[Any, Any]], object]


Containers = Sequence[Container]


T = TypeVar("T")
Leaf = tuple[str, Any]
_Trail = tuple[Any, object] | None  # trail of the parent and the key in it; None at the root

_ATOMS = (torch.Tensor, str, bytes, bytearray, memoryview, int, float, complex, type(None))


def leaves(tree: object, containers: Containers = (), *, is_leaf: Callable[[object], bool] | None = None) -> list[Leaf]:
    """List the leaves of a tree with their paths, such as `$.inputs[0]`, depth first, in the containers' own order.

    `is_leaf` comes before containers. One of an unknown kind, or that contains itself, is a `TreeError` with the path.
    """
    try:
        return [(path, node) for path, node, ends in _nodes(tree, None, containers, is_leaf) if ends]
    except RecursionError as error:
        raise _endless() from error


def nodes(tree: object, containers: Containers = ()) -> list[tuple[str, Any, bool]]:
    """List the nodes of a tree, parents first: path, node, and whether it is a leaf."""
    try:
        return list(_nodes(tree, None, containers, None))
    except RecursionError as error:
        raise _endless() from error


def tensors(tree: object, containers: Containers = ()) -> list[tuple[str, torch.Tensor]]:
    """List the tensors of a tree with their paths."""
    return [(path, leaf) for path, leaf in leaves(tree, containers) if isinstance(leaf, torch.Tensor)]


def flatten(tree: object, containers: Containers = ()) -> tuple[list[Any], str]:
    """Return the leaves of a tree and its `structure`, in one pass."""
    found: list[Any] = []
    tokens: list[str] = []
    try:
        _flatten(tree, None, containers, found, tokens)
    except RecursionError as error:
        raise _endless() from error
    return found, "".join(tokens)


def structure(tree: object, containers: Containers = ()) -> str:
    """Return containers, keys and types of leaves as text, equal for trees that can be packed together."""
    return flatten(tree, containers)[1]


def map_tensors(function: Callable[[torch.Tensor], object], tree: T, containers: Containers = ()) -> T:
    """Return a copy of the tree in which every tensor is replaced by `function(tensor)`."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree, containers)


def map_leaves(
    function: Callable[[Any], object],
    tree: T,
    containers: Containers = (),
    *,
    is_leaf: Callable[[object], bool] | None = None,
    skip_keys: Sequence[str] = (),
) -> T:
    """Return a copy of the tree in which every leaf is replaced by `function(leaf)`; containers keep type and order.

    Values of `skip_keys`, keys of mappings and names of fields, are kept as they are. Errors as in `leaves`.
    """
    try:
        return cast(T, _map(function, tree, None, containers, is_leaf, skip_keys))
    except RecursionError as error:
        raise _endless() from error


def map_movable(
    move: Callable[[Any], object], tree: T, containers: Containers = (), *, skip_keys: Sequence[str] = ()
) -> T:
    """Return a copy of the tree in which every tensor, and object with `.to`, is replaced by `move(leaf)`."""
    return map_leaves(
        lambda leaf: move(leaf) if has_method(leaf, "to") else leaf,
        tree,
        containers,
        is_leaf=lambda node: has_method(node, "to"),
        skip_keys=skip_keys,
    )


def has_method(node: object, name: str) -> bool:
    """Return whether a node has a method, whatever a `__getattr__` of the user's raises."""
    try:
        return callable(getattr(node, name, None))
    except Exception:
        return False


def replace_tensors(tree: T, new: Iterable[object], containers: Containers = ()) -> T:
    """Return a copy of the tree with its tensors replaced by values, in the order of `tensors`."""
    source = iter(new)
    if type(tree) is torch.Tensor:
        return cast(T, next(source))
    return map_leaves(lambda leaf: next(source) if isinstance(leaf, torch.Tensor) else leaf, tree, containers)


def _endless() -> TreeError:
    return TreeError(
        "containers nested without end",
        expected="a tree",
        got="a container that contains itself, or more levels than python can follow",
        fix="Pass the part that holds the tensors.",
    )


def _nodes(
    node: object, trail: _Trail, containers: Containers, is_leaf: Callable[[object], bool] | None
) -> Iterator[tuple[str, Any, bool]]:
    parts = None if is_leaf is not None and is_leaf(node) else _parts(node, trail, containers)
    yield _path(trail), node, parts is None
    if parts is not None:
        for key, child in zip(*parts, strict=True):
            yield from _nodes(child, (trail, key), containers, is_leaf)


def _flatten(node: object, trail: _Trail, containers: Containers, found: list[Any], tokens: list[str]) -> None:
    parts = _parts(node, trail, containers)
    if parts is None:
        found.append(node)
        tokens.append("T" if isinstance(node, torch.Tensor) else type(node).__name__)
        return
    keys, children = parts
    tokens.append(f"{type(node).__name__}({keys!r}:")
    for key, child in zip(keys, children, strict=True):
        if type(child) is torch.Tensor:
            found.append(child)
            tokens.append("T,")
        else:
            _flatten(child, (trail, key), containers, found, tokens)
            tokens.append(",")
    tokens.append(")")


def _map(
    function: Callable[[Any], object],
    node: object,
    trail: _Trail,
    containers: Containers,
    is_leaf: Callable[[object], bool] | None,
    skip_keys: Sequence[str],
) -> object:
    parts = None if is_leaf is not None and is_leaf(node) else _parts(node, trail, containers)
    if parts is None:
        return function(node)
    keys, children = parts
    new = [
        child
        if key in skip_keys
        else function(child)
        if type(child) is torch.Tensor
        else _map(function, child, (trail, key), containers, is_leaf, skip_keys)
        for key, child in zip(keys, children, strict=True)
    ]
    return _put_together(node, keys, new, trail, containers)


def _parts(node: object, trail: _Trail, containers: Containers) -> tuple[Sequence[Any], Iterable[Any]] | None:
    """Return the keys and children of a container; None for a leaf."""
    if isinstance(node, _ATOMS):
        return None
    if containers and (container := _container_of(node, containers)) is not None:
        named = container.take_apart(node)
        return list(named), list(named.values())
    if isinstance(node, dict):
        mapping = cast(dict[Any, Any], node)
        return list(mapping), mapping.values()
    if type(node) is list or type(node) is tuple:
        children = cast("Sequence[Any]", node)
        return range(len(children)), children
    if (names := _field_names(node)) is not None:
        return names, [getattr(node, name) for name in names]
    if isinstance(node, Mapping) and can_be_rebuilt(cast("Mapping[Any, Any]", node)):
        found = cast("Mapping[Any, Any]", node)
        return list(found), list(found.values())
    if isinstance(node, Mapping | Set | tuple | list) or (isinstance(node, Sequence) and not isinstance(node, range)):
        raise TreeError(
            "a container of a type that cannot be flattened",
            expected="dict or a mapping made from one, list, tuple, namedtuple, dataclass, msgspec.Struct, or a kind of"
            " ctx.containers",
            got=type(cast(object, node)).__name__,
            where=_path(trail),
            fix=f"Pass {_plain_form(cast(object, node))}, or describe the class: accel.replace(ctx, containers="
            f"[accel.tree.Container({type(cast(object, node)).__name__}, take_apart, put_together)]).",
        )
    return None


def _plain_form(node: object) -> str:
    return "dict(...) of it" if isinstance(node, Mapping) else "list(...) of it"


def _put_together(
    node: object, keys: Sequence[Any], children: list[object], trail: _Trail, containers: Containers
) -> object:
    if containers and (container := _container_of(node, containers)) is not None:
        new = container.put_together(node, dict(zip(keys, children, strict=True)))
        if type(new) is not type(node):
            raise TreeError(
                "a container came back as another kind",
                expected=type(node).__name__,
                got=type(new).__name__,
                where=_path(trail),
                fix=f"Let the put_together for {container.kind.__name__} keep the class of what it is given.",
            )
        return new
    if isinstance(node, dict):
        mapping = cast(dict[Any, object], node)
        if type(mapping) is dict:
            return dict(zip(keys, children, strict=True))
        clone = copy.copy(mapping)  # keeps the attributes of a subclass, such as a default factory
        for key, child in zip(keys, children, strict=True):
            clone[key] = child
        return clone
    if type(node) is list:
        return children
    if type(node) is tuple:
        return tuple(children)
    if _is_namedtuple(node):
        return cast(Any, type(node))._make(children)
    if _field_names(node) is None:
        return with_values(cast("Mapping[Any, Any]", node), dict(zip(keys, children, strict=True)))
    clone = copy.copy(node)  # does not run __post_init__ again
    change: Any = msgspec.structs.force_setattr if isinstance(node, msgspec.Struct) else object.__setattr__
    for name, child in zip(keys, children, strict=True):
        change(clone, name, child)  # of frozen classes, too
    return clone


def _container_of(node: object, containers: Containers) -> Container | None:
    return next((container for container in containers if isinstance(node, container.kind)), None)


def _field_names(node: object) -> Sequence[str] | None:
    if _is_namedtuple(node):
        return cast(Any, node)._fields
    if isinstance(node, msgspec.Struct):
        return node.__struct_fields__
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [field.name for field in dataclasses.fields(node)]
    return None


def _is_namedtuple(node: object) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(node, tuple) and hasattr(cast(object, node), "_fields")


def _path(trail: _Trail) -> str:
    steps: list[str] = []
    while trail is not None:
        trail, key = trail
        steps.append(f".{key}" if isinstance(key, str) else f"[{key!r}]")
    return "$" + "".join(reversed(steps))
