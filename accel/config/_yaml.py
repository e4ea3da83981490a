# SPDX-License-Identifier: Apache-2.0
"""A strict reader for the plain part of YAML that Accelerate writes: nested keys, lists of scalars, no anchors or tags.

Scalars mean what they mean in YAML 1.1, https://yaml.org/type: an unquoted `no` is false.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from accel.errors import ConfigError

_KEY = re.compile(r"([A-Za-z_][\w.-]*|'[^']*'|\"[^\"]*\")\s*:(?:\s+|$)")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null"), None),
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    "{}": {},
    "[]": [],
}
_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+][0-9]+)?")


class _Line(NamedTuple):
    number: int
    indent: int
    text: str


def decode_yaml(text: str, path: str) -> dict[str, Any]:
    """Return the keys and values of a document.

    Args:
        text: the document.
        path: for errors.

    Raises:
        ConfigError: it is malformed, or uses what this reader does not know; the message has line and column.
    """
    lines = list(_lines(text, path))
    values, end = _mapping(lines, 0, 0, path)
    if end < len(lines):
        raise _malformed("the indentation fits no line above", path, lines[end])
    return values


def _lines(text: str, path: str) -> Iterator[_Line]:
    for number, raw in enumerate(text.splitlines(), 1):
        body = raw.lstrip(" ")
        line = _Line(number, len(raw) - len(body), body.rstrip())
        if line.text.startswith("\t"):
            raise _malformed("a tab in the indentation", path, line)
        if line.text and not line.text.startswith("#") and not (number == 1 and line.text == "---"):
            yield line


def _mapping(lines: list[_Line], at: int, indent: int, path: str) -> tuple[dict[str, Any], int]:
    values: dict[str, Any] = {}
    while at < len(lines) and lines[at].indent == indent and not lines[at].text.startswith("- "):
        line = lines[at]
        found = _KEY.match(line.text)
        if not found:
            raise _malformed("expected `key: value`", path, line)
        key, rest = found[1].strip("'\""), line.text[found.end() :]
        value, at = _value(lines, at, rest, found.end(), path)
        if key in values and values[key] != value:
            raise _malformed(f"{key} stands twice, with different values", path, line)
        values[key] = value
    return values, at


def _value(lines: list[_Line], at: int, rest: str, offset: int, path: str) -> tuple[Any, int]:
    """Return what stands behind a key, on its line or nested below it, and the line after it."""
    line = lines[at]
    text = _uncommented(rest)
    if text:
        return _scalar(text, path, line, offset), at + 1
    at += 1
    if at < len(lines) and lines[at].indent >= line.indent and lines[at].text.startswith("- "):
        return _list(lines, at, lines[at].indent, path)
    if at < len(lines) and lines[at].indent > line.indent:
        return _mapping(lines, at, lines[at].indent, path)
    return None, at


def _list(lines: list[_Line], at: int, indent: int, path: str) -> tuple[list[Any], int]:
    values: list[Any] = []
    while at < len(lines) and lines[at].indent == indent and lines[at].text.startswith("- "):
        values.append(_scalar(_uncommented(lines[at].text[2:].strip()), path, lines[at], 2))
        at += 1
    return values, at


def _uncommented(text: str) -> str:
    quoted = re.match(r"""('(?:[^']|'')*'|"(?:[^"\\]|\\.)*")\s*(#.*)?$""", text)
    return quoted[1] if quoted else re.sub(r"(^|\s)#.*", "", text).strip()


def _scalar(text: str, path: str, line: _Line, offset: int) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if text[0] == "'" and len(text) > 1 and text[-1] == "'":
        return text[1:-1].replace("''", "'")
    if text[0] == '"':
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            raise _malformed("a string that does not end", path, line, offset) from None
    if text[0] == "[" and text[-1] == "]":
        return [_scalar(part.strip(), path, line, offset) for part in text[1:-1].split(",")]
    if text[0] in "'[]{}&*!|>%@`" or re.search(r":(\s|$)", text):
        raise _malformed(f"{text!r} is more than a plain value", path, line, offset)
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _malformed(reason: str, path: str, line: _Line, offset: int = 0) -> ConfigError:
    return ConfigError(
        "malformed YAML", got=reason, where=f"{path}, line {line.number}, column {line.indent + offset + 1}"
    )
