# SPDX-License-Identifier: Apache-2.0
"""Classes put before an object's own class, so that it behaves otherwise under its own name, also after pickling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, cast


class Fronted:
    """A class, and the one that stands before it.

    Objects of one class stay of one class: copies keep it, and what one pickle holds of it is unpickled once.

    Attributes:
        made: the class that objects get.
    """

    def __init__(self, front: type, own: type | Fronted, settings: Mapping[str, object]) -> None:
        behind = own.made if isinstance(own, Fronted) else own
        names = {"__module__": behind.__module__, "__qualname__": behind.__qualname__}
        self._parts = front, own, dict(settings)
        self.made: type[Any] = type(behind.__name__, (front, behind), {**names, **settings, "_accel_fronted": self})

    @classmethod
    def before(cls, own: type, front: type, **settings: object) -> Fronted:
        """Put a class with settings before another one, which may have such a front already."""
        return cls(front, vars(own).get("_accel_fronted", own), settings)

    @property
    def bare(self) -> type[Any]:
        """The class behind all fronts."""
        own = self._parts[1]
        return own.bare if isinstance(own, Fronted) else own

    def __reduce__(self) -> tuple[Any, ...]:
        return Fronted, self._parts

    def __deepcopy__(self, memo: object) -> Self:
        return self


class Front:
    """Base of what is put before a class: objects are pickled by their own class and the fronts before it."""

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        kind = type(self)
        fronted = vars(kind).get("_accel_fronted")
        if not isinstance(fronted, Fronted):
            return super().__reduce_ex__(protocol)
        reduced = cast("Any", fronted.bare).__reduce_ex__(self, max(protocol, 2))
        if isinstance(reduced, str):
            return reduced
        make, given, *rest = cast("tuple[Any, ...]", reduced)
        make, *given = (fronted.bare if each is kind else each for each in (make, *given))
        return _restored, (fronted, make, tuple(given)), *rest


def _restored(fronted: Fronted, make: Any, given: tuple[Any, ...]) -> object:
    made = make(*given)
    made.__class__ = fronted.made
    return made
