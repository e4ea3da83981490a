# SPDX-License-Identifier: Apache-2.0
"""Mappings that are no dict, such as UserDict and what tokenizers return: rebuilt with other values where possible."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Mapping
from typing import Any, cast

_COMPARED = (str, int, float, bool, tuple)


def with_values(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any] | None:
    """Return a mapping of the same class and attributes with other values; None if the class cannot be rebuilt.

    A UserDict is copied, so that a subclass keeps its attributes. Another class must give the same mapping back when it
    is called with a dict of it.

    Args:
        mapping: not a dict. Unchanged.
        values: new values, by the keys of the mapping in their order.
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
    """Return whether two objects have equal attributes, beside those that store a mapping's values."""
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
