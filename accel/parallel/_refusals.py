# SPDX-License-Identifier: Apache-2.0
"""Several checks whose errors are told at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from accel.errors import AccelError, PrepareError


def check_all(checks: Iterable[Callable[[], object]], problem: str, where: str) -> None:
    """Call every check, and raise what they refuse. No communication.

    Args:
        checks: each raises an `AccelError` or nothing.
        problem: of the error, where several refuse.
        where: place of that error.

    Raises:
        AccelError: the error of the only check that refuses; a `PrepareError` that lists those of several.
    """
    refusals: list[AccelError] = []
    for check in checks:
        try:
            _ = check()
        except AccelError as error:
            refusals.append(error)
    if len(refusals) == 1:
        raise refusals[0]
    if refusals:
        raise PrepareError(problem, got="".join(f"\n- {error}" for error in refusals), where=where)
