# SPDX-License-Identifier: Apache-2.0
"""`accel examples`: list the complete scripts that come with accel, and copy one.

A wheel has them in `accel/examples/`, copied when it is built; in a checkout they are read from `examples/`.
"""

from __future__ import annotations

import ast
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from accel.cli._docs import shipped_folder
from accel.cli._parser import Parser
from accel.errors import ConfigError
from accel.errors._checks import did_you_mean

_USAGE = "accel examples [NAME --to DIR]"
_ABOUT = "List the complete scripts that come with accel, or copy one, together with the scripts that it imports."
_UNLISTED = ("gallery",)  # the script that runs the others


def run(words: Sequence[str], _environ: Mapping[str, str]) -> int:
    """List the examples or copy one; return the exit status."""
    known = parser().read(words)
    folder = shipped_folder("examples", "examples", "digits.py")
    names = sorted(path.stem for path in folder.glob("*.py") if path.stem not in _UNLISTED)
    if not known.name:
        width = max(map(len, names))
        print("\n".join(f"{name:{width}}  {_summary(folder / f'{name}.py')}" for name in names))
        return 0
    name = known.name.removesuffix(".py").replace("-", "_")
    if name not in names:
        raise ConfigError(
            "there is no example of this name",
            got=repr(known.name),
            where="accel examples",
            fix=did_you_mean(name, names, "`accel examples` lists them."),
        )
    if known.to is None:
        raise ConfigError(
            "the folder to copy to is missing",
            expected="--to DIR",
            where="accel examples",
            fix=f"`accel examples {name} --to .` copies it to this folder.",
        )
    target = _copy(folder, name, known.to)
    print(f"{target}\nRun it: accel launch --nproc-per-node 2 {target}")
    return 0


def parser() -> Parser:
    """Return the parser of the command's flags."""
    built = Parser("accel examples", usage=_USAGE, description=_ABOUT)
    built.value("name", "NAME", "the example to copy, such as lora", nargs="?")
    built.value("--to", "DIR", "folder for the copy, created if it is missing", type=Path)
    return built


def _summary(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def _copy(folder: Path, name: str, to: Path) -> Path:
    """Copy a script and the examples that it imports; refuse to overwrite a file."""
    files = _imported(folder, name)
    if there := [to / file for file in files if (to / file).exists()]:
        raise ConfigError(
            "a file of this name exists",
            got=", ".join(map(str, there)),
            where="accel examples, --to",
            fix="Name another folder, or move the file away.",
        )
    to.mkdir(parents=True, exist_ok=True)
    for file in files:
        _ = shutil.copyfile(folder / file, to / file)
    return to / files[0]


def _imported(folder: Path, name: str) -> list[str]:
    """Return the files of a script and of the examples that it imports, itself first."""
    found, left = list[str](), [name]
    while left:
        file = f"{left.pop()}.py"
        if file in found:
            continue
        found.append(file)
        for node in ast.walk(ast.parse((folder / file).read_text())):
            modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            left += [each for each in modules if (folder / f"{each}.py").is_file()]
    return found
