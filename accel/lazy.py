# SPDX-License-Identifier: Apache-2.0
"""Public names of a package that are looked up on first use, so that importing it loads nothing that they need."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence


def exports(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """Return a package's `__getattr__`.

    Args:
        package: its full name.
        homes: the module inside of it that each name is from; the module's own name means the module.
    """

    def find(name: str) -> object:
        for home, names in homes.items():
            if name in names:
                module = importlib.import_module(f"{package}.{home}")
                found = module if name == home else getattr(module, name)
                setattr(sys.modules[package], name, found)  # later look-ups cost nothing
                return found
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
