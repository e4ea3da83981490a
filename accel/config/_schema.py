# SPDX-License-Identifier: Apache-2.0
"""Fields of a record, from its annotations: their words, and their values from text, sections and decoded files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec
from msgspec import inspect

from accel.errors import AccelError, ConfigError
from accel.errors._checks import did_you_mean
from accel.formats import own_name, precision_fix
from accel.run_folder import hide_in_text


def record_from_text(kind: type[msgspec.Struct], text: str) -> dict[str, Any]:
    """Return the keys and values that a text spells, for `record_from_plain`; `ConfigError` unless pairs of known
    fields or JSON."""
    if text.startswith("{"):
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError("malformed JSON", got=str(error)) from None
    values: dict[str, Any] = {}
    for pair in text.split(","):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals:
            raise ConfigError("the text is not a pair", expected="name=value", got=repr(pair))
        _put(kind, values, name, value)
    return values


def record_from_plain(kind: type[msgspec.Struct], values: Mapping[str, Any]) -> Any:
    """Return the record of decoded values; texts may spell numbers and booleans, as in pairs.

    An invalid value raises msgspec's own `ValidationError`, an unknown key `ConfigError`.
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
        kinds = _alternatives(fields[name])
        inside = (each.cls for each in kinds if isinstance(each, inspect.StructType))
        if isinstance(value, Mapping) and (record := next(inside, None)) is not None:
            _check_names(record, cast("Mapping[str, Any]", value), f"{path}{name}.")
        items = (each.item_type for each in kinds if isinstance(each, inspect.VarTupleType))
        entry = next((each.cls for each in items if isinstance(each, inspect.StructType)), None)
        if isinstance(value, list) and entry is not None:
            for at, each in enumerate(cast("list[object]", value)):
                if isinstance(each, Mapping):
                    _check_names(entry, cast("Mapping[str, Any]", each), f"{path}{name}[{at}].")


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


_BARE = re.compile(r"[A-Za-z0-9_-]+")


def section_text(value: object) -> object:
    """Return a section or record as the text of a JSON object, other values as they are; `ValueError` for one that no
    file can hold."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    elif isinstance(value, str) and value.startswith("{"):
        value = json.loads(value)
    if not isinstance(value, Mapping):
        return value
    try:
        return json.dumps(_without_none(cast(Mapping[str, Any], value)), allow_nan=False)
    except (TypeError, RecursionError) as error:  # such as a date of TOML
        raise ValueError(str(error)) from None


def section_values(text: str) -> dict[str, Any] | None:
    """Return the values of a section from its text; None for a text of another kind."""
    return json.loads(text) if text.startswith("{") else None


def toml_value(value: object) -> str:
    """Return a value as TOML has it, a mapping as an inline table."""
    if isinstance(value, Mapping):
        pairs = cast(Mapping[str, Any], value).items()
        return f"{{{', '.join(f'{toml_key(name)} = {toml_value(each)}' for name, each in pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, cast(list[object], value)))}]"
    # JSON spells the others alike, but for one character that TOML escapes
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_key(name: str) -> str:
    """Return a key as TOML has it."""
    return name if _BARE.fullmatch(name) else toml_value(name)


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        pairs = cast(Mapping[str, Any], value).items()
        return {name: _without_none(each) for name, each in pairs if each is not None}
    return value


_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_METAVARS: dict[type, str] = {
    inspect.BoolType: "",
    inspect.IntType: "N",
    inspect.FloatType: "SECONDS",
    inspect.VarTupleType: "N,N",
}


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One field of a record, as its annotation describes it."""

    name: str  # key in a file
    flag: str  # name on a command line
    variable: str  # name in the environment
    default: Any  # value of a new record
    fallback: Any  # value in place of a choice that is left open; the default unless the annotation has one
    doc: str  # meaning, one sentence
    expects: str  # accepted values, in words
    metavar: str  # placeholder in a usage line; empty for a flag that needs no value
    choices: Mapping[str, str]  # accepted names with their meanings; empty where no meaning is worth a line
    shorthand: tuple[str, str] | None  # a flag and its value; None for most
    section: bool  # whether a file may hold a section in place of a text
    type: Any  # type that msgspec checks
    kinds: tuple[inspect.Type, ...]  # alternatives of that type that one word can spell
    record: type[msgspec.Struct] | None  # the alternative that pairs, or a table of a file, spell; None for most

    @property
    def names(self) -> tuple[str, ...]:
        """The accepted names, as far as they can be listed."""
        literals = (kind.values for kind in self.kinds if isinstance(kind, inspect.LiteralType))
        literal = [str(name) for values in literals for name in values]
        boolean = ["true", "false"] if not self.metavar else []
        return tuple(dict.fromkeys([*self.choices, *literal, *boolean]))

    @property
    def is_open(self) -> bool:
        """True if more than the listed names are accepted."""
        return any(not isinstance(kind, inspect.LiteralType) for kind in self.kinds)


def fields_of(record: type[msgspec.Struct]) -> tuple[Field, ...]:
    """Return the fields of a record with annotations `Annotated[type, Meta(description=..., extra=...)]`."""
    return tuple(_field(info) for info in msgspec.structs.fields(record))


def from_plain(field: Field, value: object, *, where: str) -> Any:
    """Return a decoded value as the field's type has it; a `ConfigError` has `where`, the accepted values and the
    actual one."""
    try:
        return _convert(field, value, where=where, got=value, error=ConfigError)
    except ConfigError as refused:
        if not refused.fix and isinstance(value, str):
            refused.fix = _unquoted(field, value)
        raise


def from_text(field: Field, text: str, *, where: str, error: type[AccelError] = ConfigError) -> Any:
    """Return the value that a flag or a variable spells: `true`, `2`, `0.5`, `0,1`, a name or `name=value,name=value`;
    else raise `error`."""
    return _convert(field, _from_words(field, text.strip()), where=where, got=text, error=error)


def to_text(value: object) -> str:
    """Return how a flag or a variable spells a value."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, msgspec.Struct):
        return record_to_text(value)
    return ",".join(map(str, cast(tuple[object, ...], value))) if isinstance(value, tuple) else str(value)


def _convert(field: Field, value: object, *, where: str, got: object, error: type[AccelError]) -> Any:
    shown = _shown(got)
    try:
        if field.name == "precision":
            value = own_name(value)
        if field.section:
            value = section_text(value)
        if field.record is not None and isinstance(value, str) and ("=" in value or value.startswith("{")):
            value = record_from_text(field.record, value)
        if field.record is not None and isinstance(value, dict):
            return record_from_plain(field.record, cast(dict[str, Any], value))
        if isinstance(value, dict) or (isinstance(value, msgspec.Struct) and type(value) is not field.record):
            raise msgspec.ValidationError
        return msgspec.convert(value, field.type)
    except ConfigError as refused:  # of the record itself
        inside = f"{refused.where} of " if refused.where else ""
        raise error(
            f"invalid {field.name}, {refused.problem}",
            expected=refused.expected,
            got=refused.got or shown,
            where=f"{inside}{where}",
            fix=refused.fix,
        ) from None
    except (msgspec.ValidationError, ValueError) as refused:
        fix = _near(field, got) or (f"{refused}." if field.record is not None and "$" in str(refused) else "")
        raise error(f"invalid {field.name}", expected=field.expects, got=shown, where=where, fix=fix) from None


def _unquoted(field: Field, text: str) -> str:
    """Return the advice for a number or truth in quotes; empty for any other text."""
    spelled = _from_words(field, text.strip())
    try:
        _ = msgspec.convert(spelled, field.type)
    except (msgspec.ValidationError, ValueError):
        return ""
    return f"Write it without quotes: {json.dumps(spelled)}."


def _shown(got: object) -> str:
    text = hide_in_text(repr(got))
    return text if len(text) <= 80 else f"{text[:77]}..."


def _from_words(field: Field, text: str) -> object:
    for kind in field.kinds:
        if isinstance(kind, inspect.BoolType):
            return _BOOLEANS.get(text.lower(), text)
        if isinstance(kind, inspect.VarTupleType) and re.fullmatch(r"[0-9, ]+", text):
            return [int(part) if _INTEGER.fullmatch(part.strip()) else part for part in text.split(",")]
        if isinstance(kind, inspect.IntType | inspect.FloatType) and _INTEGER.fullmatch(text):
            return int(text)
        if isinstance(kind, inspect.FloatType):
            try:
                return float(text)
            except ValueError:
                continue
    return text


def _field(info: msgspec.structs.FieldInfo) -> Field:
    described: Any = inspect.type_info(info.type)
    types: tuple[inspect.Type, ...] = getattr(described.type, "types", (described.type,))
    kinds = tuple(kind for kind in types if not isinstance(kind, inspect.StructType))
    record = next((kind.cls for kind in types if isinstance(kind, inspect.StructType)), None)
    schema = described.extra_json_schema
    extra = cast(dict[str, Any], described.extra or {})
    return Field(
        name=info.name,
        flag=f"--{info.name.replace('_', '-')}",
        variable=f"ACCEL_{info.name.upper()}",
        default=info.default,
        fallback=extra.get("fallback", info.default),
        doc=schema["description"],
        expects=" or ".join(_words(kind, schema.get("examples", [])) for kind in (types if record else kinds)),
        metavar=next((_METAVARS[type(kind)] for kind in kinds if type(kind) in _METAVARS), "NAME"),
        choices=extra.get("choices", {}),
        shorthand=extra.get("shorthand"),
        section=extra.get("section", False),
        type=info.type,
        kinds=kinds,
        record=record,
    )


def _words(kind: inspect.Type, examples: list[str]) -> str:
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType(ge=least, le=most):
            return f"an integer from {least} to {most}"
        case inspect.FloatType(gt=above, le=most):
            return f"a number above {above} and at most {most:.0f}"
        case inspect.LiteralType(values=values):
            return _listed(list(map(str, values)))
        case inspect.StructType():
            return f"pairs such as {examples[0]}"
        case inspect.VarTupleType():
            return "a list of integers such as 0,1"
        case _:
            separator = " or " if any("," in example for example in examples) else ", "
            return f"a text such as {separator.join(examples)}" if examples else "a text"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"


def _near(field: Field, got: object) -> str:
    if field.name == "precision" and (fix := precision_fix(got)):
        return fix
    hint = did_you_mean(str(got), field.names) if field.names else ""
    return hint if hint.startswith("Did") else ""
