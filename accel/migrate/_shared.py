# SPDX-License-Identifier: Apache-2.0
"""Facts that files of a folder share: classes that keep an Accelerator, and functions that return one."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

_MAKERS = frozenset({"Accelerator", "PartialState", "AcceleratorState"})


class Shared(NamedTuple):
    """Facts that hold across files."""

    classes: Mapping[str, frozenset[str]] = {}  # names of classes, with their attributes that hold an Accelerator
    bases: Mapping[str, frozenset[str]] = {}  # names of classes, with the names of their bases
    # Functions that create an Accelerator and return it in their last line, the only `return`.
    factories: frozenset[str] = frozenset()
    # Factories, and methods that end as they do, with a result that a class keeps. They return a context.
    returners: frozenset[str] = frozenset()
    takers: frozenset[str] = frozenset()  # functions and classes with a parameter `accelerator`

    def joined(self, other: Shared) -> Shared:
        """Return the facts of both."""
        names = {*self.classes, *other.classes}
        classes = {name: self.classes.get(name, _NONE) | other.classes.get(name, _NONE) for name in names}
        bases = {**self.bases, **other.bases}
        returners = self.returners | other.returners
        factories = (self.factories | other.factories) - returners
        return Shared(classes, bases, factories, returners, self.takers | other.takers)

    def kept(self, name: str) -> frozenset[str]:
        """Return the attributes of a class that hold an Accelerator, inherited ones included."""
        found: set[str] = set()
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            each = waiting.pop()
            if each not in seen:
                seen.add(each)
                found |= self.classes.get(each, _NONE)
                waiting += self.bases.get(each, _NONE)
        return frozenset(found)


class Migrated(NamedTuple):
    """A rewritten script: its text, the notes in it, and the changes in meaning, with their lines."""

    text: str
    notes: tuple[tuple[int, str], ...] = ()
    changes: tuple[tuple[int, str], ...] = ()


ALONE = Shared()  # of a script without others
_NONE: frozenset[str] = frozenset()
_BOUND = {"staticmethod", "classmethod"}


def shared_in(texts: Iterable[str]) -> Shared:
    """Return the facts of scripts; one that is not Python has none."""
    trees: list[ast.Module] = []
    for text in texts:
        try:
            trees.append(ast.parse(text))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    factories = frozenset(name for tree in trees for name in _factories(tree.body, _makers(tree)))
    found = Shared(factories=factories)
    for tree in trees:
        makers = _makers(tree)
        bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        own = frozenset(name for body in bodies for name in _factories(body, makers))
        kept: dict[str, frozenset[str]] = {}
        for name, lines in _classes(tree, makers | factories | own):
            kept[name] = frozenset(lines)
            found = found.joined(Shared(returners=(factories | own) & {*lines.values()}))
        found = found.joined(Shared(kept, dict(_bases(tree)), takers=_takers(tree)))
    return found


def _makers(tree: ast.Module) -> set[str]:
    """Return the names by which a script makes an Accelerator."""
    aliases = (
        (alias.asname or alias.name, alias.name)
        for each in ast.walk(tree)
        if isinstance(each, ast.ImportFrom) and (each.module or "").split(".")[0] == "accelerate"
        for alias in each.names
    )
    return {local for local, name in aliases if name in _MAKERS} | _MAKERS


def _takers(tree: ast.Module) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        for each in inside:
            if isinstance(each, ast.FunctionDef) and "accelerator" in {arg.arg for arg in each.args.args}:
                found |= {each.name, *([node.name] if isinstance(node, ast.ClassDef) else [])}
    return frozenset(found)


def _makes(node: ast.expr | None, makers: set[str]) -> bool:
    if isinstance(node, ast.IfExp):
        return _makes(node.body, makers) or _makes(node.orelse, makers)
    return isinstance(node, ast.Call) and _function(node) in makers


def _bases(tree: ast.Module) -> Iterator[tuple[str, frozenset[str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, frozenset(ast.unparse(each).rpartition(".")[2] for each in node.bases)


def _classes(tree: ast.Module, makers: set[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield classes, with their attributes that hold an Accelerator by the function that makes each."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            held = {
                each.attr: _function(line.value)
                for line in ast.walk(node)
                if isinstance(line, (ast.Assign, ast.AnnAssign)) and _holds(line.value, makers)
                for each in (line.targets if isinstance(line, ast.Assign) else [line.target])
                if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self"
            }
            yield node.name, held


def _function(node: ast.expr | None) -> str:
    return ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def _holds(node: ast.expr | None, makers: set[str]) -> bool:
    """Whether an expression is an Accelerator: one that is made, or a variable of this name."""
    return _makes(node, makers) or (isinstance(node, ast.Name) and node.id == "accelerator")


def _factories(body: Iterable[ast.stmt], makers: set[str]) -> Iterator[str]:
    for node in body:
        if not isinstance(node, ast.FunctionDef) or {ast.unparse(each) for each in node.decorator_list} - _BOUND:
            continue
        returns = [each for each in ast.walk(node) if isinstance(each, ast.Return)]
        last = node.body[-1]
        others = [each for each in ast.walk(node) if isinstance(each, (ast.Yield, ast.YieldFrom))]
        if len(returns) != 1 or last is not returns[0] or others:
            continue
        made = {
            each.id
            for line in node.body
            if isinstance(line, ast.Assign) and _makes(line.value, makers)
            for each in line.targets
            if isinstance(each, ast.Name)
        }
        value = returns[0].value
        is_variable = isinstance(value, ast.Name) and value.id in made
        if is_variable or (isinstance(value, ast.Call) and _makes(value, makers)):
            yield node.name
