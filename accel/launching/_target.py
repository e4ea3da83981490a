# SPDX-License-Identifier: Apache-2.0
"""The target of a launch, which every process runs, and checks that this machine can run it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Literal

import msgspec

from accel.errors import LaunchError, did_you_mean


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The target that every process runs.

    Attributes:
        kind: a Python script, a module as after `python -m`, or any program.
        name: the script's path, the module's dotted name, or the program.
        args: its own arguments, passed on unchanged.
    """

    kind: Literal["script", "module", "program"] = "script"
    name: str
    args: tuple[str, ...] = ()


def check_target(target: Target, environ: Mapping[str, str]) -> None:
    """Refuse a target that no process could run.

    Args:
        target: target of the launch.
        environ: environment of the launch.

    Raises:
        LaunchError: the target does not exist, or may not be read or executed.
    """
    if target.kind == "script":
        _check_script(target.name)
    elif target.kind == "module":
        _check_module(target.name)
    else:
        _check_program(target.name, environ)


def _check_script(script: str) -> None:
    path = Path(script)
    if path.is_file() and os.access(path, os.R_OK):
        return
    if path.is_dir():
        problem, got, fix = "the script is a folder", script, "Name the script inside it."
    elif path.exists():
        problem, got, fix = "the script cannot be read", script, "Check its type and permissions with `ls -l`."
    else:
        problem, got, fix = "there is no such script", script, _nearest(path)
    raise LaunchError(problem, expected="the path of a Python file", got=repr(got), where=os.getcwd(), fix=fix)


def _check_module(module: str) -> None:
    """Look a module up without importing its packages, which may take seconds and print."""
    places: list[str] | None = [os.getcwd(), *sys.path]
    spec = None
    for at, part in enumerate(parts := module.split(".")):
        name = ".".join(parts[: at + 1])
        spec = _find(name, places) if part and places is not None else None
        if spec is None:
            raise LaunchError(
                "there is no such module",
                expected="a module's dotted name",
                got=repr(module),
                where=os.getcwd(),
                fix="Leave `.py` out." if module.endswith(".py") else f"Python finds no `{name}`; check PYTHONPATH.",
            )
        found = spec.submodule_search_locations
        places = None if found is None else list(found)
    if places is not None and _find(f"{module}.__main__", places) is None:
        raise LaunchError(
            "the module is a package that cannot be run",
            expected="a package with `__main__.py`",
            got=repr(module),
            fix="Name a module inside it.",
        )


def _find(name: str, places: list[str]) -> ModuleSpec | None:
    """Ask all finders, those of editable installs too."""
    found = (finder.find_spec(name, places) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)


def _check_program(program: str, environ: Mapping[str, str]) -> None:
    if shutil.which(program, path=environ.get("PATH")):
        return
    if Path(program).is_file():
        problem, fix = "the program may not be executed", f"Allow it with `chmod +x {program}`."
    else:
        problem, fix = "there is no such program", "Check the path, or PATH."
    raise LaunchError(problem, expected="an executable file", got=repr(program), where=os.getcwd(), fix=fix)


def _nearest(path: Path) -> str:
    hint = did_you_mean(path.name, (near.name for near in path.parent.glob("*.py")))
    return hint if hint.startswith("Did you mean") else "Check the path."
