# SPDX-License-Identifier: Apache-2.0
"""Facts in the documentation are those of the code: names, numbers, the tree of errors, flags.

Constants that pages quote are private: nobody else needs them.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import json
import re
import runpy
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from ckpt_helpers import FORMAT
from launches import parser
from tables import rows

import accel
from accel.cli._parser import value_flags
from accel.comm import Comm, blank
from accel.comm._group import MOST_GATHERED
from accel.config import LaunchConfig
from accel.launching.local import _supervisor
from accel.storage._files import SPAN_BYTES
from accel.system import NOTICES, REPEATED, SAME_REQUEST_S, STOPPING

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/concepts").glob("*.md"))]


def message_bytes(ranks: int) -> int:
    """Of a first message; in a large group with a second header."""
    comm = Comm(None, 0, ranks, backend="none", control=torch.device("cpu"), owned=False)
    return len(blank(comm))


def rule(name: str) -> Any:
    """A constant of the tests of the architecture."""
    tree = ast.parse((ROOT / "tests/test_architecture.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            names = [each.id for each in ast.walk(node.targets[0]) if isinstance(each, ast.Name)]
            if name in names:
                value = ast.literal_eval(node.value)
                return value[names.index(name)] if isinstance(value, tuple) else value
    raise AssertionError(name)


def oldest(package: str) -> str:
    """The oldest version of Python or of a package that pyproject.toml takes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [f"python{project['requires-python']}", *project["dependencies"]]
    return next(found[1] for each in declared if (found := re.match(rf"{package}>=([\d.]+)", each)))


NUMBERS: list[tuple[str, str, Callable[[], object]]] = [
    ("docs/design.md", r"all-gather of (\d+) KiB per rank", lambda: message_bytes(8) // 1024),
    ("docs/design.md", r"less\s+among\s+more than (\d+), ", lambda: largest(message_bytes(8))),
    ("docs/design.md", r"(\d+) KiB at 64\)", lambda: message_bytes(64) // 1024),
    ("docs/design.md", r"Above (\d+) ranks the headers", lambda: MOST_GATHERED),
    ("docs/collectives.md", r"(\d+) KiB up to 8 ranks", lambda: message_bytes(8) // 1024),
    ("docs/collectives.md", r"(\d+)\s+KiB\s+at\s+64\.", lambda: message_bytes(64) // 1024),
    ("docs/collectives.md", r"Above (\d+) ranks", lambda: MOST_GATHERED),
    ("docs/collectives.md", r"messages of (\d+) KiB a rank", lambda: message_bytes(1000) // 1024),
    ("docs/streams.md", r"in messages of (\d+) KiB", lambda: message_bytes(8) // 1024),
    ("docs/benchmarks.md", r"first message of (\d+) KiB", lambda: message_bytes(8) // 1024),
    ("docs/design.md", r"\((\d+) lines a file", lambda: rule("MOST_LINES")),
    ("docs/design.md", r"lines a file, (\d+) a function", lambda: rule("MOST_FUNCTION_LINES")),
    ("docs/checkpoint-format.md", r"digests of each (\d+) MiB", lambda: SPAN_BYTES // 2**20),
    ("docs/checkpoints-remote.md", r"in parts of (\d+) MiB", lambda: SPAN_BYTES // 2**20),
    ("docs/launch.md", r"waits ([\d.]+) s\s+for\s+what\s+other\s+ranks", lambda: _supervisor.SETTLE_S),
    ("docs/launch.md", r"still there ([\d.]+) s later", lambda: _supervisor.FAILED_GRACE_S),
    ("docs/launch.md", r"The ranks have (\d+) s to\s+save", lambda: LaunchConfig().stop_grace_s),
    ("docs/preemption.md", r"the ranks have\s+(\d+)\s+s;", lambda: LaunchConfig().stop_grace_s),
    ("docs/clusters.md", r"up to (\d+) s \(--rdzv-timeout-s\)", lambda: LaunchConfig().rdzv_timeout_s),
    ("docs/clusters.md", r"waits for rank 0 at h0:29500, up to (\d+) s", lambda: accel.single().timeout_s),
    ("docs/data-parallel.md", r"`bucket_cap_mb` \| (\d+) \|", lambda: default("prepare_model", "bucket_cap_mb")),
    ("docs/models.md", r"accel ([\d.]+), torch", lambda: accel.__version__),
    ("docs/models.md", r"format (\d+), accel", lambda: FORMAT),
    ("docs/check-setup.md", r"  accel-torch +([\d.]+)", lambda: accel.__version__),
    ("docs/comparison.md", r"asks\s+for\s+torch\s+([\d.]+)", lambda: oldest("torch")),
    ("README.md", r"Needs Python ([\d.]+)", lambda: oldest("python")),
    ("README.md", r"and torch ([\d.]+) or newer", lambda: oldest("torch")),
]


def largest(size: int) -> int:
    """The largest number of ranks whose first message is that long."""
    return max(ranks for ranks in range(1, 200) if message_bytes(ranks) == size)


def default(function: str, argument: str) -> object:

    return inspect.signature(getattr(accel, function)).parameters[argument].default


@rows("page, pattern, constant", NUMBERS)
def test_a_number_is_the_constants(page: str, pattern: str, constant: Callable[[], object]) -> None:
    found = re.findall(pattern, (ROOT / page).read_text())
    assert found, f"{page} has no {pattern!r} any more: adapt NUMBERS"
    expected = constant()
    for text in found:
        same = text == expected if isinstance(expected, str) else float(text) == expected
        assert same, f"{page} says {text}, the code {expected}: {pattern!r}"


@rows("page", PAGES)
def test_names_exist(page: Path) -> None:
    """`accel.name` and `accel.module.name`, in text and in code."""
    text = page.read_text()
    if page.name == "upgrading.md":  # the first column has the names of before
        text = re.sub(r"^\| [^|]*\|", "", text, flags=re.M)
    for dotted in sorted(set(re.findall(r"(?<![\w./:@-])accel((?:\.[A-Za-z_]\w*)+)", text))):
        if dotted in (".toml", ".json"):
            continue
        found: Any = accel
        path = "accel"
        for name in dotted[1:].split("."):
            path += f".{name}"
            found = getattr(found, name, None) or module(path)
            assert found is not None, f"{page.name}: there is no {path}"
            if isinstance(found, type) or callable(found):
                break


def module(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        return None


def cells(row: str) -> int:
    return len(re.findall(r"(?<!\\)\|", row)) - 1


def broken_rows(text: str) -> list[str]:
    """Rows of tables that a site would not draw: no line of dashes below the heading, or another number of cells."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    found: list[str] = []
    for table in re.findall(r"(?:^\|.*\n)+", outside, flags=re.M):
        heading, *rows = table.splitlines()
        if not rows or not re.fullmatch(r"\|(?: ?:?-+:? ?\|)+", rows[0]):
            found.append(heading)
        found += [row for row in rows if cells(row) != cells(heading)]
    return found


@rows("page", PAGES)
def test_tables_have_a_line_of_dashes_and_full_rows(page: Path) -> None:
    assert not broken_rows(page.read_text())


@pytest.mark.parametrize(
    ("table", "broken"),
    [
        ("| a | b |\n|---|---|\n| `x \\| y` | z |\n", []),
        ("| a | b |\n| 1 | 2 |\n", ["| a | b |"]),
        ("| a | b |\n|---|---|\n| 1 |\n", ["| 1 |"]),
        ("```\n| a | b |\n```\n", []),
    ],
)
def test_a_broken_row_of_a_table_is_found(table: str, broken: list[str]) -> None:
    assert broken_rows(table) == broken


def test_the_table_of_errors_has_each_class_with_its_bases() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", (ROOT / "docs/errors.md").read_text(), flags=re.M)
    errors = {*accel.errors.__all__} - {"AccelError"}
    assert {name for name, _ in rows} == errors
    for name, base in rows:
        assert issubclass(getattr(accel.errors, name), (accel.AccelError,))
        assert issubclass(getattr(accel.errors, name), getattr(builtins, base)), f"{name} is no {base}"


def test_names_of_the_page_on_upgrading_raise_the_errors_that_it_quotes() -> None:
    rows = re.findall(r"^\| `(accel\.[\w.]+)\W.*\| (.+) \|$", (ROOT / "docs/upgrading.md").read_text(), flags=re.M)
    assert len(rows) >= 6
    for dotted, told in rows:
        *module, name = dotted.split(".")
        quoted = re.search(r'"(.+?)"', told)
        with pytest.raises(AttributeError, match=re.escape(quoted[1]) if quoted else name):
            getattr(eval(".".join(module), {"accel": accel}), name)


def test_flags_of_launch_exist() -> None:
    """Flags behind `accel launch` in text and in consoles, up to the script."""
    known = {flag for action in parser()._actions for flag in action.option_strings} | set(value_flags())
    for page in PAGES:
        for words in re.findall(r"accel launch ([^`\n|]+)", page.read_text()):
            for word in words.split():
                if word == "-m" or (not word.startswith("-") and re.search(r"\.(py|sh)$", word)):
                    break  # what follows is the script's
                flag = word.partition("=")[0].rstrip(",.;:)")
                # a page shows what another launcher's flags and a slip are answered with
                if re.fullmatch(r"--[a-z-]+", flag) and flag not in ("--nproc-per-nod", "--fp16", "--epochs"):
                    assert flag in known, f"{page.name}: accel launch has no {flag}"


def test_settings_of_a_launch_are_the_fields_of_its_record() -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    named = set(re.findall(r"^\| `(\w+)` \| `--", text, flags=re.M))
    assert named == {field.name for field in msgspec.structs.fields(LaunchConfig)}


def test_the_map_of_rooms_names_paths_of_the_tree_and_every_large_room() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    section = page.split("## Which room to open")[1].split("\n## ")[0]
    paths = re.findall(r"`(accel/[\w/.]+)`", section)
    assert len(paths) >= 25
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing, f"{missing}: moved, or renamed; write the new path into docs/design.md"
    rooms = {path.parent.name for path in (ROOT / "accel").glob("*/__init__.py")}
    named = {path.split("/")[1] for path in paths}
    assert rooms == {name for name in named if not name.endswith(".py")}


def test_the_page_on_design_names_the_rooms_of_every_line() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    section = page.split("## Who may import whom")[1].split("\n## ")[0]
    named = [set(re.findall(r"`(\w+)`", row.split("|")[1])) for row in section.splitlines() if row.startswith("| `")]
    there = {path.stem for path in (ROOT / "accel").iterdir()}
    layers: list[set[str]] = rule("LAYERS")
    assert named == [line & there for line in layers if line & there]


def test_the_page_on_design_has_the_signals_of_a_launch() -> None:
    page = (ROOT / "docs" / "design.md").read_text().split("### Signals of a launch")[1]
    first = [re.findall(r"SIG[A-Z0-9]+", row.split("|")[1]) for row in page.splitlines() if row.startswith("| ")]
    groups = [each for each in first if each]
    assert groups == [*([each.name for each in known] for known in (STOPPING, REPEATED, NOTICES)), ["SIGCHLD"]]
    assert f"{_supervisor.SETTLE_S} s for other records" in page
    assert f"another within {SAME_REQUEST_S} s" in page


def test_the_comparison_is_as_its_script_writes_it() -> None:
    script = runpy.run_path(str(ROOT / "tests/benchmarks/comparison_table.py"))
    text = script["PAGE"].read_text()
    assert text == script["page"](text, json.loads(script["FIGURES"].read_text())), "run the script"
