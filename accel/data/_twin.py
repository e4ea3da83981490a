# SPDX-License-Identifier: Apache-2.0
"""Another object of the same attributes as a user's dataset."""

from __future__ import annotations

from typing import Any, cast


def twin(source: Any) -> Any:
    """Return another object of the same attributes, so that an epoch or a position set on it leaves the user's alone.

    `copy.copy` would not do: classes that give their own `__dict__` as what is pickled share it with their copies.
    """
    kind = cast(Any, type(source))
    if hasattr(kind, "__del__"):  # which may close what both hold
        return source
    try:
        other = kind.__new__(kind)
        other.__dict__.update(source.__dict__)
    except (TypeError, AttributeError):  # not made of attributes: it is read itself
        return source
    return other
