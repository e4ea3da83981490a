# SPDX-License-Identifier: Apache-2.0
"""Nested values from JSON, the way back from `_encode`: tensors by name, records in classes of live ones."""

from __future__ import annotations

import base64
import binascii
import enum
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from accel.checkpoint._encode import key_step
from accel.checkpoint._encoded import is_list, is_object
from accel.checkpoint._records import Classes, MisfitError, class_name, is_record, make_record, record_tag
from accel.checkpoint._values import make_array, make_path, make_scalar
from accel.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class Making:
    """Makes records of stored fields.

    Attributes:
        kept: live records by path: a record at the same path has the class of that one.
        classes: else its class by name.
        own: maps path and record to the final record.
        exact: whether records inside values have the names of their classes, as since format 4; else a dict in the
            place of a live record is one.
    """

    kept: Mapping[str, object]
    classes: Classes
    own: Callable[[str, object], object]
    exact: bool

    def record(self, name: str, fields: dict[str, Any], path: str) -> object:
        """Make a record.

        Raises:
            MisfitError: there is no class of that name, or it takes no such fields.
        """
        return self.own(path, make_record(self._class(name, path), fields, path))

    def member(self, name: str, member: str | None, value: Any, path: str) -> object:
        """Return a member of an enum, by its name or, of a combination of flags, its value.

        Raises:
            MisfitError: there is no class of that name, or it has no such member.
        """
        kind = cast("type[enum.Enum]", self._class(name, path))
        try:
            return kind(value) if member is None else kind[member]
        except (KeyError, ValueError, TypeError) as error:
            expected = f"a member of {kind.__qualname__}"
            raise MisfitError(path, expected=expected, got=str(value if member is None else member)) from error

    def _class(self, name: str, path: str) -> type:
        live = self.kept.get(path)
        found = (type(live),) if live is not None and class_name(type(live)) == name else self.classes.get(name, ())
        if len(found) != 1:
            shown = name.removeprefix("accel.")
            if not found:
                expected = f"a live {shown} in its place or as an item, which gives the class"
                raise MisfitError(path, expected=expected, got=f"a {shown} in the file, and no such value passed")
            expected = f"one class {shown} among the values that are passed"
            raise MisfitError(path, expected=expected, got=f"{len(found)} such classes")
        return found[0]


def decode(
    value: Any, where: str, tensors: Mapping[str, torch.Tensor], path: str = "", making: Making | None = None
) -> Any:
    """Decode a value of `encode`.

    Args:
        value: decoded JSON, from anywhere.
        where: for errors.
        tensors: tensors by name.
        path: path as in `encode`.
        making: makes records; without it they come back as dicts of their fields.

    Raises:
        CheckpointError: not an encoded value; a `MisfitError` if a class does not fit.
    """
    if is_list(value):
        return [decode(child, where, tensors, f"{path}[{i}]", making) for i, child in enumerate(value)]
    if not is_object(value):
        return value
    tag = next(iter(value), "")
    if len(value) != 1 or not tag.startswith("$"):
        made = {key: decode(child, where, tensors, path + key_step(key), making) for key, child in value.items()}
        if making is None or making.exact or not is_record(live := making.kept.get(path)):
            return made
        made = {key: child for key, child in made.items() if key not in record_tag(live)}
        return make_record(type(live), made, path, exact=False)
    try:
        return _decode_tagged(tag, value[tag], where, tensors, path, making)
    except (TypeError, ValueError, LookupError, AttributeError, binascii.Error, struct.error) as error:
        raise CheckpointError(f"not a stored value: {tag}", where=where) from error


def _decode_tagged(
    tag: str, inner: Any, where: str, tensors: Mapping[str, torch.Tensor], path: str, making: Making | None
) -> Any:
    def child(value: Any, step: str = "") -> Any:
        return decode(value, where, tensors, path + step, making)

    def pairs(value: list[Any]) -> list[tuple[Any, Any]]:
        found: list[tuple[Any, Any]] = []
        for stored, held in value:
            key = decode(stored, where, tensors, f"a key of {path}", making)
            found.append((key, child(held, key_step(key))))
        return found

    def record(value: Any) -> object:
        name, stored = value
        fields = {str(key): child(held, f".{key}") for key, held in stored.items()}
        return fields if making is None else making.record(str(name), fields, path)

    def real(value: Any) -> float:
        number = child(value)
        if type(number) is not float:
            raise TypeError
        return number

    def member(value: Any) -> object:
        name, chosen = str(value[0]), value[1]
        stored = child(value[2])
        if making is None:
            return stored if chosen is None else chosen
        return making.member(name, chosen, stored, path)

    makers: dict[str, Callable[[Any], Any]] = {
        "$tuple": lambda value: tuple(child(part, f"[{i}]") for i, part in enumerate(value)),
        "$record": record,
        "$enum": member,
        "$path": lambda value: make_path(value[0], child(value[1])),
        "$scalar": lambda value: make_scalar(*map(str, value)),
        "$array": lambda value: make_array(str(value[0]), child(value[1])),
        "$dict": lambda value: dict(pairs(value)),
        "$ordered": lambda value: OrderedDict(pairs(value)),
        "$counter": lambda value: Counter(dict(pairs(value))),
        "$int": lambda value: int(value, 16),
        "$float": lambda value: struct.unpack(">d", bytes.fromhex(value))[0],
        "$text": lambda value: base64.b64decode(value, validate=True).decode("utf-8", "surrogatepass"),
        "$bytes": lambda value: base64.b64decode(value, validate=True),
        "$complex": lambda value: complex(real(value[0]), real(value[1])),
        "$tensor": lambda value: tensors[value],
    }
    return makers[tag](inner)
