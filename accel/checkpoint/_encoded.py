# SPDX-License-Identifier: Apache-2.0
"""Encoded values, as a manifest has them: their types in JSON, their fields, and the tensors and classes named."""

from __future__ import annotations

from typing import Any

from typing_extensions import TypeIs


def is_list(value: object) -> TypeIs[list[Any]]:
    """Return whether a value is a list of JSON."""
    return isinstance(value, list)


def is_object(value: object) -> TypeIs[dict[str, Any]]:
    """Return whether a value is an object of JSON."""
    return isinstance(value, dict)


def stored_field(record: object, name: str) -> object:
    """Return a field of an encoded record; None if there is none.

    Args:
        record: decoded JSON, from anywhere: a record that is an item, or one inside another value.
        name: the field's.
    """
    if not is_object(record):
        return None
    nested = record.get("$record")
    return stored_field(nested[-1], name) if is_list(nested) else record.get(name)


def tensors_in(value: object) -> set[str]:
    """Return the names of the tensors that an encoded value refers to.

    Args:
        value: decoded JSON, from anywhere.
    """
    if is_list(value):
        return set[str]().union(*map(tensors_in, value))
    if not is_object(value):
        return set()
    name = value.get("$tensor")
    return {name} if isinstance(name, str) and len(value) == 1 else tensors_in(list(value.values()))


def has_records(value: object) -> bool:
    """Return whether an encoded value names classes, of records or enums."""
    return bool(record_names(value))


def record_names(value: object) -> set[str]:
    """Return the names of the classes, of records and enums, in an encoded value.

    Args:
        value: decoded JSON, from anywhere.
    """
    if is_list(value):
        return set[str]().union(*map(record_names, value))
    if not is_object(value):
        return set()
    found = record_names(list(value.values()))
    for tag in ("$record", "$enum"):
        named = value.get(tag)
        if len(value) == 1 and is_list(named) and named:
            found.add(str(named[0]))
    return found
