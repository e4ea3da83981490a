# SPDX-License-Identifier: Apache-2.0
"""Signatures of accel's public functions and the fields of its records, read from its sources: torch is not loaded."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator, Sequence
from inspect import Parameter, Signature
from pathlib import Path

_ROOT = Path(__file__).parent.parent


def signatures(name: str) -> Sequence[Signature]:
    """Return the signatures of a public function or class, such as `accel.trackers.jsonl`; none for an unknown name."""
    first, _, rest = name.partition(".")
    return _found("accel", rest) if first == "accel" and rest else ()


def public_names(name: str) -> frozenset[str]:
    """Return the names that a class of accel has: fields, properties and methods; empty for an unknown class."""
    first, _, rest = name.partition(".")
    made = _definitions("accel", rest) if first == "accel" else []
    return frozenset(_members(made[-1])) if made and isinstance(made[-1], ast.ClassDef) else frozenset()


def is_tracker(name: str) -> bool:
    """Whether `accel.trackers` has a tracker of that name: a function that returns a `Tracker`."""
    made = _definitions("accel", f"trackers.{name}") if name.isidentifier() else []
    returned = made[-1].returns if made and isinstance(made[-1], ast.FunctionDef) else None
    return isinstance(returned, ast.Name) and returned.id == "Tracker"


@functools.lru_cache(maxsize=256)
def _found(module: str, name: str) -> tuple[Signature, ...]:
    made = _definitions(module, name)
    functions = [each for each in made if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
    if functions:
        return tuple(_of_function(each.args) for each in functions)
    classes = [each for each in made if isinstance(each, ast.ClassDef)]
    return tuple(found for each in classes if (found := _of_class(each)) is not None)


@functools.lru_cache(maxsize=256)
def _body(module: str) -> tuple[ast.stmt, ...]:
    """Return the statements of a module, with those under its conditions."""
    path = _ROOT.parent.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return ()
    tree = ast.parse(file.read_bytes())
    inside = [line for each in tree.body if isinstance(each, ast.If) for line in each.body]
    return (*tree.body, *inside)


def _definitions(module: str, name: str) -> list[ast.stmt]:
    """Return the definitions of a dotted name in a module, across imports."""
    first, _, rest = name.partition(".")
    own = [
        each
        for each in _body(module)
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and each.name == first
    ]
    if own:
        return [] if rest else list(own)
    for each in _body(module):
        if isinstance(each, ast.ImportFrom) and each.module and not each.level and each.module.startswith("accel"):
            for alias in each.names:
                if (alias.asname or alias.name) == first:
                    home = f"{each.module}.{alias.name}"
                    return _definitions(home, rest) if _body(home) else _definitions(each.module, alias.name)
    return _definitions(f"{module}.{first}", rest) if rest and _body(f"{module}.{first}") else []


def _of_function(args: ast.arguments, *, bound: bool = False) -> Signature:
    plain = [*args.posonlyargs, *args.args]
    needed = len(plain) - len(args.defaults)
    made = [
        Parameter(
            each.arg,
            Parameter.POSITIONAL_ONLY if at < len(args.posonlyargs) else Parameter.POSITIONAL_OR_KEYWORD,
            default=Parameter.empty if at < needed else None,
        )
        for at, each in enumerate(plain)
    ]
    if args.vararg:
        made.append(Parameter(args.vararg.arg, Parameter.VAR_POSITIONAL))
    for each, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        made.append(Parameter(each.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else None))
    if args.kwarg:
        made.append(Parameter(args.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(made[1:] if bound else made)


def _of_class(node: ast.ClassDef) -> Signature | None:
    """Return the signature of a class: its `__init__`, or the fields of a record; None for one that inherits it."""
    own = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    if own:
        return _of_function(own[0].args, bound=True)
    if not any(ast.unparse(base).endswith("Struct") for base in node.bases):
        return None
    keyed = any(each.arg == "kw_only" for each in node.keywords)
    kind = Parameter.KEYWORD_ONLY if keyed else Parameter.POSITIONAL_OR_KEYWORD
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
    made = [
        Parameter(ast.unparse(each.target), kind, default=Parameter.empty if each.value is None else None)
        for each in fields
    ]
    return Signature(made)


def _members(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id
        elif isinstance(each, ast.FunctionDef):
            yield each.name


def misfit(call: ast.Call, name: str) -> str:
    """Return why a call does not fit the signature of a function of accel; empty where it fits, or nothing is known."""
    starred = any(isinstance(each, ast.Starred) for each in call.args)
    given = dict.fromkeys(each.arg for each in call.keywords if each.arg is not None)
    partial = starred or len(given) < len(call.keywords)
    plain = [each for each in call.args if not isinstance(each, ast.Starred)]
    why = ""
    for signature in signatures(name):
        try:
            _ = (signature.bind_partial if partial else signature.bind)(*plain, **given)
        except TypeError as error:
            why = str(error)
        else:
            return ""
    return why


def places(name: str) -> Sequence[str]:
    """Return the parameters that a function of accel takes by position; of the last signature, where it has several."""
    known = signatures(name)
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in known[-1].parameters.values() if each.kind in kinds] if known else ()


def takes_context(name: str) -> bool:
    """Whether a function of accel takes the context first."""
    return list(places(name))[:1] == ["ctx"]


def takes(name: str, keyword: str) -> bool:
    """Whether a function of accel takes a keyword; True where nothing is known of it."""
    known = signatures(name)
    return not known or any(
        each.kind is inspect.Parameter.VAR_KEYWORD
        or (each.name == keyword and each.kind not in (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL))
        for signature in known
        for each in signature.parameters.values()
    )
