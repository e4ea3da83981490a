# SPDX-License-Identifier: Apache-2.0
"""Fields of a record, from its annotations: their words, and their values from text and from decoded files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec
from msgspec import inspect

from accel.config._record_text import record_from_plain, record_from_text, record_to_text
from accel.config._sections import section_text
from accel.errors import AccelError, ConfigError, did_you_mean
from accel.formats import precision_fix

_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_METAVARS: dict[type, str] = {
    inspect.BoolType: "",
    inspect.IntType: "N",
    inspect.FloatType: "SECONDS",
    inspect.VarTupleType: "N,N",
}


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One field of a record, as its annotation describes it.

    Attributes:
        name: key in a file.
        flag, variable: names on a command line and in the environment.
        default: value of a new record.
        fallback: value in place of a choice that is left open; the default unless the annotation has one.
        doc: meaning, one sentence.
        expects: accepted values, in words.
        metavar: placeholder in a usage line; empty for a flag that needs no value.
        choices: accepted names with their meanings; empty where no meaning is worth a line.
        shorthand: a flag and the value that it stands for; None for most.
        section: whether a file may hold a section in place of a text.
        type: type that msgspec checks.
        kinds: alternatives of that type that one word can spell.
        record: the alternative that pairs, or a table of a file, spell; None for most.
    """

    name: str
    flag: str
    variable: str
    default: Any
    fallback: Any
    doc: str
    expects: str
    metavar: str
    choices: Mapping[str, str]
    shorthand: tuple[str, str] | None
    section: bool
    type: Any
    kinds: tuple[inspect.Type, ...]
    record: type[msgspec.Struct] | None

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
    """Return the fields of a record whose annotations are `Annotated[type, Meta(description=..., extra=...)]`."""
    return tuple(_field(info) for info in msgspec.structs.fields(record))


def from_plain(field: Field, value: object, *, where: str) -> Any:
    """Return a decoded value as the field's type has it.

    Raises:
        ConfigError: the field does not take it; the message has `where`, the accepted values and the one that came.
    """
    try:
        return _convert(field, value, where=where, got=value, error=ConfigError)
    except ConfigError as refused:
        if not refused.fix and isinstance(value, str):
            refused.fix = _unquoted(field, value)
        raise


def from_text(field: Field, text: str, *, where: str, error: type[AccelError] = ConfigError) -> Any:
    """Return the value that a flag or a variable spells: `true`, `2`, `0.5`, `0,1`, a name or `name=value,name=value`.

    Raises:
        AccelError: the field does not take it; of the class `error`.
    """
    return _convert(field, _spelled(field, text.strip()), where=where, got=text, error=error)


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
            f"not a usable {field.name}, {refused.problem}",
            expected=refused.expected,
            got=refused.got or shown,
            where=f"{inside}{where}",
            fix=refused.fix,
        ) from None
    except (msgspec.ValidationError, ValueError) as refused:
        fix = _near(field, got) or (f"{refused}." if field.record is not None and "$" in str(refused) else "")
        raise error(f"not a usable {field.name}", expected=field.expects, got=shown, where=where, fix=fix) from None


def _unquoted(field: Field, text: str) -> str:
    """Return the advice for a number or truth in quotes; empty for any other text."""
    spelled = _spelled(field, text.strip())
    try:
        _ = msgspec.convert(spelled, field.type)
    except (msgspec.ValidationError, ValueError):
        return ""
    return f"Write it without quotes: {json.dumps(spelled)}."


def _shown(got: object) -> str:
    text = repr(got)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _spelled(field: Field, text: str) -> object:
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
            apart = " or " if any("," in example for example in examples) else ", "
            return f"a text such as {apart.join(examples)}" if examples else "a text"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"


def _near(field: Field, got: object) -> str:
    if field.name == "precision" and (fix := precision_fix(got)):
        return fix
    hint = did_you_mean(str(got), field.names) if field.names else ""
    return hint if hint.startswith("Did") else ""
