# SPDX-License-Identifier: Apache-2.0
"""Checks of choices and names, which report the closest valid one; errors of objects that cannot be sent, and of
disks."""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import os
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from types import UnionType
from typing import Any, cast

import msgspec

from accel.errors import AccelError, CheckpointError, ConfigError, EnvError, MissingExtraError


def not_pickled(obj: object, error: Exception, where: str, parts: str) -> ConfigError:
    """Make the error for an object that raised `error` in `__reduce__`; `parts` names values to send in its place."""
    return ConfigError(
        "the object cannot be pickled",
        got=f"{type(obj).__name__}: {error}",
        where=where,
        fix=f"Send what it is made of: {parts}.",
    )


def not_unpickled(error: Exception, where: str) -> ConfigError:
    """Make the error for an object that cannot be unpickled here, from the error of its `__setstate__`."""
    prepared = "process group" in str(error)  # DDP's, where no rank runs
    return ConfigError(
        "the object cannot be unpickled here",
        got=f"{type(error).__name__}: {error}",
        where=where,
        fix="Send accel.unwrap_model(model) in place of a prepared model."
        if prepared
        else "Let every rank be able to import its class.",
    )


ACCEL_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = (os.path.dirname(os.__file__) + os.sep, ACCEL_FOLDER)


def is_users(file: str) -> bool:
    """Return whether a source file is the user's: not this package, an installed one or Python's."""
    installed = not {"site-packages", "dist-packages"}.isdisjoint(file.split(os.sep))
    return not (installed or file.startswith(("<", *_LIBRARIES)))


# "a one", "a European", "a unit" and "a user" begin with a consonant
_VOWEL = re.compile(r"(?!one|eu|uni(?!n)|us)[aeiou]", re.I)
_SPELT = re.compile(r"[FHLMNRSX](?=[A-Z])")  # "an SGD", "an LSTM": letters said by their names


def with_article(noun: str) -> str:
    """Return a noun or the name of a class behind "a" or "an"."""
    return f"an {noun}" if _VOWEL.match(noun) or _SPELT.match(noun) else f"a {noun}"


def import_extra(module: str, user: str, *, extra: str, where: str, otherwise: str = "") -> Any:
    """Import a package that an extra installs, for a `user` that needs it.

    If it does not import, raise `MissingExtraError` with the line that installs it, and another way, if there is one.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError, OSError) as error:  # OSError: built for another system or another torch
        raise MissingExtraError(
            f"{user} needs a package that does not import",
            expected=module,
            got=f"{type(error).__name__}: {error}",
            where=where,
            fix=f"Run `pip install 'accel-torch[{extra}]'`{otherwise}.",
        ) from error


def did_you_mean(name: str, valid: Iterable[str], otherwise: str = "") -> str:
    """Return "Did you mean `x`?" with the closest valid name; else another advice, or the list of valid names."""
    names = sorted(valid)
    return _nearest(name, names) or otherwise or f"Choose one of {', '.join(names)}."


def nearest_metrics(name: str, valid: Iterable[str]) -> list[str]:
    """Return names of metrics that may be meant, such as "train/loss" for "loss": those with its last part, then the
    closest."""
    names = sorted(valid)
    ends = [each for each in names if each.rpartition("/")[2] == name.rpartition("/")[2]]
    return list(dict.fromkeys([*ends, *difflib.get_close_matches(name, names, n=3)]))[:3]


def check_choice(
    got: object,
    choices: Sequence[str],
    problem: str,
    *,
    where: str,
    fix: str = "",
    error: type[AccelError] = ConfigError,
) -> None:
    """Raise `error` unless a value is one of the choices, which it lists with a fix or the closest name."""
    if got not in choices:
        raise error(
            problem,
            expected=f"one of {', '.join(choices)}",
            got=repr(got),
            where=where,
            fix=fix or _nearest(str(got), choices),
        )


def check_kinds(record: object, types: Mapping[str, object], expected: Mapping[str, str], *, where: str) -> None:
    """Raise `ConfigError` for a field in `expected` with a value that is not of its type, as "yes" is no bool."""
    for name, kind in expected.items():
        value = getattr(record, name)
        try:
            _ = msgspec.convert(value, types[name])
        except msgspec.ValidationError as error:
            problem = "the value does not fit the field"
            raise ConfigError(problem, expected=kind, got=repr(value), where=f"{where}.{name}") from error


def check_styles(styles: object, known: Sequence[str], *, where: str) -> None:
    """Raise `ConfigError` for what is no mapping, and for all styles of it that are unknown."""
    if isinstance(styles, Mapping):
        given = cast("Mapping[str, object]", styles)
        wrong = {pattern: style for pattern, style in given.items() if style not in known}
        if wrong:
            hints = [hint for style in wrong.values() if (hint := did_you_mean(str(style), known))]
            raise ConfigError(
                "unknown styles of a plan",
                expected=f"one of {', '.join(known)}",
                got=", ".join(f"{pattern}: {style!r}" for pattern, style in wrong.items()),
                where=where,
                fix=" ".join(dict.fromkeys(hints)),
            )
    elif styles != "model":
        raise ConfigError(
            "the styles of the plan are not valid",
            expected='styles by pattern, or "model"',
            got=repr(styles),
            where=where,
        )


def check_count(
    value: object,
    problem: str,
    *,
    least: int = 1,
    most: int | None = None,
    expected: str = "",
    where: str,
    error: type[AccelError] = ConfigError,
) -> None:
    """Raise `error` unless a value is an integer from `least` to `most`; True is none."""
    if type(value) is not int or value < least or (most is not None and value > most):
        end = "" if most is None else f" to {most}"
        raise error(problem, expected=expected or f"an integer from {least}{end}", got=repr(value), where=where)


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


def check_arguments(problems: Mapping[str, object], *, where: str) -> None:
    """Raise one `ConfigError` with all problems that hold, by texts such as "nproc=0, expected at least 1"."""
    if found := [text for text, holds in problems.items() if holds]:
        raise ConfigError("arguments outside their range", got="; ".join(found), where=where)


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


@contextlib.contextmanager
def disk_errors(path: object) -> Generator[None]:
    """Turn an operating system's error in the block into a `CheckpointError` with its text and the path."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'OSError')})",
            where=str(path),
            fix=_advice(error.errno),
        ) from error


def _advice(number: int | None) -> str:
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "Free space or choose another `out`; older checkpoints are untouched."
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Choose an `out` that this process may write to."
    if number in (errno.ENOENT, errno.ENOTDIR):
        return "Check the path: it must be on a file system that every node shares."
    return "See the system's log; older checkpoints are untouched."


def _nearest(name: str, names: Sequence[str]) -> str:
    folded = {known.casefold(): known for known in names}
    close = [folded[near] for near in difflib.get_close_matches(name.casefold(), folded, n=1)]
    return f"Did you mean `{close[0]}`?" if close else ""
