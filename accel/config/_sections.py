# SPDX-License-Identifier: Apache-2.0
"""Settings that a file may hold as a section: to ranks they travel as the text of a JSON object."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def section_text(value: object) -> object:
    """Return a section, or a record of one, as the text of a JSON object; another value as it is.

    Raises:
        ValueError: a value that no file in both formats can hold.
    """
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
    # JSON spells the others alike, but for one character that TOML wants escaped
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_key(name: str) -> str:
    """Return a key as TOML has it."""
    return name if _BARE.fullmatch(name) else toml_value(name)


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        pairs = cast(Mapping[str, Any], value).items()
        return {name: _without_none(each) for name, each in pairs if each is not None}
    return value
