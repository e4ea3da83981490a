# SPDX-License-Identifier: Apache-2.0
"""Errors as values, so that a test compares those of several ranks; and errors by their fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from accel.errors import AccelError

Raised = TypeVar("Raised", bound=AccelError)


def caught(function: Callable[..., object], *args: object) -> BaseException | None:
    """Call a function; return its error, None if it raised none."""
    try:
        function(*args)
    except Exception as error:
        return error
    return None


def assert_fields(error: AccelError, **fields: str) -> None:
    """Compare an error's fields `problem`, `expected`, `got`, `where` and `fix` with these patterns."""
    found = {name: str(getattr(error, name)) for name in fields}
    assert not [name for name in fields if not re.search(fields[name], found[name])], f"of {fields}, got {found}"


@contextmanager
def assert_raises(kind: type[Raised], **fields: str) -> Generator[pytest.ExceptionInfo[Raised]]:
    """Expect an error in the block, with fields that match these patterns."""
    with pytest.raises(kind) as info:
        yield info
    assert_fields(info.value, **fields)
