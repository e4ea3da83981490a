# SPDX-License-Identifier: Apache-2.0
"""Words and density of the source: noun first in docstrings, one thought a line, the words of the field."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator

import pytest
from sources import ACCEL, source_nodes, walked

QUESTIONS = "what|who|whose|which|where|how"
_FIRST = re.compile(rf"({QUESTIONS}|that)\b", re.I)
_ARGUMENT = re.compile(rf"\s+\w+(?:, \w+)*: (?:{QUESTIONS})\b")


def translations(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Docstrings, and lines of arguments in them, that begin with a question word."""
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False) or ""
            if _FIRST.match(text):
                yield text.partition("\n")[0]
            yield from (line.strip() for line in text.splitlines() if _ARGUMENT.match(line))


def crowded(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Lines that assign several calls at once."""
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            calls = [each for each in node.value.elts if any(isinstance(part, ast.Call) for part in ast.walk(each))]
            if len(calls) > 1 and isinstance(node.targets[0], ast.Tuple):
                yield node.lineno


@pytest.mark.kept("default")
def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    found = [f"{path.relative_to(ACCEL)}: {line}" for path, its in source_nodes().items() for line in translations(its)]
    assert not found, "name the thing first, as in `call: the expected call`:\n" + "\n".join(found)


def test_a_line_assigns_one_call() -> None:
    found = [f"{path.relative_to(ACCEL)}:{line}" for path, its in source_nodes().items() for line in crowded(its)]
    assert not found, f"one assignment a line, at {', '.join(found)}"


PYTHONS = {"ValueError", "TypeError", "UnpicklingError", "OSError"}  # causes that an error of accel quotes
_NO_SUBJECT = re.compile(r"not (?!all\b|every\b|enough\b)\w")


def fragments(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Problems of errors that begin with "not", and so have no subject, such as "not a step"."""
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in PYTHONS or not (name.endswith(("Error", "Mismatch")) or name.startswith("check_")):
            continue
        for argument in node.args:  # of a choice or a count the first is the value
            text = argument.values[0] if isinstance(argument, ast.JoinedStr) else argument
            if isinstance(text, ast.Constant) and isinstance(text.value, str) and _NO_SUBJECT.match(text.value):
                yield text.value


def test_errors_say_what_is_not_valid() -> None:
    begun = {path: its for path, its in source_nodes().items() if '"not ' in path.read_text()}  # the others hold none
    found = [f"{path.relative_to(ACCEL)}: {text!r}" for path, its in begun.items() for text in fragments(its)]
    assert not found, "a subject and a verb, as in `the step is not valid`:\n" + "\n".join(found)


def test_an_error_without_a_subject_is_found() -> None:
    wrong = [
        'ConfigError("not a step")',
        'check_count(step, "not a step", where="x")',
        'StepError(f"not of {x}", got="")',
    ]
    right = ['ConfigError("the step is not valid")', 'ValueError("not a PNG")', 'ConfigError("x", got="not a step")']
    assert [len([*fragments(walked(line))]) for line in [*wrong, *right]] == [1, 1, 1, 0, 0, 0]


# House verbs and clauses in place of nouns: the field reports, adopts, forwards, is; "of which each rank computes a
# summand" is "a row-parallel linear layer".
PLAIN = re.compile(
    r"\b(told|tells|lies|lying|learns|(?:take|takes|took|taken|taking) up|hand(?:s|ed|ing)? on|stood)\b"
    r"|\bstands?(?!-ins?\b| in\b)\b|\b(?<!to )tell\b"
    r"|(?<!\beach )(?<!\bone )(?<!\bsome )(?<!\ball )(?<!\bmost )\bof (?:which|whom)\b"
    r"|\b(?:what it wraps|as it is to be saved|otherwise than|cannot mean|do not know it|rows alone move)\b"
    r"|\b(?:and so of what|what follows a|put apart again|without telling|no file of Accelerate|not a usable)\b"
    r"|\b(?:lack records|not a dtype of floating|never killed|(?<!that )is what (?!it)|carried apart)\b"
)
STRINGS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}  # Python 3.12 parts f-strings


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Lines of docstrings, comments and messages: strings with a space in them, without the fields of f-strings."""
    if not PLAIN.search(text):  # in no token either
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        written = re.sub(r"\{[^{}]*\}", "", token.string)
        if token.type == tokenize.COMMENT or (token.type in STRINGS and " " in written):
            yield from enumerate(written.split("\n"), token.start[0])


@pytest.mark.kept("default")
def test_prose_has_the_words_of_the_field() -> None:
    found = [
        f"{path.relative_to(ACCEL)}:{number}: {match[0]!r}"
        for path in source_nodes()
        for number, line in prose(path.read_text())
        for match in PLAIN.finditer(line)
    ]
    assert not found, "report, adopt, forward, be; or a noun in place of the clause:\n" + "\n".join(found)


# Names: log, warn, report, print; separate, independent, excluded, differing.
NAMED = {"told", "tell", "tells", "untold", "whose", "apart"}
TREES = {"take_apart", "_take_apart"}  # what nested containers are for `accel.tree.Container`, a public field


def names(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Names of functions, classes, parameters, variables, attributes and imports."""
    for node in nodes:
        line = getattr(node, "lineno", 0)
        for field in ("name", "id", "attr", "arg", "asname"):
            if isinstance(name := getattr(node, field, None), str):
                yield line, name


def test_names_have_the_words_of_the_field() -> None:
    found = [
        f"{path.relative_to(ACCEL)}:{line}: {name}"
        for path, its in source_nodes().items()
        for line, name in names(its)
        if name not in TREES and NAMED & set(name.lower().split("_"))
    ]
    assert not found, "name the report, the warning or the separate thing:\n" + "\n".join(found)
