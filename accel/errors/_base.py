# SPDX-License-Identifier: Apache-2.0
"""The base of all errors, and errors as plain values, which carry them across ranks and processes."""

from __future__ import annotations

import msgspec


def escaped(text: str) -> str:
    """Return a text of lines with escapes for all other characters that terminals act on."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


class AccelError(Exception):
    """Base of all errors of `accel`.

    Args:
        problem: one clause without a full stop.
        expected: the expected value.
        got: the actual value.
        where: the field, leaf path, file or call.
        fix: the line to write or the step to take, one sentence.
    """

    __module__ = "accel.errors"  # where users import it from, and what a traceback prints

    def __init__(self, problem: str, *, expected: str = "", got: str = "", where: str = "", fix: str = "") -> None:
        super().__init__(problem, expected, got, where, fix)
        self.problem = problem
        self.expected = expected
        self.got = got
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        facts = [f"expected {self.expected}"] if self.expected else []
        facts += [f"got {self.got}"] if self.got else []
        text = f"{self.problem}: {', '.join(facts)}" if facts else self.problem
        text += f" - at {self.where}" if self.where else ""
        return f"{text}. {self.fix}" if self.fix else text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return rebuild, (describe(self),)


class ErrorRecord(msgspec.Struct, frozen=True):
    """An error as plain values: the class's name and its fields."""

    kind: str
    problem: str
    expected: str = ""
    got: str = ""
    where: str = ""
    fix: str = ""


def describe(error: BaseException) -> ErrorRecord:
    """Convert an error to plain values; errors of other libraries become a `PeerError` that quotes them."""
    if isinstance(error, AccelError):
        return ErrorRecord(type(error).__name__, error.problem, error.expected, error.got, error.where, error.fix)
    return ErrorRecord("PeerError", f"{type(error).__name__}: {error}")


def rebuild(record: ErrorRecord) -> AccelError:
    """Convert the values of `describe` to the error; an unknown class becomes an `AccelError`."""
    classes = {cls.__name__: cls for cls in _subclasses(AccelError)}
    cls = classes.get(record.kind, AccelError)
    return cls(record.problem, expected=record.expected, got=record.got, where=record.where, fix=record.fix)


def _subclasses(cls: type[AccelError]) -> list[type[AccelError]]:
    return [cls, *(deeper for child in cls.__subclasses__() for deeper in _subclasses(child))]
