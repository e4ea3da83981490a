# SPDX-License-Identifier: Apache-2.0
"""Errors as values, so that a test compares those of several ranks."""

from __future__ import annotations

from collections.abc import Callable


def caught(function: Callable[..., object], *args: object) -> BaseException | None:
    """Call a function; return its error, None if it raised none."""
    try:
        function(*args)
    except Exception as error:
        return error
    return None
