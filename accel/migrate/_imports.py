# SPDX-License-Identifier: Apache-2.0
"""Imports of a script: `import accel` for Accelerate's; loggers that functions with a context create."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import libcst as cst

from accel.migrate._script import Script, ScriptPass
from accel.migrate._tree import (
    Change,
    Lines,
    Remarks,
    argument,
    block,
    called,
    calls,
    changed_at,
    changed_by,
    comments,
    expression,
    full_name,
    leading,
    led_by,
    loads,
    method_of,
    small,
    statement,
    targets,
    walk,
    with_block,
)


class Imports(ScriptPass):
    """`import accel` in place of the first import of Accelerate; loggers where there is a context."""

    def __init__(self, script: Script, notes: Remarks) -> None:
        super().__init__(script, notes)
        self._loggers: dict[str, cst.Call] = {}

    def visit_module(self, node: cst.Module) -> None:
        for line in walk(node):
            call = called(line)
            if call is not None and self._script.origin(call.func) == "get_logger" and targets(line):
                self._loggers[targets(line)[0]] = call

    def leave_function_def(self, original: cst.FunctionDef, updated: cst.FunctionDef) -> cst.FunctionDef:
        """Make a logger that knows its rank, where a function has the context."""
        names = {param.name.value for param in updated.params.params}
        body = block(updated)
        used = [name for name in self._loggers if name in loads(updated.body)]
        if not used:
            return updated
        if self._script.ctx in names:
            return with_block(updated, _after_docstring(body, [self._logger(name) for name in used]))
        return with_block(updated, [self._inside(node, used) for node in body])

    def _inside(self, node: cst.BaseStatement, used: Sequence[str]) -> cst.BaseStatement:
        opened = isinstance(node, cst.With) and any(
            item.asname is not None and full_name(cast(cst.Name, item.asname.name)) == self._script.ctx
            for item in node.items
        )
        if not opened:
            return node
        mine = [name for name in used if name in loads(cast(cst.With, node).body)]
        return with_block(cast(cst.With, node), [*[self._logger(name) for name in mine], *block(node)])

    def _logger(self, name: str) -> cst.BaseStatement:
        call = self._loggers[name]
        first = call.args[0].value if call.args else expression("__name__")
        level = argument(call, "log_level")
        options = ", level={level}" if level is not None else ""
        parts = {"level": level} if level is not None else {}
        return statement(f"{name} = accel.get_logger({{name}}, {self._script.ctx}{options})", name=first, **parts)

    def leave_module(self, original: cst.Module, updated: cst.Module) -> cst.Module:
        used = loads(_without_imports(updated))
        updated = _with_inner_imports(updated, lambda node: self._import(node, used))
        lines = Lines()
        written = _imports(updated, "accel")
        for node in cast("Sequence[cst.BaseStatement]", updated.body):
            made = self._import(node, used)
            if made is None:
                lines.add(node)
                continue
            own = leading(node)
            if not written:
                lines.add(led_by(statement("import accel"), own))
            if not made:
                lines.hold(comments(node) if written else comments(led_by(node, [])))
            written = True
            for each in made:
                lines.add(each)
        module = updated.with_changes(body=lines.body, footer=[*lines.rest(), *updated.footer])
        if not written and "accel" in loads(_without_imports(module)):
            module = _with_import(module)
        body = list(cast("Sequence[cst.BaseStatement]", module.body))
        mine = [node for node in body if _key(node) == (False, "accel")]
        if mine:
            module = module.with_changes(body=_sorted(body, mine[0]))
        module = self._without_loggers(module)
        code = _without_imports(module)
        used = {full_name(each).partition(".")[0] for each in walk(code) if isinstance(each, cst.Attribute)}
        for name in ("contextlib", "functools", "torch"):
            if name in used and name not in bound_names(module):
                module = _with_import(module, name)
        return module

    def _import(self, node: cst.BaseStatement, used: set[str]) -> list[cst.BaseStatement] | None:
        inner = small(node)
        if isinstance(inner, cst.ImportFrom) and inner.module is not None and not inner.relative:
            if full_name(inner.module).split(".")[0] != "accelerate":
                return None
            if isinstance(inner.names, cst.ImportStar):
                note = self._notes.decide("names of Accelerate that this line brings", "names")
                return [led_by(node, [note])]
            kept = [
                each
                for each in inner.names
                if (each.evaluated_alias or each.evaluated_name) in used and each.evaluated_name != "get_logger"
            ]
            if not kept:
                return []
            kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            note = [self._notes.decide("names of Accelerate that are left", "names")]
            line = cast(cst.SimpleStatementLine, node)
            return [line.with_changes(body=[inner.with_changes(names=kept)], leading_lines=note)]
        if isinstance(inner, cst.Import):
            kept = [each for each in inner.names if each.evaluated_name.split(".")[0] != "accelerate"]
            if len(kept) == len(inner.names):
                return None
            if any((each.evaluated_alias or "accelerate") in used for each in inner.names if each not in kept):
                note = self._notes.decide("names of Accelerate that are left", "names")
                return [led_by(node, [note])]
            if not kept:
                return []
            kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            return [led_by(cast(cst.SimpleStatementLine, node).with_changes(body=[inner.with_changes(names=kept)]), [])]
        return None

    def _without_loggers(self, module: cst.Module) -> cst.Module:
        if not self._loggers:
            return module
        lines = Lines()
        plain = {name for name in self._loggers if not self._only_inside(module, name)}
        module = changed_by(module, _PlainLoggers(plain))
        for node in cast("Sequence[cst.BaseStatement]", module.body):
            name = next(iter(targets(node)), "")
            if name not in self._loggers or called(node) is None:
                lines.add(node)
            elif name not in plain:
                lines.drop(node)
            else:
                made = statement(f"{name} = logging.getLogger({{name}})", name=self._loggers[name].args[0].value)
                why = self._notes.change("this logger knows no rank; functions with ctx make their own")
                lines.add(led_by(made, [*leading(node), why]))
        module = module.with_changes(body=lines.body)
        if any(full_name(call.func) == "logging.getLogger" for call in calls(module)) and not _imports(
            module, "logging"
        ):
            module = _with_import(module, "logging")
        return module

    def _only_inside(self, module: cst.Module, name: str) -> bool:
        for node in cast("Sequence[cst.BaseStatement]", module.body):
            if name in targets(node):
                continue
            makes = isinstance(node, cst.FunctionDef) and any(targets(each) == [name] for each in walk(node))
            if name in loads(node) and not makes:
                return False
        return True


class _PlainLoggers(Change):
    """Calls of loggers that know no rank, without the arguments that only Accelerate's take."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def visit_function_def(self, node: cst.FunctionDef) -> bool:
        return not any(self._names & {*targets(each)} for each in walk(node))  # a function with its own logger

    def leave_call(self, original: cst.Call, updated: cst.Call) -> cst.Call:
        owner, _ = method_of(original)
        if owner is None or full_name(owner) not in self._names:
            return updated
        kept = [each for each in updated.args if not (each.keyword and each.keyword.value in _OF_RANKS)]
        if len(kept) == len(updated.args):
            return updated
        last = [each.with_changes(comma=cst.MaybeSentinel.DEFAULT) for each in kept[-1:]]
        return updated.with_changes(args=[*kept[:-1], *last])


_OF_RANKS = {"main_process_only", "in_order"}


def _imports(module: cst.Module, name: str) -> bool:
    return any(
        isinstance(each, cst.Import) and any(alias.evaluated_name == name for alias in each.names)
        for each in walk(module)
    )


def bound_names(module: cst.Module, *, imported: bool = False) -> set[str]:
    """Return the names that imports of a script bind, and its lines too if not `imported`."""
    found = set[str]() if imported else {name for each in walk(module) for name in targets(each)}
    for each in walk(module):
        if isinstance(each, (cst.Import, cst.ImportFrom)) and not isinstance(each.names, cst.ImportStar):
            found |= {(alias.evaluated_alias or alias.evaluated_name).partition(".")[0] for alias in each.names}
    return found


def _with_import(module: cst.Module, name: str = "accel") -> cst.Module:
    """Return a script that imports a module, among its first imports."""
    body = list(cast("Sequence[cst.BaseStatement]", module.body))
    at = next((i for i, node in enumerate(body) if isinstance(small(node), (cst.Import, cst.ImportFrom))), 0)
    if isinstance(small(body[at]), cst.ImportFrom) and "__future__" in cst.Module([]).code_for_node(body[at]):
        at += 1
    made = led_by(statement(f"import {name}"), leading(body[at]))
    body[at] = led_by(body[at], [])
    return module.with_changes(body=_sorted([*body[:at], made, *body[at:]], made))


def _sorted(body: list[cst.BaseStatement], made: cst.BaseStatement) -> list[cst.BaseStatement]:
    """Return statements with a new import in its place among those around it, where these are in order."""
    at = next(index for index, each in enumerate(body) if each is made)
    first = at
    while first > 0 and _joins(body[first]) and _key(body[first - 1]) is not None:
        first -= 1
    last = at + 1
    while last < len(body) and _joins(body[last]) and _key(body[last]) is not None:
        last += 1
    others = [*body[first:at], *body[at + 1 : last]]
    for key in (_key, _key_by_name):
        keys = [cast("tuple[bool, str]", key(each)) for each in others]
        if others and keys == sorted(keys):
            new = sum(each < cast("tuple[bool, str]", key(made)) for each in keys)
            run = [*others[:new], made, *others[new:]]
            own = [[] if each is body[first] or each is made else leading(each) for each in run]
            own[0] = [*leading(body[first]), *own[0]]
            return [*body[:first], *map(led_by, run, own), *body[last:]]
    return body


def _joins(node: cst.BaseStatement) -> bool:
    """Whether a line is right below the one above it."""
    return not any(line.comment is None for line in leading(node))


def _key(node: cst.BaseStatement) -> tuple[bool, str] | None:
    """Return the order of an import as isort has it, plain ones first; None for other lines."""
    inner = small(node)
    if isinstance(inner, cst.Import):
        return False, inner.names[0].evaluated_name.lower()
    if isinstance(inner, cst.ImportFrom) and inner.module is not None and not inner.relative:
        return True, full_name(inner.module).lower()
    return None


def _key_by_name(node: cst.BaseStatement) -> tuple[bool, str] | None:
    key = _key(node)
    return None if key is None else (False, key[1])


def _after_docstring(body: list[cst.BaseStatement], made: list[cst.BaseStatement]) -> list[cst.BaseStatement]:
    inner = small(body[0]) if body else None
    at = 1 if isinstance(inner, cst.Expr) and isinstance(inner.value, (cst.SimpleString, cst.ConcatenatedString)) else 0
    return [*body[:at], *made, *body[at:]]


def _without_imports(module: cst.Module) -> cst.Module:
    """Leave out the lines that import, to read the other names."""

    def change(original: cst.CSTNode, line: cst.CSTNode) -> cst.CSTNode | cst.RemovalSentinel:
        return cst.RemoveFromParent() if isinstance(small(line), (cst.Import, cst.ImportFrom)) else line

    return changed_at(module, cst.SimpleStatementLine, change)


def _with_inner_imports(
    module: cst.Module, change: Callable[[cst.BaseStatement], list[cst.BaseStatement] | None]
) -> cst.Module:
    """Rewrite the imports within blocks; `import accel` is above them."""

    def changed(original: cst.IndentedBlock, inner: cst.IndentedBlock) -> cst.IndentedBlock:
        lines = Lines()
        for node in inner.body:
            made = change(node)
            if made == []:
                lines.drop(node)
            for each in [node] if made is None else made:
                lines.add(each)
        body = lines.body or [cst.SimpleStatementLine([cst.Pass()])]
        return inner.with_changes(body=body, footer=[*lines.rest(), *inner.footer])

    return changed_at(module, cst.IndentedBlock, changed)
