# SPDX-License-Identifier: Apache-2.0
"""Tests of tables: one test that looks at all rows, and lists each one that fails."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
O = TypeVar("O")  # noqa: E741


def in_turn(items: Sequence[T], *options: O, begin: int = 0) -> list[tuple[T, O]]:
    """Pair each item with one of the options, in turn: each item comes once, and each option about equally often."""
    return [(each, options[(at + begin) % len(options)]) for at, each in enumerate(items)]


def rows(names: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test for each row, as `pytest.mark.parametrize` does, within one test; other arguments are fixtures.

    Each row stands alone: the test is skipped if all rows are.

    Args:
        names: the arguments that a row gives, with commas between them.
        values: the rows; tuples if there are several names.
    """
    given = [each.strip() for each in names.split(",")]

    def decorated(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            wrong: list[str] = []
            skipped: list[str] = []
            count = 0
            for row in values if len(given) > 1 else ((each,) for each in values):
                count += 1
                try:
                    test(**dict(zip(given, row, strict=True)), **fixtures)
                except pytest.skip.Exception as reason:
                    skipped.append(str(reason))
                except (Exception, pytest.fail.Exception) as error:
                    wrong.append(f"{row if len(row) > 1 else row[0]!r}: {type(error).__name__}: {error}")
            assert count, "the table is empty"
            assert not wrong, f"{len(wrong)} of {count} rows:\n" + "\n".join(wrong)
            if len(skipped) == count:
                pytest.skip("; ".join(dict.fromkeys(skipped)))

        signature = inspect.signature(test)
        left = [each for name, each in signature.parameters.items() if name not in given]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorated
