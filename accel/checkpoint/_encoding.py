# SPDX-License-Identifier: Apache-2.0
"""Nested values and records to JSON and back, exactly and by type; tensors are taken out by name.

Records are Structs, dataclasses and namedtuples, stored by the names of their fields. Their classes come from live
values, from their fields' annotations and from accel; none is looked up by a name from a file.
"""

from __future__ import annotations

import binascii
import dataclasses
import enum
import functools
import json
import math
import re
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self, cast, runtime_checkable

import msgspec
import torch

from accel.checkpoint._leaves import (
    LEAVES,
    encode_leaf,
    is_special,
    make_array,
    make_generator,
    make_path,
    take_apart,
    unsaveable,
)
from accel.checkpoint._live_tensors import check_tensor
from accel.checkpoint._manifest import is_list, is_object
from accel.comm._marks import Uncompared
from accel.errors import CheckpointError
from accel.errors._checks import with_article

_PLAIN_STEP = re.compile(r"[A-Za-z0-9_\-]+", re.ASCII)
_WORD = 2**63

Classes = Mapping[str, tuple[type, ...]]
Kept = dict[str, object]  # by path: records and members of enums, of any class


@runtime_checkable
class DiffersByRank(Protocol):
    """A record with a part that differs between ranks."""

    def rank_part(self) -> object:
        """Return the part, None for none."""
        ...

    def with_rank_part(self, part: object) -> Self:
        """Return the record with a part of plain values; raise `msgspec.ValidationError` if it does not fit."""
        ...


@runtime_checkable
class JoinsRanks(DiffersByRank, Protocol):
    """A record that is nothing but its ranks' parts, which another number of ranks takes together."""

    def without_rank_part(self) -> Self:
        """Return what is common to all ranks."""
        ...

    def declared_as(self, live: Self) -> Self:
        """Return the common part of a stored record as the live one has it; raise as `with_rank_part`."""
        ...

    def with_rank_parts(self, parts: Sequence[object]) -> Self:
        """Return the record with the parts of all ranks in order, None where one has none; raise as
        `with_rank_part`."""
        ...


class MisfitError(CheckpointError):
    """A stored value does not fit its class; `where`, `expected` and `got` hold the difference."""

    def __init__(self, where: str, *, expected: str, got: str) -> None:
        super().__init__("not what the class holds", expected=expected, got=got, where=where)


def encode(value: object, path: str, tensors: dict[str, torch.Tensor], kept: Kept | None = None) -> Any:
    """Encode a value as JSON: of exactly the types below, as others would come back as another type. Its tensors go to
    `tensors` by names that begin with its path, records and members of enums to `kept` by path."""
    # exact types: an instance of a subclass would come back as a plain one
    if value is None or type(value) is bool:
        return value
    # as JSON: readers take integers of 64 bits at most, and neither infinity nor NaN
    if type(value) is int and -_WORD <= value < _WORD:
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) is str and _is_unicode(value):
        return value
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
    if type(value) is set or type(value) is frozenset:
        return {f"${type(cast(object, value)).__name__}": _encode_set(cast("set[object]", value), path, kept)}
    if type(value) is deque:
        queue = cast("deque[object]", value)
        return {
            "$deque": [[encode(child, f"{path}[{i}]", tensors, kept) for i, child in enumerate(queue)], queue.maxlen]
        }
    if type(value) is torch.Generator and value.device.type == "cpu":
        return {"$generator": encode(value.get_state(), path, tensors)}
    if isinstance(value, enum.Enum):
        return _encode_member(value, path, tensors, kept)
    if is_special(value):
        tag, texts, tensor = take_apart(value)
        held = [encode(text, path, tensors) for text in texts]
        return {tag: held if tensor is None else [*held, encode(tensor, path, tensors)]}
    return encode_leaf(value, path)


def encode_record(
    value: object, path: str, tensors: dict[str, torch.Tensor], kept: Kept | None = None
) -> dict[str, Any]:
    """Encode a record as fields by name, without the name of its class."""
    if kept is not None:
        kept[path] = value
    if isinstance(value, JoinsRanks):
        value = value.without_rank_part()  # rank 0's numbers are not all ranks'
    fields = {name: child for name, child in fields_of(value, path).items() if not isinstance(child, Uncompared)}
    return {name: encode(child, f"{path}.{name}", tensors, kept) for name, child in fields.items()}


def _take(tensor: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> str:
    check_tensor(tensor, path)
    if path in tensors:
        raise CheckpointError("two tensors have the same path", where=path, fix="Rename one of the keys.")
    # live memory, not a copy: it is written before the caller continues
    tensors[path] = tensor.detach()
    return path


def _encode_mapping(value: dict[object, object], path: str, tensors: dict[str, torch.Tensor], kept: Kept | None) -> Any:
    kinds = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
    # a key with "$" in front would read as a tag
    if type(value) is dict and all(type(key) is str and _is_unicode(key) and key[:1] != "$" for key in value):
        return {str(key): encode(child, path + key_step(key), tensors, kept) for key, child in value.items()}
    pairs: list[Any] = []
    for key, child in value.items():
        if isinstance(key, torch.Tensor) or is_record(key):
            raise unsaveable(key, f"a key of {path}")
        pairs.append([encode(key, f"a key of {path}", {}, kept), encode(child, path + key_step(key), tensors, kept)])
    return {kinds[type(value)]: pairs}


def _encode_set(value: set[object], path: str, kept: Kept | None) -> list[Any]:
    """Return the elements in an order that no hash decides, as ranks must agree."""
    for element in value:
        if isinstance(element, torch.Tensor) or is_record(element):
            raise unsaveable(element, f"an element of {path}")
    elements = [encode(element, f"an element of {path}", {}, kept) for element in value]
    return sorted(elements, key=lambda element: json.dumps(element, sort_keys=True))


def _encode_member(value: enum.Enum, path: str, tensors: dict[str, torch.Tensor], kept: Kept | None) -> Any:
    if kept is not None:
        kept[path] = value
    combined = isinstance(value, enum.Flag) and value.name not in type(value).__members__
    chosen = [None, encode(value.value, path, tensors)] if combined else [value.name, None]
    return {"$enum": [class_name(type(value)), *chosen]}


def key_step(key: object) -> str:
    """Return the step of a path that leads to the value of a mapping's key."""
    if type(key) is str:
        return f".{key}" if _PLAIN_STEP.fullmatch(key) else f"[{json.dumps(key)}]"
    return f"[{key!r}]"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_record(value: object) -> bool:
    """Return whether a value is a record: an instance of a `msgspec.Struct`, a dataclass or a namedtuple."""
    return not isinstance(value, type) and is_record_class(type(value))


def class_name(kind: type) -> str:
    """Return the stored name of a class; accel's own begin with `accel.`, in any module."""
    return f"accel.{kind.__qualname__}" if _is_ours(kind) else kind.__qualname__


def stored_names(kind: type[Any]) -> tuple[str, ...]:
    """Return the names of a record's fields."""
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    if issubclass(kind, tuple):
        return cast("Any", kind)._fields
    return tuple(field.name for field in dataclasses.fields(cast("Any", kind)))


def fields_of(record: object, path: str) -> dict[str, object]:
    """Return the stored fields of a record by name; raises `CheckpointError` if they do not describe the record."""
    names = stored_names(type(record))
    known = {*names, *_cached_properties(type(record))}
    beside = [name for name in getattr(record, "__dict__", {}) if name not in known and not _is_ours(type(record))]
    unset = [name for name in names if not hasattr(record, name)]
    if beside or unset:
        raise CheckpointError(
            f"{with_article(type(record).__name__)} that its fields do not describe",
            expected=f"a value for each of {', '.join(names)}, and no other attributes",
            got=f"also {', '.join(beside)}" if beside else f"none for {', '.join(unset)}",
            where=path,
            fix="Give it state_dict() and load_state_dict(), or make every attribute a field.",
        )
    fields = {name: getattr(record, name) for name in names}
    try:
        # a trial of the load: a value that the class refuses must not come out at the resume
        _ = make_record(type(record), fields, path)
    except MisfitError as error:
        raise CheckpointError(
            f"{with_article(type(record).__name__)} that its own class refuses, so that it could not be loaded",
            expected=error.expected,
            got=error.got,
            where=path,
            fix="Annotate its fields by the types that they hold.",
        ) from error
    return fields


def make_record(kind: type[Any], fields: Mapping[str, Any], path: str, *, exact: bool = True) -> Any:
    """Make a record of its stored fields; raises `MisfitError` if the class has others, or refuses the values. `exact`:
    fields hold values of the annotated types; else nested records may be dicts, as before format 4."""
    names = stored_names(kind)
    gone = {name for name, value in fields.items() if value is None}
    missing = [name for name in names if name not in fields]
    if _is_ours(kind):
        missing = []  # an older accel had no such field yet, and the class checks what it needs
    unexpected = sorted(fields.keys() - names - gone)
    if exact and (missing or unexpected):
        facts = [f"no {', '.join(missing)}"] if missing else []
        facts += [f"also {', '.join(unexpected)}"] if unexpected else []
        raise MisfitError(path, expected=f"{kind.__qualname__} of {', '.join(names)}", got=" and ".join(facts))
    held = {name: value for name, value in fields.items() if name in names}
    if issubclass(kind, msgspec.Struct):
        return _make_struct(kind, held, path, exact=exact)
    if issubclass(kind, tuple):
        return cast("Any", kind)(**held)
    made: Any = object.__new__(kind)  # and no second run of __post_init__
    for name, value in held.items():
        object.__setattr__(made, name, value)
    return made


def record_tag(value: object) -> dict[str, Any]:
    """Return the tag of a Struct by its field; empty for other records."""
    if not isinstance(value, msgspec.Struct):
        return {}
    config = value.__struct_config__
    return {config.tag_field: config.tag} if config.tag_field is not None else {}


def is_record_class(kind: type[Any]) -> bool:
    """Return whether a class is a `msgspec.Struct`, a dataclass or a namedtuple."""
    if issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind):
        return True
    return issubclass(kind, tuple) and isinstance(getattr(cast("type[Any]", kind), "_fields", None), tuple)


def _is_ours(kind: type) -> bool:
    """Return whether a class is accel's; attributes of its records besides fields serve only the running process."""
    return kind.__module__.partition(".")[0] == "accel"


def _cached_properties(kind: type) -> set[str]:
    members = {name: member for base in kind.__mro__ for name, member in vars(base).items()}
    return {name for name, member in members.items() if isinstance(member, functools.cached_property)}


def _make_struct(kind: type[msgspec.Struct], fields: Mapping[str, Any], path: str, *, exact: bool) -> msgspec.Struct:
    try:
        made = _converted(kind, fields)
    except msgspec.ValidationError as error:
        # annotations may name plain types where the live record held numpy's, or an enum's member
        plain = {name: _plain(value) for name, value in fields.items()}
        try:
            made = _converted(kind, plain)
        except msgspec.ValidationError:
            raise MisfitError(path, expected=kind.__qualname__, got=f"a value that is none: {error}") from error
    for name, value in fields.items() if exact else ():
        taken = getattr(made, name)
        if taken is not value and (type(taken) is type(value) or type(taken) in _PLAIN):
            msgspec.structs.force_setattr(made, name, value)  # convert takes a Counter for a dict, 1 for 1.0
    return made


_PLAIN = frozenset({bool, int, float, str, bytes, list, dict, type(None)})


def _converted(kind: type[msgspec.Struct], fields: Mapping[str, Any]) -> msgspec.Struct:
    """Return a Struct of fields that its class has checked, or raise `msgspec.ValidationError`."""
    config = kind.__struct_config__
    tag = {config.tag_field: config.tag} if config.tag_field is not None else {}
    wire = dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
    try:
        if not config.array_like:
            return msgspec.convert(tag | {wire[name]: value for name, value in fields.items()}, kind)
        given = kind(**fields)  # what an array leaves out it must leave out at its end
        return msgspec.convert([*tag.values(), *(getattr(given, name) for name in kind.__struct_fields__)], kind)
    except msgspec.ValidationError:
        raise
    except (TypeError, ValueError, NameError) as error:  # of annotations, too, that msgspec cannot check
        try:
            return kind(**fields)
        except (TypeError, ValueError) as refusal:
            raise msgspec.ValidationError(str(refusal)) from error


def _plain(value: Any) -> Any:
    """Convert a value for annotations of plain types: numbers of numpy, and members of enums, to plain values."""
    if isinstance(value, enum.Enum):
        return value.value
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return value.item()
    if type(value) is list or type(value) is tuple:
        children = [_plain(child) for child in cast("Sequence[Any]", value)]
        return children if isinstance(value, list) else tuple(children)
    if isinstance(value, dict):
        return {_plain(key): _plain(child) for key, child in cast("dict[Any, Any]", value).items()}
    return value


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Making:
    """Makes records of stored fields."""

    kept: Mapping[str, object]  # live records by path: a record at the same path has the class of that one
    classes: Classes  # else its class by name
    own: Callable[[str, object], object]  # maps path and record to the final record
    # Whether records inside values have the names of their classes, as since format 4; else a dict in the place
    # of a live record is one.
    exact: bool

    def record(self, name: str, fields: dict[str, Any], path: str) -> object:
        """Make a record; raises `MisfitError` if there is no class of that name, or it takes no such fields."""
        return self.own(path, make_record(self._class(name, path), fields, path))

    def member(self, name: str, member: str | None, value: Any, path: str) -> object:
        """Return a member of an enum, by its name or, of a combination of flags, its value; raises as `record`."""
        kind = cast("type[enum.Enum]", self._class(name, path))
        try:
            return kind(value) if member is None else kind[member]
        except (KeyError, ValueError, TypeError) as error:
            expected = f"a member of {kind.__qualname__}"
            raise MisfitError(path, expected=expected, got=str(value if member is None else member)) from error

    def _class(self, name: str, path: str) -> type:
        live = self.kept.get(path)
        # the class of the live record first: several classes of one name may be in a run
        found = (type(live),) if live is not None and class_name(type(live)) == name else self.classes.get(name, ())
        if len(found) != 1:
            shown = name.removeprefix("accel.")
            if not found:
                expected = f"a live {shown} in its place or as an item, which gives the class"
                got = f"{with_article(shown)} in the file, and no such value passed"
                raise MisfitError(path, expected=expected, got=got)
            expected = f"one class {shown} among the values that are passed"
            raise MisfitError(path, expected=expected, got=f"{len(found)} such classes")
        return found[0]


def decode(
    value: Any, where: str, tensors: Mapping[str, torch.Tensor], path: str = "", making: Making | None = None
) -> Any:
    """Decode a value of `encode` from JSON of any origin; raises `MisfitError` if a class does not fit. `where` is for
    errors, `path` as in `encode`. Without `making`, records come back as dicts of their fields."""
    if is_list(value):
        return [decode(child, where, tensors, f"{path}[{i}]", making) for i, child in enumerate(value)]
    if not is_object(value):
        return value
    tag = next(iter(value), "")
    # `encode` writes a tag as the only key of its object
    if len(value) != 1 or not tag.startswith("$"):
        made = {key: decode(child, where, tensors, path + key_step(key), making) for key, child in value.items()}
        if making is None or making.exact or not is_record(live := making.kept.get(path)):
            return made
        made = {key: child for key, child in made.items() if key not in record_tag(live)}
        return make_record(type(live), made, path, exact=False)
    try:
        # a manifest is input: whatever stands in it must end as one kind of error
        return _decode_tagged(tag, value[tag], where, tensors, path, making)
    except (TypeError, ValueError, LookupError, AttributeError, binascii.Error, struct.error) as error:
        raise CheckpointError(f"the stored value is not valid: {tag}", where=where) from error


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

    def member(value: Any) -> object:
        name, chosen = str(value[0]), value[1]
        stored = child(value[2])
        if making is None:
            return stored if chosen is None else chosen
        return making.member(name, chosen, stored, path)

    def elements(value: list[Any]) -> list[Any]:
        return [decode(each, where, tensors, f"an element of {path}", making) for each in value]

    makers: dict[str, Callable[[Any], Any]] = {
        "$tuple": lambda value: tuple(child(part, f"[{i}]") for i, part in enumerate(value)),
        "$set": lambda value: set(elements(value)),
        "$frozenset": lambda value: frozenset(elements(value)),
        "$deque": lambda value: deque((child(part, f"[{i}]") for i, part in enumerate(value[0])), value[1]),
        "$generator": lambda value: make_generator(child(value)),
        "$record": record,
        "$enum": member,
        "$path": lambda value: make_path(value[0], child(value[1])),
        "$array": lambda value: make_array(str(value[0]), child(value[1])),
        "$dict": lambda value: dict(pairs(value)),
        "$ordered": lambda value: OrderedDict(pairs(value)),
        "$counter": lambda value: Counter(dict(pairs(value))),
        "$tensor": lambda value: tensors[value],
    }
    return (LEAVES.get(tag) or makers[tag])(inner)
