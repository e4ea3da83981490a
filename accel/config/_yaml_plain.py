# SPDX-License-Identifier: Apache-2.0
"""A reader for the plain part of YAML that Accelerate writes: nested keys, lists of scalars, no anchors or tags.

The reader takes only documents to which YAML 1.1 gives the same values; all else is refused by line.
Reference: https://yaml.org/type, and PyYAML's resolver for scalars.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from accel.errors import ConfigError

MOST_DEPTH = 64

_KEY = re.compile(r"""([A-Za-z_][A-Za-z0-9_.-]*|'[A-Za-z0-9_.-]*'|"[A-Za-z0-9_.-]*") *:(?: +|$)""")
_LONGEST_KEY = 128  # PyYAML takes 1024 characters
_PRINTABLE = re.compile(
    "[ -~\xa1-\u167f\u1681-\u1fff\u2030-\u205e\u3001-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]*"
)
_QUOTED = re.compile(r"""('(?:[^']|'')*'|"(?:[^"\\]|\\.)*")(?: +#.*)?""")
_SINGLE = re.compile(r"'(?:[^']|'')*'")
_DOUBLE = re.compile(r'"(?:[^"\\]|\\[\\"nt])*"')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", "t": "\t"}
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"), True),
    **dict.fromkeys(("false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"), False),
}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?[0-9]{1,300}\.[0-9]{0,300}([eE][-+][0-9]{1,9})?")
_NUMERIC = re.compile(  # what YAML 1.1 may take for a number, a date or a time: more than it does
    r"[-+]?[0-9][0-9_]*|[-+]?0[bB][01_]*|[-+]?0[xX][0-9a-fA-F_]*|[-+]?[0-9._]*\.[0-9_]*([eE][-+]?[0-9]*)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)|[-+]?[0-9][0-9_]*(:[0-9]+)+(\.[0-9_]*)?|[0-9]+-[0-9]+-[0-9]+([Tt ].*)?"
)
_ADDRESS = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+")
_FLOW = re.compile(r"[A-Za-z0-9_./-]+|'[^',]*'|\"[^\",\\]*\"")


class _YamlLine(NamedTuple):
    number: int
    indent: int
    text: str


def decode_plain(text: str, path: str) -> dict[str, Any]:
    """Return the keys and values of a document.

    Args:
        text: the document.
        path: for errors.

    Raises:
        ConfigError: it is malformed, or uses what this reader does not know; the message has line and column, and names
            the extra that reads all of YAML.
    """
    lines = list(_lines(text, path))
    values, end = _mapping(lines, 0, 0, path, 1)
    if end < len(lines):
        raise _refused("the indentation fits no line above", path, lines[end])
    return values


def malformed(reason: str, path: str, line: int, column: int, fix: str = "") -> ConfigError:
    """Make the error of a document, with its place."""
    return ConfigError("malformed YAML", got=reason, where=f"{path}, line {line}, column {column}", fix=fix)


def _lines(text: str, path: str) -> Iterator[_YamlLine]:
    for number, raw in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        body = raw.lstrip(" ")
        line = _YamlLine(number, len(raw) - len(body), body.rstrip(" "))
        if line.text.startswith("\t"):
            raise _refused("a tab in the indentation", path, line)
        if not _PRINTABLE.fullmatch(line.text):
            raise _refused("a tab, or another character that is not printed", path, line)
        if line.text and not line.text.startswith("#") and (number, raw.rstrip(" ")) != (1, "---"):
            yield line


def _mapping(lines: list[_YamlLine], at: int, indent: int, path: str, depth: int) -> tuple[dict[str, Any], int]:
    values: dict[str, Any] = {}
    while at < len(lines) and lines[at].indent == indent and not lines[at].text.startswith("- "):
        line = lines[at]
        found = _KEY.match(line.text)
        if not found or depth > MOST_DEPTH:
            raise _refused("nested too deeply" if found else "expected `key: value`", path, line)
        key = found[1].strip("'\"")
        rest = line.text[found.end() :]
        if found[1] in _WORDS or len(key) > _LONGEST_KEY:
            raise _refused(f"{found[1][:_LONGEST_KEY]} is no plain key", path, line)
        value, at = _value(lines, at, rest, found.end(), path, depth)
        if key in values and repr(values[key]) != repr(value):
            raise _refused(f"{key} stands twice, with different values", path, line)
        values[key] = value
    return values, at


def _value(lines: list[_YamlLine], at: int, rest: str, offset: int, path: str, depth: int) -> tuple[Any, int]:
    """Return the value of a key, on its line or nested below it, and the line after it."""
    line = lines[at]
    text = _uncommented(rest)
    if text:
        return _scalar(text, path, line, offset), at + 1
    at += 1
    if at < len(lines) and lines[at].indent >= line.indent and lines[at].text.startswith("- "):
        return _list(lines, at, lines[at].indent, path)
    if at < len(lines) and lines[at].indent > line.indent:
        return _mapping(lines, at, lines[at].indent, path, depth + 1)
    return None, at


def _list(lines: list[_YamlLine], at: int, indent: int, path: str) -> tuple[list[Any], int]:
    values: list[Any] = []
    while at < len(lines) and lines[at].indent == indent and lines[at].text.startswith("- "):
        values.append(_scalar(_uncommented(lines[at].text[2:].strip(" ")), path, lines[at], 2))
        at += 1
    return values, at


def _uncommented(text: str) -> str:
    quoted = _QUOTED.fullmatch(text)
    return quoted[1] if quoted else re.sub(r"(^| )#.*", "", text).strip(" ")


def _scalar(text: str, path: str, line: _YamlLine, offset: int) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if text in ("{}", "[]"):
        return {} if text == "{}" else []
    if text[0] in "'\"":
        return _quoted(text, path, line, offset)
    if text[0] == "[" and text[-1] == "]":
        parts = [part.strip(" ") for part in text[1:-1].split(",")]
        if all(_FLOW.fullmatch(part) for part in parts):
            return [_scalar(part, path, line, offset) for part in parts]
    if text[0] in "-?:,[]{}#&*!|>%@`=<" and not _INTEGER.fullmatch(text) and not _FLOAT.fullmatch(text):
        raise _refused(f"{text!r} is more than a plain value", path, line, offset)
    if re.search(r":( |$)", text):
        raise _refused(f"{text!r} is more than a plain value", path, line, offset)
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _NUMERIC.fullmatch(text) and not _ADDRESS.fullmatch(text):
        raise _refused(f"{text!r} may be a number of another kind, or a date", path, line, offset)
    return text


def _quoted(text: str, path: str, line: _YamlLine, offset: int) -> str:
    if _SINGLE.fullmatch(text):
        return text[1:-1].replace("''", "'")
    if _DOUBLE.fullmatch(text):
        return _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[1]), text[1:-1])
    raise _refused("a string that does not end, or has escapes", path, line, offset)


def _refused(reason: str, path: str, line: _YamlLine, offset: int = 0) -> ConfigError:
    fix = "If it is YAML all the same, run `pip install 'accel[yaml]'`: without PyYAML, only plain values are read."
    return malformed(reason, path, line.number, line.indent + offset + 1, fix)
