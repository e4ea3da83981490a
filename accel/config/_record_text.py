# SPDX-License-Identifier: Apache-2.0
"""Records as one text, for flags and variables: pairs such as `units=Block,offload=true`, or JSON.

A pair names a field, that of a record inside with a dot: `compute=bf16,fp8.scaling=rowwise`. A list has a pair for each
entry. What pairs cannot spell is spelled as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec
from msgspec import inspect

from accel.errors import ConfigError, did_you_mean


def record_from_text(kind: type[msgspec.Struct], text: str) -> dict[str, Any]:
    """Return the keys and values that a text spells, for `record_from_plain`.

    Raises:
        ConfigError: it is neither pairs of known fields nor JSON.
    """
    if text.startswith("{"):
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ConfigError("malformed JSON", got=str(error)) from None
    values: dict[str, Any] = {}
    for pair in text.split(","):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals:
            raise ConfigError("not a pair", expected="name=value", got=repr(pair))
        _put(kind, values, name, value)
    return values


def record_from_plain(kind: type[msgspec.Struct], values: Mapping[str, Any]) -> Any:
    """Return the record of decoded values. Texts stand for numbers and booleans too, as in pairs.

    Raises:
        ConfigError: an unknown key, or as the record itself raises.
        msgspec.ValidationError: a value that its field does not take.
    """
    _check_names(kind, values, "")
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):  # what the record's own check raised
            raise error.__cause__ from None
        raise


def record_to_text(record: msgspec.Struct) -> str:
    """Return the text of a record: pairs of the fields that are not at their defaults, or JSON."""
    kind = type(record)
    try:
        text = ",".join(_pairs(record, ""))
        if text and record_from_plain(kind, record_from_text(kind, text)) == record:
            return text
    except (ConfigError, msgspec.ValidationError):
        pass  # pairs do not spell it
    values: dict[str, Any] = msgspec.to_builtins(record)
    defaults: dict[str, Any] = msgspec.to_builtins(kind())
    return msgspec.json.encode({name: value for name, value in values.items() if value != defaults[name]}).decode()


def _put(kind: type[msgspec.Struct], values: dict[str, Any], name: str, value: str) -> None:
    """Put one pair into the values of a record, or of the record or mapping inside."""
    field, _, inside = name.partition(".")
    described = _fields(kind).get(field)
    if described is None:
        raise _unknown(field, _fields(kind), kind, "")
    kinds = _alternatives(described)
    record = next((each.cls for each in kinds if isinstance(each, inspect.StructType)), None)
    has_parts = bool(inside) and (record is not None or any(isinstance(each, inspect.DictType) for each in kinds))
    if inside and not has_parts:
        raise ConfigError("no such field", expected=f"{field}, which has no parts", got=repr(name))
    if has_parts:
        parts = values.setdefault(field, {})
        if not isinstance(parts, dict) or (record is None and inside in parts):
            raise _twice(name)
        if record is not None:
            _put(record, cast(dict[str, Any], parts), inside, value)
        else:
            parts[inside] = value
    elif any(isinstance(each, inspect.VarTupleType) for each in kinds) and not _is_single(described, value):
        entries = values.setdefault(field, [])
        if not isinstance(entries, list):
            raise _twice(name)
        cast(list[str], entries).append(value)
    elif field in values:
        raise _twice(name)
    else:
        values[field] = value


def _twice(name: str) -> ConfigError:
    return ConfigError("a field is named twice", got=repr(name), fix="Name it once.")


def _is_single(described: inspect.Type, value: str) -> bool:
    """Return whether a text is a value of another alternative than the list."""
    for kind in _alternatives(described):
        if isinstance(kind, inspect.LiteralType) and value in kind.values:
            return True
        if isinstance(kind, inspect.IntType) and value.isdecimal():
            return True
    return False


def _pairs(record: msgspec.Struct, prefix: str) -> list[str]:
    found: list[str] = []
    for info in msgspec.structs.fields(record):
        value = getattr(record, info.name)
        name = f"{prefix}{info.name}"
        if value == info.default:
            continue
        if isinstance(value, msgspec.Struct):
            found += _pairs(value, f"{name}.")
        elif isinstance(value, Mapping):
            mapping = cast("Mapping[str, object]", value)
            found += [f"{name}.{key}={_spelled(each)}" for key, each in mapping.items()]
        elif isinstance(value, tuple):
            found += [f"{name}={_spelled(each)}" for each in cast("tuple[object, ...]", value)]
        else:
            found.append(f"{name}={_spelled(value)}")
    return found


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def _check_names(kind: type[msgspec.Struct], values: Mapping[str, Any], path: str) -> None:
    fields = _fields(kind)
    for name, value in values.items():
        if name not in fields:
            raise _unknown(name, fields, kind, path)
        inside = (each.cls for each in _alternatives(fields[name]) if isinstance(each, inspect.StructType))
        if isinstance(value, Mapping) and (record := next(inside, None)) is not None:
            _check_names(record, cast("Mapping[str, Any]", value), f"{path}{name}.")


def _unknown(name: str, fields: Mapping[str, object], kind: type[msgspec.Struct], path: str) -> ConfigError:
    return ConfigError(
        "unknown field", expected=f"a field of {kind.__name__}", got=repr(path + name), fix=did_you_mean(name, fields)
    )


def _fields(kind: type[msgspec.Struct]) -> dict[str, inspect.Type]:
    described = cast(inspect.StructType, inspect.type_info(kind))
    return {field.name: field.type for field in described.fields}


def _alternatives(described: inspect.Type) -> tuple[inspect.Type, ...]:
    while isinstance(described, inspect.Metadata):
        described = described.type
    return described.types if isinstance(described, inspect.UnionType) else (described,)
