# SPDX-License-Identifier: Apache-2.0
"""Records by the names of their fields, and back into their own classes: Structs, dataclasses, namedtuples.

Classes come from live values, from their fields' annotations and from accel; none is looked up by a name from a file.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeGuard, cast, runtime_checkable

import msgspec

from accel.errors import CheckpointError
from accel.errors._checks import with_article

Classes = Mapping[str, tuple[type, ...]]


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


def named_classes(kinds: Iterable[type]) -> Classes:
    """Return classes of records and enums, and of their fields' annotations, by stored name."""
    seen = dict[type, None]()
    for kind in kinds:
        _add_classes(kind, seen)
    found = dict[str, tuple[type, ...]]()
    for kind in seen:
        found[class_name(kind)] = (*found.get(class_name(kind), ()), kind)
    return found


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


def _add_classes(hint: object, seen: dict[type, None]) -> None:
    """Add the records and enums in an annotation, and in their fields' annotations."""
    for part in typing.get_args(hint):
        _add_classes(part, seen)
    if not _has_own_class(hint) or hint in seen:
        return
    seen[hint] = None
    if not issubclass(hint, enum.Enum):
        try:
            hints = typing.get_type_hints(hint)
        except (NameError, TypeError, AttributeError):  # names that only a type checker sees
            hints = {}
        for annotation in hints.values():
            _add_classes(annotation, seen)


def _has_own_class(hint: object) -> TypeGuard[type[Any]]:
    return isinstance(hint, type) and (issubclass(hint, enum.Enum) or is_record_class(cast("type[Any]", hint)))
