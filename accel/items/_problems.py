# SPDX-License-Identifier: Apache-2.0
"""Everything in which a checkpoint and the objects that it is loaded into differ, told at once."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

import torch

from accel.errors import CheckpointError
from accel.storage import dtype_name

Facts = tuple[str, tuple[int, ...]]


@dataclass(slots=True)
class Problems:
    """A list that grows while one checkpoint is compared; empty means that it fits.

    Attributes:
        cast: whether another floating-point dtype fits, too.
    """

    cast: bool = False
    missing: list[str] = field(default_factory=list[str])
    unexpected: list[str] = field(default_factory=list[str])
    shapes: list[str] = field(default_factory=list[str])
    types: list[str] = field(default_factory=list[str])
    unasked: list[str] = field(default_factory=list[str])

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.shapes or self.types or self.unasked)

    def compare_names(self, live: Set[str], stored: Set[str], prefix: str) -> None:
        """Note the names that only one side has."""
        self.missing += [prefix + name for name in live - stored]
        self.unexpected += [prefix + name for name in stored - live]

    def compare_tensor(self, name: str, live: Facts, stored: Facts) -> bool:
        """Note a difference in shape or dtype; return whether there is none."""
        same = live[0] == stored[0] or (self.cast and is_floating(live[0]) and is_floating(stored[0]))
        if live[1] != stored[1]:
            self.shapes.append(f"{name}: expected {list(live[1])}, got {list(stored[1])}")
        if not same:
            self.types.append(f"{name}: expected {live[0]}, got {stored[0]}")
        return same and live[1] == stored[1]

    def wrong_type(self, name: str, expected: str, got: str) -> None:
        """Note a difference in kind."""
        self.types.append(f"{name}: expected {expected}, got {got}")

    def add(self, other: Problems) -> None:
        """Take over another list."""
        for mine, theirs in zip(self._parts().values(), other._parts().values(), strict=True):
            mine += theirs

    def lines(self) -> tuple[str, ...]:
        """Return each difference as a line of its own."""
        return tuple(f"{title}: {line}" for title, part in self._parts().items() for line in sorted(part))

    def error(self, path: object) -> CheckpointError:
        """Make the error that lists them all."""
        parts = self._parts()
        lines = [f"\n  {title}:" + "".join(f"\n    {line}" for line in sorted(p)) for title, p in parts.items() if p]
        leave = ", ".join(f"{name}=None" for name in sorted(self.unasked))
        return CheckpointError(
            "the checkpoint does not fit the objects passed; nothing has been changed" + "".join(lines) + "\n ",
            where=str(path),
            fix="Pass what was saved, built the same way, or strict=False to load what fits; cast=True converts dtypes."
            + (f" To leave an item in the file, pass None for it: dict(items, {leave})." if leave else ""),
        )

    def _parts(self) -> dict[str, list[str]]:
        return {
            "missing in the checkpoint": self.missing,
            "in the checkpoint, but not in what was passed": self.unexpected,
            "of another shape (expected: the live one)": self.shapes,
            "of another type (expected: the live one)": self.types,
            "items of the checkpoint that were not asked for": self.unasked,
        }


def is_floating(dtype: str) -> bool:
    """Whether a dtype's name is one of real floating-point numbers."""
    found = getattr(torch, dtype, None)
    return isinstance(found, torch.dtype) and found.is_floating_point


def facts(tensor: torch.Tensor) -> Facts:
    """Return a tensor's dtype and shape."""
    return dtype_name(tensor.dtype), tuple(tensor.shape)
