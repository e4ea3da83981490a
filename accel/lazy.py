# SPDX-License-Identifier: Apache-2.0
"""Public names of a package that are looked up on first use, so that importing it loads nothing that they need."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import cast


def declared() -> dict[str, str]:
    """Return the modules of the names that a package imports for type checkers alone, by name.

    A package calls it behind `if TYPE_CHECKING:`. Those imports never run, but its compiled code has them.
    """
    import dis

    found: dict[str, str] = {}
    names: object = None  # of the import that follows
    for each in dis.get_instructions(sys._getframe(1).f_code):  # pyright: ignore[reportPrivateUsage]
        if each.opname == "IMPORT_NAME" and isinstance(names, tuple):
            found |= dict.fromkeys(cast("tuple[str, ...]", names), str(each.argval))
        if each.opname != "EXTENDED_ARG":
            names = each.argval
    return {name: home for name, home in found.items() if home.startswith("accel") and home != __name__}


def exports(
    package: str, homes: Mapping[str, str], others: Mapping[str, str] | None = None, modules: Sequence[str] = ()
) -> Callable[[str], object]:
    """Return a package's `__getattr__`, for names with their modules, as in `declared`.

    A name of the package itself is a module in it. `others` maps names from elsewhere to the sentence with ours.
    `modules` are the public ones in the package: the error of a name that one of them has names the place.
    """

    def find(name: str) -> object:
        if (home := homes.get(name)) is not None:
            is_module = home == package
            found = importlib.import_module(f"{package}.{name}" if is_module else home)
            found = found if is_module else getattr(found, name)
            setattr(sys.modules[package], name, found)  # later look-ups cost nothing
            return found

        def fix() -> str:
            return (others or {}).get(name) or _place(package, name, modules) or _nearest(name, homes)

        if _is_imported(sys._getframe(1)) and (found := fix()):  # pyright: ignore[reportPrivateUsage]
            raise ImportError(f"cannot import name {name!r} from {package!r}. {found}", name=package)
        raise _MissingNameError(f"module {package!r} has no attribute {name!r}", fix)

    return find


class _MissingNameError(AttributeError):
    """A name that a package lacks. The fix, which reads sources, is made with the text: an import of a module in the
    package asks for the name first, and drops this error."""

    def __init__(self, problem: str, fix: Callable[[], str]) -> None:
        super().__init__(problem)
        self._fix = fix

    def __str__(self) -> str:
        problem = super().__str__()
        fix = self._fix()
        return f"{problem}. {fix}" if fix else problem


def _place(package: str, name: str, modules: Sequence[str]) -> str:
    """Return the sentence with the module that has a public name, by the sources; empty if there is none."""
    if name.startswith("_"):  # which tools look up
        return ""
    from pathlib import Path

    root = Path(sys.modules[package].__path__[0])
    for module in modules:
        file = root / f"{module.replace('.', '/')}.py"
        file = file if file.exists() else file.with_suffix("") / "__init__.py"
        try:
            source = file.read_text(encoding="utf-8")
        except OSError:  # installed without sources, or in an archive
            return ""
        if name in source and name in _listed(source):  # most sources need no parse
            return f"Use {package}.{module}.{name}."
    return ""


def _listed(source: str) -> set[str]:
    """Return the names in the `__all__` of a module, and without one those that it imports under their names."""
    import ast

    tree = ast.parse(source)
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            found = {str(each.value) for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
    if found:
        return found
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {each.name for node in imports for each in node.names if each.asname == each.name}


def _nearest(name: str, homes: Mapping[str, str]) -> str:
    """Return "Did you mean `x`?" for a misspelt name; empty for a private one, which tools look up."""
    if name.startswith("_"):
        return ""
    import difflib

    close = difflib.get_close_matches(name, homes, n=1, cutoff=0.75)
    return f"Did you mean `{close[0]}`?" if close else ""


def _is_imported(caller: FrameType) -> bool:
    """Whether a name is looked up by `from package import name`, which replaces the text of an AttributeError."""
    import opcode

    return opcode.opname[caller.f_code.co_code[caller.f_lasti]] == "IMPORT_FROM"
