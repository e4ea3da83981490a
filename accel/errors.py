# SPDX-License-Identifier: Apache-2.0
"""The error tree: every error reports the expected value, the actual one, the place, and the way out.

All errors derive from `AccelError`, with these facts as fields for programs. `describe` and `rebuild` carry an error
across ranks, so that all of them raise the same one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from types import UnionType

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
        fix: the way out, one sentence.
    """

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


class EnvError(AccelError, ValueError):
    """The environment contradicts itself, or a variable has an invalid value."""


class ConfigError(AccelError, ValueError):
    """An argument is outside its range, or has no effect where it was given."""


class PlacementError(ConfigError):
    """A model does not fit into the memory that a device map may use; nothing has been read."""


class TreeError(AccelError, TypeError):
    """A nested value holds a container of an unknown kind."""


class ContextClosedError(AccelError, RuntimeError):
    """A context was used after the end of its scope."""


class DeviceError(AccelError, RuntimeError):
    """A device is missing, or a value is on another device than the context's."""


class PrepareError(AccelError, ValueError):
    """Objects passed to `prepare` do not fit together."""


class DataError(AccelError, ValueError):
    """A loader, cursor or batch cannot be used as asked."""


class StepError(AccelError, RuntimeError):
    """The calls of a training step came in an order that would lose or double gradients."""


class StageError(AccelError, RuntimeError):
    """A stage of a pipeline failed, or the model cannot run as stages; stage, micro-batch and rank are named."""


class NonFiniteError(AccelError, FloatingPointError):
    """A gradient holds inf or NaN; parameters have not been changed."""


class CheckpointError(AccelError, RuntimeError):
    """A checkpoint cannot be written, is damaged, or does not fit; nothing has changed unless the message reports it.

    Its text escapes characters that terminals act on, as names from files may hold them; its fields do not.
    """

    def __str__(self) -> str:
        return escaped(super().__str__())


class TrackerError(AccelError, RuntimeError):
    """A tracker lost records, and the trackers are strict; every rank raises this."""


class StreamError(AccelError, RuntimeError):
    """A weight that is not in memory cannot be used as asked, or could not be fetched."""


class CollectiveMismatch(AccelError, RuntimeError):  # noqa: N818 - the name users know from DESIGN and from the reports
    """Ranks called different collectives, or one collective with mismatched values."""


class PeerError(AccelError, RuntimeError):
    """Another rank failed in a call that all ranks make together."""


class LaunchError(AccelError, RuntimeError):
    """A launch cannot start as asked."""


class OutOfMemoryError(AccelError, MemoryError):
    """A rank ran out of memory; every rank raises this."""


class MissingExtraError(AccelError, ImportError):
    """An optional package is missing; the message has the install line."""


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
    return ErrorRecord(PeerError.__name__, f"{type(error).__name__}: {error}")


def rebuild(record: ErrorRecord) -> AccelError:
    """Convert the values of `describe` to the error; an unknown class becomes an `AccelError`."""
    classes = {cls.__name__: cls for cls in _subclasses(AccelError)}
    cls = classes.get(record.kind, AccelError)
    return cls(record.problem, expected=record.expected, got=record.got, where=record.where, fix=record.fix)


def not_pickled(obj: object, error: Exception, where: str, parts: str) -> ConfigError:
    """Make the error for an object whose `__reduce__` raised `error`; `parts` names values to send in its place."""
    return ConfigError(
        "an object that cannot be pickled",
        got=f"{type(obj).__name__}: {error}",
        where=where,
        fix=f"Send what it is made of: {parts}.",
    )


def not_unpickled(error: Exception, where: str) -> ConfigError:
    """Make the error for an object that cannot be unpickled here, from the error of its own `__setstate__`."""
    prepared = "process group" in str(error)  # DDP's, where no rank runs
    return ConfigError(
        "an object that cannot be unpickled here",
        got=f"{type(error).__name__}: {error}",
        where=where,
        fix="Send accel.unwrap_model(model) in place of a prepared model."
        if prepared
        else "Let every rank be able to import its class.",
    )


def did_you_mean(name: str, valid: Iterable[str], otherwise: str = "") -> str:
    """Return "Did you mean `x`?" with the closest valid name; else another advice, or the list of valid names."""
    names = sorted(valid)
    return _nearest(name, names) or otherwise or f"Choose one of {', '.join(names)}."


def check_choice(
    got: object,
    choices: Sequence[str],
    problem: str,
    *,
    where: str,
    error: type[AccelError] = ConfigError,
    fix: str = "",
) -> None:
    """Raise `error` unless a value is one of the choices; the message lists them, with a fix or the closest name."""
    if got not in choices:
        raise error(
            problem,
            expected=f"one of {', '.join(choices)}",
            got=repr(got),
            where=where,
            fix=fix or _nearest(str(got), choices),
        )


def check_count(value: object, problem: str, *, least: int = 1, expected: str = "", where: str) -> None:
    """Raise `ConfigError` unless a value is an integer from `least`; True is none."""
    if type(value) is not int or value < least:
        raise ConfigError(problem, expected=expected or f"an integer from {least}", got=repr(value), where=where)


def check_kind(
    value: object,
    kind: type | UnionType,
    problem: str,
    *,
    expected: str = "",
    where: str = "",
    fix: str = "",
    error: type[AccelError] = ConfigError,
) -> None:
    """Raise `error` unless a value is of a kind; the message names the class that came."""
    if not isinstance(value, kind):
        raise error(problem, expected=expected, got=type(value).__name__, where=where, fix=fix)


def check_spelling(environ: Mapping[str, str], known: Sequence[str]) -> None:
    """Raise `EnvError` for a variable with nearly a known name; other names belong to other software."""
    for name in environ:
        if name.startswith("ACCEL_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            if near:
                raise EnvError(
                    "unknown setting",
                    got=f"{name}={environ[name]!r}",
                    where="the environment",
                    fix=f"Did you mean `{near[0]}`?",
                )


def _nearest(name: str, names: Sequence[str]) -> str:
    folded = {known.casefold(): known for known in names}
    close = [folded[near] for near in difflib.get_close_matches(name.casefold(), folded, n=1)]
    return f"Did you mean `{close[0]}`?" if close else ""


def _subclasses(cls: type[AccelError]) -> list[type[AccelError]]:
    return [cls, *(deeper for child in cls.__subclasses__() for deeper in _subclasses(child))]
