# SPDX-License-Identifier: Apache-2.0
"""Checks of a rewritten script: remaining uses of Accelerate, undefined names, and calls that do not bind."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from accel.migrate._signatures import misfit, public_names
from accel.migrate._tree import DECIDE, PAGES
from accel.migrate._vocabulary import METHODS

_KNOWN = frozenset(dir(builtins)) | {"__file__", "__name__", "__doc__", "__path__", "__spec__", "__class__"}
# what only an Accelerator has: names of its attributes, in scripts that had one
_ITS_OWN = frozenset({"accelerator", "gather_for_metrics", "sync_gradients", "optimizer_step_was_skipped"})


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_LOOP = ("backward", "accumulate", "clip_grad_norm_", "log", "save_state", "load_state", "gather_for_metrics")


class Problem(NamedTuple):
    """A line of a rewritten script that cannot run, with the decision it needs and the page to read."""

    line: int
    what: str
    page: str


def noted(before: str, after: str, ctx: str, state: str, trackers: str) -> str:
    """Return a written script with a note at each problem that has none.

    Args:
        before: script as it was, which may have undefined names itself.
        after: written script.
        ctx: variable of the context.
        state: variable of the training state.
        trackers: variable of the trackers.
    """
    tree = ast.parse(after)
    starts = _statements(tree)
    pages = {ctx: "contexts", state: "loop", trackers: "trackers"}
    had = {name for name, _ in undefined(before)} - pages.keys()
    left = [(name, line) for name, line in undefined(after) if name not in had]
    found = [*_names(tree, left, pages), *_left(tree, ctx), *_calls(tree)]
    lines = after.split("\n")
    added: dict[int, list[str]] = {}
    known: set[str] = set()
    for line, what, page in sorted(found):
        at = starts[max(line, 1)]
        above = lines[at - 2].strip() if at > 1 else ""
        if what not in known and not above.startswith(DECIDE):
            blank = lines[at - 1][: len(lines[at - 1]) - len(lines[at - 1].lstrip())]
            end = "\r" if lines[at - 1].endswith("\r") else ""
            added.setdefault(at, []).append(f"{blank}{DECIDE} {what} ({PAGES[page]}){end}")
            known.add(what)
    written = [text for at, line in enumerate(lines, 1) for text in (*added.get(at, ()), line)]
    return "\n".join(written)


def noted_uses(text: str) -> str:
    """Return a script that makes no Accelerator, with a note at each call of an `x.accelerator` of another file."""
    tree = ast.parse(text)
    uses = [
        each
        for each in ast.walk(tree)
        if isinstance(each, ast.Attribute)
        and isinstance(each.value, ast.Attribute)
        and each.value.attr == "accelerator"
        and each.attr in {*METHODS, *_LOOP}
    ]
    return noted(text, text, "ctx", "state", "trackers") if uses else text


def undefined(text: str) -> list[tuple[str, int]]:
    """Return the names that a script reads and no scope around binds, each with the first line of its scope."""
    top = symtable.symtable(text, "script", "exec")
    made = {each.get_name() for each in top.get_symbols() if _binds(each)} | _KNOWN
    found: list[tuple[str, int]] = []
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for each in table.get_symbols():
            if each.is_declared_global() and each.is_assigned():
                made.add(each.get_name())
            elif each.is_referenced() and (each.is_global() if table is not top else not _binds(each)):
                found.append((each.get_name(), table.get_lineno()))
    return [(name, line) for name, line in found if name not in made]


def _binds(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace() or symbol.is_parameter()


def _statements(tree: ast.Module) -> dict[int, int]:
    """Return the first line of the innermost statement by line; a function begins at its decorators."""
    found: dict[int, int] = {}
    for node in ast.walk(tree):  # from the outside in
        if isinstance(node, (ast.stmt, ast.ExceptHandler)):
            decorators: list[ast.expr] = getattr(node, "decorator_list", [])
            first = min([node.lineno, *(each.lineno for each in decorators)])
            found.update(dict.fromkeys(range(first, (node.end_lineno or node.lineno) + 1), first))
    return found


def _names(tree: ast.Module, left: list[tuple[str, int]], pages: dict[str, str]) -> Iterator[Problem]:
    reads = [each for each in ast.walk(tree) if isinstance(each, ast.Name)]
    early = dict(_early(tree, pages))
    left = [*left, *early.items()]
    for name, begin in left:
        line = min((each.lineno for each in reads if each.id == name and each.lineno >= begin), default=begin)
        yield Problem(line, f"where {name} comes from: nothing here defines it", pages.get(name, "names"))


def _early(tree: ast.Module, names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield variables that a function reads above the line that makes them."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        scopes = [each for each in ast.walk(node) if each is not node and isinstance(each, _SCOPES)]
        inner = {id(part) for each in scopes for part in ast.walk(each)}
        own = [each for each in ast.walk(node) if isinstance(each, ast.Name) and id(each) not in inner]
        params = {each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        for name in set(names) - params:
            made = [each.lineno for each in own if each.id == name and isinstance(each.ctx, ast.Store)]
            read = [each.lineno for each in own if each.id == name and isinstance(each.ctx, ast.Load)]
            if made and read and min(read) < min(made):
                yield name, min(read)


def _left(tree: ast.Module, ctx: str) -> Iterator[Problem]:
    """Yield what is left of Accelerate: its imports, its attributes, and attributes that a context lacks."""
    known = public_names("accel.DistContext")
    for node in ast.walk(tree):
        names: list[str | None] = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        if any((each or "").split(".")[0] == "accelerate" for each in names):
            yield Problem(getattr(node, "lineno", 1), "names of Accelerate that are left", "names")
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).rpartition(".")[2]
            if node.attr in _ITS_OWN and owner != "accel":
                yield Problem(
                    node.lineno, f"what takes the place of {ast.unparse(node)}: functions take ctx", "classes"
                )
            elif owner == ctx and known and node.attr not in known:
                yield Problem(node.lineno, f"what takes the place of {ast.unparse(node)}: a context lacks it", "names")
        elif isinstance(node, ast.Name) and node.id == "accelerator" and isinstance(node.ctx, ast.Load):
            yield Problem(node.lineno, "what takes the place of accelerator: functions take ctx", "classes")


def _calls(tree: ast.Module) -> Iterator[Problem]:
    """Yield the calls of accel that do not fit, and functions that it does not have."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func) if isinstance(node.func, ast.Attribute) else ""
        if not name.startswith("accel.") or not name.replace(".", "").isidentifier():
            continue
        why = misfit(node, name)
        if why:
            yield Problem(node.lineno, f"the arguments of {name}: {why}", "names")
        given = {each.arg: each.value for each in node.keywords}
        op = given.get("op", node.args[2] if len(node.args) > 2 else None)
        if name == "accel.reduce" and isinstance(op, ast.Constant) and op.value not in ("sum", "mean", "max", "min"):
            yield Problem(node.lineno, f"the op of accel.reduce in place of {op.value!r}", "names")
