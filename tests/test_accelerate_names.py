# SPDX-License-Identifier: Apache-2.0
"""The page "From Accelerate, call by call" has a row for every public name of Accelerate that the list beside has.

`python tests/test_accelerate_names.py FOLDER` writes the list anew, from the sources in the folder of that package.
Facts alone are taken: names of functions, classes, their public members and arguments, flags, keys and variables.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NAMES = HERE / "accelerate_names.txt"
PAGE = HERE.parent / "docs" / "from-accelerate.md"
MODULES = (
    "accelerator", "big_modeling", "checkpointing", "data_loader", "hooks", "inference", "launchers", "local_sgd",
    "logging", "memory_utils", "optimizer", "parallelism_config", "scheduler", "state", "tracking", "utils/dataclasses",
)  # fmt: skip
VARIABLE = re.compile(r"(ACCELERATE|FSDP|MEGATRON_LM|PARALLELISM_CONFIG)_[A-Z0-9_]*")
# Scripts call the functions of these modules and the methods of these classes by keywords.
CALLED = ("Accelerator", "PartialState", "big_modeling", "inference", "launchers")
# What a call is about, in its first place: a model, tensors, a function.
OBJECTS = (
    "args", "batch_size", "data_loader", "dataloader", "enable", "env", "f", "func", "function", "hook", "input_data",
    "inputs", "key", "loss", "model", "models", "name", "obj", "objects", "optimizer", "parameters", "scheduler",
    "tensor", "value", "values", "state_dict", "index", "clip_value", "dl", "format_string",
)  # fmt: skip
FEWEST_LETTERS = 3  # of a group, such as `is_*_available`


def covering(page: str) -> tuple[set[str], set[str]]:
    """Names and groups in code of the first columns of a page's tables; a group has a star."""
    names: set[str] = set()
    groups: set[str] = set()
    for row in re.findall(r"^\| (.*?) \| .* \|$", page.replace("\\|", "\\\\"), flags=re.M):
        for code in re.findall(r"`([^`]+)`", row):
            stars = re.findall(r"[\w.*-]*\*[\w.*-]*", code)
            groups.update(stars)
            names.update(re.findall(r"--\w+|\w+\.\w+|\w+", code))
            names.update(re.findall(r"\w+", code))
    return names, {group for group in groups if len(re.sub(r"\W|_", "", group)) >= FEWEST_LETTERS}


def missing(listed: list[str], page: str) -> list[str]:
    names, groups = covering(page)
    return [
        entry
        for entry in listed
        if not {entry, entry.rpartition(".")[2]} & names
        and not any(fnmatchcase(each, group) for group in groups for each in (entry, entry.rpartition(".")[2]))
    ]


def test_each_name_has_a_row() -> None:
    listed = NAMES.read_text().split()
    assert len(listed) > 1000
    left = missing(listed, PAGE.read_text())
    assert not left, f"{len(left)} names have no row in docs/from-accelerate.md: {', '.join(left[:40])}"


def test_arguments_of_public_calls_have_rows_and_the_list_has_them() -> None:
    """Without rows of their own, arguments were lost: a script that passes one must find what becomes of it."""
    listed = {entry for entry in NAMES.read_text().split() if entry.count(".") == 2}
    rows = {"map_location", "slice_fn_for_dispatch", "load_model_func_kwargs", "keep_fp32_wrapper", "even_batches"}
    assert {entry.rpartition(".")[2] for entry in listed} >= rows - {"map_location"}  # of `**kwargs`
    assert rows <= covering(PAGE.read_text())[0]


@pytest.mark.engine
@pytest.mark.slow
def test_the_list_is_that_of_the_installed_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    if not accelerate.__version__.startswith("1.15."):
        pytest.skip("the list is of Accelerate 1.15")
    assert names_of(Path(accelerate.__file__).parent) == NAMES.read_text().split()


def test_each_group_stands_for_something() -> None:
    listed = NAMES.read_text().split()
    both = {*listed, *(entry.rpartition(".")[2] for entry in listed)}
    idle = [group for group in covering(PAGE.read_text())[1] if not any(fnmatchcase(each, group) for each in both)]
    assert not idle


@pytest.mark.parametrize(
    ("page", "left"),
    [
        ("| `prepare(model)`, `--cpu` | here |", ["Plugin.fields", "is_x_available"]),
        ("| `Plugin.*` | here |", ["Accelerator.prepare", "--cpu", "is_x_available"]),
        ("| `is_*_available`, `Plugin(fields=)`, `Accelerator.prepare` | `--cpu` |", ["--cpu"]),
        ("| `*` | all |", ["Accelerator.prepare", "--cpu", "Plugin.fields", "is_x_available"]),
        ("`prepare` without a table", ["Accelerator.prepare", "--cpu", "Plugin.fields", "is_x_available"]),
    ],
)
def test_a_row_covers_the_names_of_its_first_column(page: str, left: list[str]) -> None:
    assert missing(["Accelerator.prepare", "--cpu", "Plugin.fields", "is_x_available"], page) == left


def public_names(root: Path) -> Iterator[str]:
    """Names that the sources of Accelerate declare."""
    for path in ("__init__.py", "utils/__init__.py"):
        for node in ast.walk(_tree(root / path)):
            if isinstance(node, ast.ImportFrom) and node.level:
                yield from (each.asname or each.name for each in node.names)
    for module in (*MODULES, "test_utils/testing", "test_utils/training"):
        for node in _tree(root / f"{module}.py").body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and module in CALLED:
                yield from _arguments(node.name, node)
            if isinstance(node, ast.ClassDef) and node.name in CALLED:
                for each in node.body:
                    if isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
                        yield from _arguments(f"{node.name}.{each.name}", each)
            if isinstance(node, ast.ClassDef) and not module.startswith("test_utils"):
                yield from (f"{node.name}.{member}" for member in _members(node) if not node.name.startswith("_"))
    for node in _tree(root / "commands/config/config_args.py").body:
        if isinstance(node, ast.ClassDef):
            yield from _members(node)
    for path in root.rglob("*.py"):
        yield from _flags(_tree(path)) if "commands" in path.parts else ()
        yield from _variables(_tree(path)) if "test_utils" not in path.parts else ()


def _members(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        if isinstance(each, ast.FunctionDef):
            yield each.name
            if each.name == "__init__":
                yield from (argument.arg for argument in (*each.args.args[1:], *each.args.kwonlyargs))
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id
        if isinstance(each, ast.Assign):
            yield from (target.id for target in each.targets if isinstance(target, ast.Name))


def _arguments(name: str, node: ast.FunctionDef) -> Iterator[str]:
    """Arguments of a function, as `Accelerator.load_state.map_location`; those that a script passes."""
    given = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
    kinds = [argument.arg for argument in (node.args.kwarg,) if argument and argument.arg != "kwargs"]
    yield from (f"{name}.{each}" for each in [*given, *kinds] if each not in ("self", "cls") and each not in OBJECTS)


def _flags(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            given = [each.value for each in node.args if isinstance(each, ast.Constant)]
            yield from (f"--{str(flag)[2:].replace('-', '_')}" for flag in given if str(flag).startswith("--"))


def _variables(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and VARIABLE.fullmatch(node.value):
            yield node.value


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def names_of(folder: Path) -> list[str]:
    """Public names in the sources of Accelerate, sorted."""
    return sorted({name for name in public_names(folder) if not name.rpartition(".")[2].startswith("_")})


if __name__ == "__main__":
    _ = NAMES.write_text("".join(f"{name}\n" for name in names_of(Path(sys.argv[1]))))
