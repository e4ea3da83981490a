# SPDX-License-Identifier: Apache-2.0
"""Words and density of the source: noun first in docstrings, one thought a line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "accel"
SOURCES = sorted(ROOT.rglob("*.py"))
QUESTIONS = "what|who|whose|which|where|how"
_FIRST = re.compile(rf"({QUESTIONS}|that)\b", re.I)
_ARGUMENT = re.compile(rf"\s+\w+(?:, \w+)*: (?:{QUESTIONS})\b")


def translations(tree: ast.Module) -> Iterator[str]:
    """Docstrings, and lines of arguments in them, that begin with a question word."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False) or ""
            if _FIRST.match(text):
                yield text.partition("\n")[0]
            yield from (line.strip() for line in text.splitlines() if _ARGUMENT.match(line))


def crowded(tree: ast.Module) -> Iterator[int]:
    """Lines that assign several calls at once."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            calls = [each for each in node.value.elts if any(isinstance(part, ast.Call) for part in ast.walk(each))]
            if len(calls) > 1 and isinstance(node.targets[0], ast.Tuple):
                yield node.lineno


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {line}" for path in SOURCES for line in translations(ast.parse(path.read_text()))
    ]
    assert not found, "name the thing first, as in `call: the expected call`:\n" + "\n".join(found)


def test_a_line_assigns_one_call() -> None:
    found = [f"{path.relative_to(ROOT)}:{line}" for path in SOURCES for line in crowded(ast.parse(path.read_text()))]
    assert not found, f"one assignment a line, at {', '.join(found)}"
