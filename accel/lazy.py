# SPDX-License-Identifier: Apache-2.0
"""Public names of a package that are looked up on first use, so that importing it loads nothing that they need."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType


def exports(
    package: str, homes: Mapping[str, Sequence[str]], others: Mapping[str, str] | None = None
) -> Callable[[str], object]:
    """Return a package's `__getattr__`, for names by home module, inside of it or by its full name.

    The home named as the name means the module. `others` maps names from elsewhere to the sentence with ours.
    """

    def find(name: str) -> object:
        for home, names in homes.items():
            if name in names:
                module = importlib.import_module(home if home.startswith("accel.") else f"{package}.{home}")
                found = module if name == home else getattr(module, name)
                setattr(sys.modules[package], name, found)  # later look-ups cost nothing
                return found
        fix = (others or {}).get(name) or _nearest(name, homes)
        if fix and _is_imported(sys._getframe(1)):  # pyright: ignore[reportPrivateUsage]
            raise ImportError(f"cannot import name {name!r} from {package!r}. {fix}", name=package)
        raise AttributeError(f"module {package!r} has no attribute {name!r}" + (f". {fix}" if fix else ""))

    return find


def _nearest(name: str, homes: Mapping[str, Sequence[str]]) -> str:
    """Return "Did you mean `x`?" for a misspelt name; empty for a private one, which tools look up."""
    if name.startswith("_"):
        return ""
    import difflib

    close = difflib.get_close_matches(name, [each for names in homes.values() for each in names], n=1, cutoff=0.75)
    return f"Did you mean `{close[0]}`?" if close else ""


def _is_imported(caller: FrameType) -> bool:
    """Whether a name is looked up by `from package import name`, which replaces the text of an AttributeError."""
    import opcode

    return opcode.opname[caller.f_code.co_code[caller.f_lasti]] == "IMPORT_FROM"
