# SPDX-License-Identifier: Apache-2.0
"""Kinds of containers that trees do not know by themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec


class Container(msgspec.Struct, frozen=True):
    """Describes one more kind of container, subclasses included.

    Attributes:
        kind: the class.
        take_apart: maps a value to its children by name; equal structures give equal names in equal order.
        put_together: maps a value and its new children by name to the new value, of the same class.

    >>> from collections import deque
    >>> Container(deque, lambda old: dict(enumerate(old)), lambda old, new: deque(new.values(), old.maxlen)).kind
    <class 'collections.deque'>
    """

    kind: type[Any]
    take_apart: Callable[[Any], Mapping[Any, object]]
    put_together: Callable[[Any, dict[Any, Any]], object]


Containers = Sequence[Container]
