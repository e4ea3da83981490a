# SPDX-License-Identifier: Apache-2.0
"""Names and shapes of a model beside those of its weights: all differences, with what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, cast

from accel.errors import CheckpointError, ConfigError

_MOST_LINES = 20  # of each kind in an error
_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")

Patterns = str | Iterable[str]


class Facts(NamedTuple):
    """A tensor as a model or a file has it.

    Attributes:
        names: its names, several of a tied one.
        dtype: safetensors' name.
        shape: its sizes.
        where: the file; "" for a model.
    """

    names: Sequence[str]
    dtype: str
    shape: tuple[int, ...]
    where: str = ""


class Match(NamedTuple):
    """Weights found for a model.

    Attributes:
        found: stored names of each of the model's tensors, in its order; none of a missing one that is allowed.
        unused: stored names that nothing takes.
        problems: differences, a line each, without unused names.
        missing: names of the model that no weight has.
    """

    found: list[tuple[str, ...]]
    unused: list[str]
    problems: list[str]
    missing: list[str]


def match(model: Sequence[Facts], stored: Mapping[str, Facts], allow_missing: Patterns) -> Match:
    """Find the weights of a model's tensors.

    Args:
        model: its tensors.
        stored: weights by name.
        allow_missing: patterns of names of the model that may be missing, as of `fnmatch`.

    Raises:
        ConfigError: no patterns.
    """
    may_miss = _patterns(allow_missing, "allow_missing=")
    found: list[tuple[str, ...]] = []
    problems: list[str] = []
    missing: list[str] = []
    used: set[str] = set()
    for facts in model:
        names = tuple(name for name in facts.names if name in stored)
        used |= set(names)
        if not names and not all(_allowed(name, may_miss) for name in facts.names):
            missing.append(facts.names[0])
        fitting: list[str] = []
        for name in names:
            problem = _difference(name, facts, stored[name])
            problems += [problem] if problem else []
            fitting += [] if problem else [name]
        found.append(tuple(fitting))
    unused = [name for name in stored if name not in used]
    facts_of = {facts.names[0]: facts for facts in model}
    near = [_missing(facts_of[name], unused) for name in missing[:_MOST_LINES]]
    return Match(found, unused, _shortened(near, len(missing), "missing") + _cut(problems), missing)


def refusal(
    matched: Match, unused: Sequence[str], stored: Mapping[str, Facts], allow_unexpected: Patterns, where: str
) -> CheckpointError | None:
    """Make the error that lists all differences; None if the weights fit.

    Args:
        matched: result of `match`.
        unused: stored names that no rank takes.
        stored: weights by name.
        allow_unexpected: patterns of stored names that nothing has to take.
        where: place of the weights.

    Raises:
        ConfigError: no patterns.
    """
    allowed = _patterns(allow_unexpected, "allow_unexpected=")
    odd = [name for name in unused if not _allowed(name, allowed)]
    lines = [f"unexpected {name!r} {list(stored[name].shape)} in {stored[name].where}" for name in odd[:_MOST_LINES]]
    lines = matched.problems + _shortened(lines, len(odd), "unexpected")
    if not lines:
        return None
    return CheckpointError(
        "the weights do not fit the model; nothing has been changed" + "".join(f"\n  {line}" for line in lines) + "\n ",
        where=where,
        fix="Map names by rename=; allow_missing= and allow_unexpected= take names and patterns such as 'lm_head.*'.",
    )


def _difference(name: str, model: Facts, stored: Facts) -> str:
    if stored.shape != model.shape:
        return f"{name!r}: expected shape {list(model.shape)}, got {list(stored.shape)} in {stored.where}"
    if stored.dtype != model.dtype and not (stored.dtype in _FLOATS and model.dtype in _FLOATS):
        return f"{name!r}: expected {model.dtype}, got {stored.dtype} in {stored.where}"
    return ""


def _missing(facts: Facts, unused: Sequence[str]) -> str:
    near = next((each for name in facts.names for each in difflib.get_close_matches(name, unused, 1)), "")
    tied = f", tied to {', '.join(facts.names[1:])}" if len(facts.names) > 1 else ""
    return f"missing {facts.names[0]!r} {list(facts.shape)}{tied}" + (f"; did you mean {near!r}?" if near else "")


def _shortened(lines: list[str], count: int, kind: str) -> list[str]:
    return lines + ([f"and {count - len(lines)} more {kind}"] if count > len(lines) else [])


def _cut(lines: list[str]) -> list[str]:
    return _shortened(lines[:_MOST_LINES], len(lines), "that differ")


def _allowed(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, each) for each in patterns)


def _patterns(given: object, where: str) -> tuple[str, ...]:
    """Return names and patterns as a tuple.

    Raises:
        ConfigError: neither a text nor several.
    """
    listed: tuple[object, ...] = (given,)
    if isinstance(given, Iterable) and not isinstance(given, str):
        listed = tuple(cast("Iterable[object]", given))
    names = tuple(each for each in listed if isinstance(each, str))
    if len(names) < len(listed):
        raise ConfigError(
            "not names",
            expected="a name or pattern, or several",
            got=", ".join(map(repr, listed)),
            where=where,
            fix='"*" allows all.',
        )
    return names
