# SPDX-License-Identifier: Apache-2.0
"""Classes that keep an Accelerator: attributes as variables for the passes, and as attributes again."""

from __future__ import annotations

from typing import NamedTuple, cast

import libcst as cst

from accel.migrate._script import Script
from accel.migrate._shared import Shared
from accel.migrate._tree import Change, OfVariables, small, targets, walk

_PREFIX = "self__"


class OwnContexts(NamedTuple):
    """The classes of a script that keep an Accelerator, and its variables."""

    classes: frozenset[str]
    holders: frozenset[str]


def find_kept(shared: Shared, module: cst.Module) -> OwnContexts:
    """Return the classes that keep an Accelerator, by `self.accelerator = Accelerator()` or by their base."""
    if any(isinstance(each, cst.Name) and each.value.startswith(_PREFIX) for each in walk(module)):
        return OwnContexts(frozenset(), frozenset())
    names = [node.name.value for node in module.body if isinstance(node, cst.ClassDef)]
    classes = {name for name in names if shared.kept(name)}
    holders = {_PREFIX + held for name in classes for held in shared.kept(name)}
    return OwnContexts(frozenset(classes), frozenset(holders))


def _own(node: cst.CSTNode) -> str:
    """Return the name of an attribute of `self`, empty for other expressions."""
    own = isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name) and node.value.value == "self"
    return cast(cst.Attribute, node).attr.value if own else ""


class Flattened(Change):
    """Write attributes of `self` as variables in the classes that keep an Accelerator; methods stay."""

    def __init__(self, kept: OwnContexts) -> None:
        self._kept = kept
        self._methods: list[set[str]] = []

    def visit_class_def(self, node: cst.ClassDef) -> bool:
        self._methods.append({each.name.value for each in walk(node) if isinstance(each, cst.FunctionDef)})
        return node.name.value in self._kept.classes

    def leave_class_def(self, original: cst.ClassDef, updated: cst.ClassDef) -> cst.ClassDef:
        _ = self._methods.pop()
        return updated

    def leave_attribute(self, original: cst.Attribute, updated: cst.Attribute) -> cst.BaseExpression:
        name = _own(original)
        if not self._methods or not name or name in self._methods[-1]:
            return updated
        return cst.Name(_PREFIX + name, lpar=original.lpar, rpar=original.rpar)


class Restored(OfVariables):
    """Write the variables as attributes again; the context and the trackers are attributes in these classes too."""

    def __init__(self, script: Script, kept: OwnContexts) -> None:
        self._script = script
        self._kept = kept
        self._inside: list[bool] = []
        self._taken: list[bool] = []  # whether a method takes the context by itself

    def visit_class_def(self, node: cst.ClassDef) -> None:
        self._inside.append(node.name.value in self._kept.classes)

    def leave_class_def(self, original: cst.ClassDef, updated: cst.ClassDef) -> cst.ClassDef:
        _ = self._inside.pop()
        return updated

    def visit_function_def(self, node: cst.FunctionDef) -> None:
        self._taken.append(any(each.name.value == self._script.ctx for each in node.params.params))

    def leave_function_def(self, original: cst.FunctionDef, updated: cst.FunctionDef) -> cst.FunctionDef:
        _ = self._taken.pop()
        return updated

    def leave_simple_statement_line(
        self, original: cst.SimpleStatementLine, updated: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine:
        ctx = self._script.ctx
        inner = small(updated)
        if isinstance(inner, cst.Assign) and self._is_inside() and targets(original) == [ctx]:
            target = cst.AssignTarget(cst.Attribute(cst.Name("self"), cst.Name(ctx)))
            return updated.with_changes(body=[inner.with_changes(targets=[target])])
        return updated

    def _is_inside(self) -> bool:
        return bool(self._inside and self._inside[-1])

    def leave_name(self, original: cst.Name, updated: cst.Name) -> cst.BaseExpression:
        name = original.value
        if name.startswith(_PREFIX):
            return self._attribute(name.removeprefix(_PREFIX), original)
        kept = name == self._script.trackers or (name == self._script.ctx and not any(self._taken))
        return self._attribute(name, original) if kept and self._is_inside() else updated

    @staticmethod
    def _attribute(name: str, node: cst.Name) -> cst.Attribute:
        return cst.Attribute(cst.Name("self"), cst.Name(name), lpar=node.lpar, rpar=node.rpar)

    def leave_simple_string(self, original: cst.SimpleString, updated: cst.SimpleString) -> cst.SimpleString:
        return updated.with_changes(value=updated.value.replace(_PREFIX, ""))
