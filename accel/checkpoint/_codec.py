# SPDX-License-Identifier: Apache-2.0
"""Nested values to JSON and back, exactly and by type; tensors are taken out by name.

What JSON has stays as it is. Everything else is an object with one key that begins with "$": tuples, keys that are
no text, bytes, complex numbers, integers beyond 64 bits, floats that are not finite, tensors, records, members of
enums, paths, values of numpy.
"""

from __future__ import annotations

import base64
import binascii
import enum
import json
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import torch

from accel.checkpoint._live_tensors import check_tensor
from accel.checkpoint._records import Classes, MisfitError, class_name, fields_of, is_record, make_record
from accel.checkpoint._values import is_special, make_array, make_path, make_scalar, take_apart
from accel.errors import CheckpointError

_PLAIN_STEP = re.compile(r"[A-Za-z0-9_\-]+", re.ASCII)
_WORD = 2**63


Kept = dict[str, object]  # by path: records and members of enums, each with a class of its own


def encode(value: object, path: str, tensors: dict[str, torch.Tensor], kept: Kept | None = None) -> Any:
    """Turn a value into what JSON can hold.

    Args:
        value: None, bool, int, float, complex, str, bytes, tensor, record, member of an enum, path, scalar or array of
            numpy, or a list, tuple, dict, OrderedDict or Counter of such; of exactly these types.
        path: the value's name; the names of its tensors begin with it.
        tensors: receives the tensors by name.
        kept: receives records and members of enums by path.

    Raises:
        CheckpointError: something else is inside, named by its path.
    """
    if value is None or type(value) is bool:
        return value
    if type(value) is int:
        return value if -_WORD <= value < _WORD else {"$int": hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if type(value) is str:
        return value if _is_unicode(value) else {"$text": _base64(value.encode("utf-8", "surrogatepass"))}
    if type(value) is bytes:
        return {"$bytes": _base64(value)}
    if type(value) is complex:
        return {"$complex": [encode(part, path, tensors) for part in (value.real, value.imag)]}
    if isinstance(value, torch.Tensor):
        return {"$tensor": _take(value, path, tensors)}
    if type(value) is list or type(value) is tuple:
        sequence = cast("list[object] | tuple[object, ...]", value)
        children = [encode(child, f"{path}[{i}]", tensors, kept) for i, child in enumerate(sequence)]
        return children if type(sequence) is list else {"$tuple": children}
    if is_record(value):
        return {"$record": [class_name(type(value)), encode_record(value, path, tensors, kept)]}
    if type(value) in (dict, OrderedDict, Counter):
        return _encode_mapping(cast("dict[object, object]", value), path, tensors, kept)
    if isinstance(value, enum.Enum):
        return _encode_member(value, path, tensors, kept)
    if is_special(value):
        tag, texts, tensor = take_apart(value)
        held = [encode(text, path, tensors) for text in texts]
        return {tag: held if tensor is None else [*held, encode(tensor, path, tensors)]}
    raise _unsaveable(value, path)


def encode_record(
    value: object, path: str, tensors: dict[str, torch.Tensor], kept: Kept | None = None
) -> dict[str, Any]:
    """Turn a record into its fields by name, encoded, without the name of its class.

    Raises:
        CheckpointError: as `encode`.
    """
    if kept is not None:
        kept[path] = value
    return {name: encode(child, f"{path}.{name}", tensors, kept) for name, child in fields_of(value, path).items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Making:
    """The way from stored fields to records.

    Attributes:
        kept: live records by path: a record at the same path has the class of that one.
        classes: else its class by name.
        own: gives what becomes of each record that is made, by its path.
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
    """Make the value again that `encode` took apart.

    Args:
        value: decoded JSON, from anywhere.
        where: for errors.
        tensors: by name.
        path: as `encode` had it.
        making: makes records; without it they come back as dicts of their fields.

    Raises:
        CheckpointError: it is nothing that `encode` makes; a `MisfitError` if that is due to the classes of records.
    """
    if isinstance(value, list):
        held = enumerate(cast("list[Any]", value))
        return [decode(child, where, tensors, f"{path}[{i}]", making) for i, child in held]
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, Any]", value)
    tag = next(iter(fields), "")
    if len(fields) != 1 or not tag.startswith("$"):
        made = {key: decode(child, where, tensors, path + _step(key), making) for key, child in fields.items()}
        if making is None or making.exact or not is_record(live := making.kept.get(path)):
            return made
        made = {key: child for key, child in made.items() if key not in record_tag(live)}
        return make_record(type(live), made, path, exact=False)
    try:
        return _decode_tagged(tag, fields[tag], where, tensors, path, making)
    except (TypeError, ValueError, LookupError, AttributeError, binascii.Error, struct.error) as error:
        raise CheckpointError(f"not a stored value: {tag}", where=where) from error


def stored_field(record: object, name: str) -> object:
    """Return a field of an encoded record; None if there is none.

    Args:
        record: decoded JSON, from anywhere: a record that is an item, or one inside another value.
        name: of the field.
    """
    if not isinstance(record, dict):
        return None
    fields = cast("dict[str, object]", record)
    nested = fields.get("$record")
    return stored_field(cast("list[object]", nested)[-1], name) if isinstance(nested, list) else fields.get(name)


def tensors_in(value: Any) -> set[str]:
    """Return the names of the tensors that an encoded value refers to.

    Args:
        value: decoded JSON, from anywhere.
    """
    if isinstance(value, list):
        return set[str]().union(*map(tensors_in, cast("list[Any]", value)))
    if not isinstance(value, dict):
        return set()
    fields = cast("dict[str, Any]", value)
    name = fields.get("$tensor")
    return {name} if isinstance(name, str) and len(fields) == 1 else tensors_in(list(fields.values()))


def has_records(value: Any) -> bool:
    """Whether an encoded value names classes, of records or enums."""
    if isinstance(value, list):
        return any(map(has_records, cast("list[Any]", value)))
    if not isinstance(value, dict):
        return False
    fields = cast("dict[str, Any]", value)
    return (len(fields) == 1 and not fields.keys().isdisjoint(("$record", "$enum"))) or has_records(
        list(fields.values())
    )


def _take(tensor: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> str:
    check_tensor(tensor, path)
    if path in tensors:
        raise CheckpointError("two tensors have the same path", where=path, fix="Rename one of the keys.")
    tensors[path] = tensor.detach()
    return path


def _encode_mapping(value: dict[object, object], path: str, tensors: dict[str, torch.Tensor], kept: Kept | None) -> Any:
    kinds = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
    if type(value) is dict and all(type(key) is str and _is_unicode(key) and key[:1] != "$" for key in value):
        return {str(key): encode(child, path + _step(key), tensors, kept) for key, child in value.items()}
    pairs: list[Any] = []
    for key, child in value.items():
        if isinstance(key, torch.Tensor) or is_record(key):
            raise _unsaveable(key, f"a key of {path}")
        pairs.append([encode(key, f"a key of {path}", {}, kept), encode(child, path + _step(key), tensors, kept)])
    return {kinds[type(value)]: pairs}


def _decode_tagged(
    tag: str, inner: Any, where: str, tensors: Mapping[str, torch.Tensor], path: str, making: Making | None
) -> Any:
    def child(value: Any, step: str = "") -> Any:
        return decode(value, where, tensors, path + step, making)

    def pairs(value: list[Any]) -> list[tuple[Any, Any]]:
        found: list[tuple[Any, Any]] = []
        for stored, held in value:
            key = decode(stored, where, tensors, f"a key of {path}", making)
            found.append((key, child(held, _step(key))))
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
        "$tuple": lambda value: tuple(child(part, f"[{i}]") for i, part in enumerate(cast("list[Any]", value))),
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


def _encode_member(value: enum.Enum, path: str, tensors: dict[str, torch.Tensor], kept: Kept | None) -> Any:
    if kept is not None:
        kept[path] = value
    combined = isinstance(value, enum.Flag) and value.name not in type(value).__members__
    chosen = [None, encode(value.value, path, tensors)] if combined else [value.name, None]
    return {"$enum": [class_name(type(value)), *chosen]}


def record_tag(value: object) -> dict[str, Any]:
    """Return the tag of a Struct by its field; empty for other records."""
    if not isinstance(value, msgspec.Struct):
        return {}
    config = value.__struct_config__
    return {config.tag_field: config.tag} if config.tag_field is not None else {}


def _step(key: object) -> str:
    if type(key) is str:
        return f".{key}" if _PLAIN_STEP.fullmatch(key) else f"[{json.dumps(key)}]"
    return f"[{key!r}]"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _unsaveable(value: object, path: str) -> CheckpointError:
    name = type(value).__name__
    fixes = {
        "function": "Leave functions out of the state and pass them to the constructor again.",
        "set": "Use sorted(...), a list.",
        "frozenset": "Use sorted(...), a list.",
        "ndarray": "Use an array of numbers, texts, bytes or dates.",
        "defaultdict": "Use dict(...).",
        "deque": "Use list(...).",
        "bytearray": "Use bytes(...).",
    }
    known = fixes.get(name)
    if callable(getattr(value, "load_state_dict", None)) and not isinstance(value, type):
        known = "Pass it as an item of its own, or what its state_dict() returns."
    return CheckpointError(
        f"a {name} cannot be stored",
        expected="None, bool, int, float, complex, str, bytes, a tensor, a record, an enum, a path, a scalar or array "
        "of numpy, or a list, tuple or dict of such",
        got=f"{name} of {type(value).__module__}",
        where=path,
        fix=known or "Give it state_dict() and load_state_dict(), or store plain values.",
    )
