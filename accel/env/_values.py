# SPDX-License-Identifier: Apache-2.0
"""Variables as numbers, or an error that names them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from accel.errors import EnvError


def integer(
    environ: Mapping[str, str],
    name: str,
    *,
    least: int = 0,
    most: int | None = None,
    default: int | None = None,
    beside: Iterable[str] = (),
) -> int:
    """Return the integer that a variable holds.

    Args:
        environ: variable names to values.
        name: the variable.
        least, most: accepted range.
        default: value of a variable that is not set; None if it must be.
        beside: variables that it belongs to, for the message.

    Raises:
        EnvError: it is missing, or holds something else.
    """
    text = environ.get(name)
    if text is None:
        if default is not None:
            return default
        present = sorted(set(beside) & environ.keys())
        raise EnvError(
            "the launcher's variables are incomplete",
            expected=name,
            got=f"{', '.join(present)} without it",
            where="the environment",
            fix=f"Start the script with `accel launch` or `torchrun`, or unset {', '.join(present)}.",
        )
    digits = text.strip()
    value = int(digits) if digits.isdecimal() and len(digits) <= 20 else -1  # int() refuses thousands of digits
    if value < least or (most is not None and value > most):
        raise EnvError(
            "a variable does not hold a usable integer",
            expected=f"an integer of at least {least}" + (f" and at most {most}" if most is not None else ""),
            got=repr(text),
            where=name,
            fix=f"Correct {name}, or let `accel launch` set it.",
        )
    return value


def below(name: str, value: int, bound_name: str, bound: int) -> None:
    """Refuse a position that is not below the number of positions.

    Raises:
        EnvError: so it is.
    """
    if value >= bound:
        raise EnvError(
            "the environment contradicts itself",
            expected=f"{name} below {bound_name}={bound}",
            got=f"{name}={value}",
            where="the environment",
            fix="Two launchers may have set variables; start from a clean environment.",
        )
