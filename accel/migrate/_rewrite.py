# SPDX-License-Identifier: Apache-2.0
"""A script's text in, the same script on accel out: the order of the passes, the first and the last of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, cast

import libcst as cst

from accel.errors import ConfigError
from accel.migrate._backward import PlainBackward
from accel.migrate._check import noted, noted_uses
from accel.migrate._checkpoints import Checkpoints
from accel.migrate._guards import asks_main, calls_all, opened
from accel.migrate._imports import Imports, bound_names
from accel.migrate._layout import fitted, unannotated, unjoined, with_comments
from accel.migrate._loops import Training
from accel.migrate._names import Names
from accel.migrate._nested import TOO_DEEP, Asked, in_child, is_deep
from accel.migrate._reading import Evaluation, Lengths
from accel.migrate._script import Script, ScriptPass
from accel.migrate._session import Sessions
from accel.migrate._shared import ALONE, Migrated, Shared, shared_in
from accel.migrate._trackers import HandedTrackers
from accel.migrate._tree import (
    DECIDE,
    MARK,
    Change,
    Lines,
    OfVariables,
    Remarks,
    argument,
    block,
    called,
    changed_by,
    decisions,
    full_name,
    leading,
    led_by,
    loads,
    method_of,
    small,
    statement,
    targets,
    text_of,
    walk,
)

_STAND_INS = ("DummyOptim", "DummyScheduler")


class Before(ScriptPass):
    """Bring a script into the form that the other passes read."""

    def leave_with(self, original: cst.With, updated: cst.With) -> cst.With | cst.FlattenSentinel[cst.BaseStatement]:
        """Unfold `with LocalSGD(...) as local:`."""
        item = original.items[0]
        call = item.item
        if len(original.items) != 1 or not isinstance(call, cst.Call) or self._script.origin(call.func) != "LocalSGD":
            return updated
        name = full_name(cast(cst.Name, item.asname.name)) if item.asname else "local_sgd"
        model = argument(call, "model", 1)
        every = argument(call, "local_sgd_steps", 2)
        if model is None or every is None:
            return updated
        self._script.local[name] = full_name(model)
        marks: list[cst.EmptyLine] = []
        if argument(call, "enabled", 3) is not None:
            marks.append(self._notes.change("enabled= of LocalSGD is left out: averages are taken in any case"))
        made = led_by(
            statement(f"{name} = accel.parallel.LocalSgd(every={{every}})", every=every),
            [*leading(updated), *marks],
        )
        return cst.FlattenSentinel([made, *block(updated)])

    def leave_function_def(self, original: cst.FunctionDef, updated: cst.FunctionDef) -> cst.FunctionDef:
        """Take the decorator `find_executable_batch_size` off."""
        kept: list[cst.Decorator] = []
        lines: list[cst.EmptyLine] = []
        for each in updated.decorators:
            call = each.decorator
            if isinstance(call, cst.Call) and self._script.origin(call.func) == "find_executable_batch_size":
                lines += [*each.leading_lines]
            else:
                kept.append(each)
        if len(kept) == len(updated.decorators):
            return updated
        before = [*updated.leading_lines, *lines, *updated.lines_after_decorators]
        if updated.leading_lines and lines:
            before = [*updated.leading_lines, *[each for each in lines if each.comment]]
        return updated.with_changes(decorators=kept, leading_lines=before, lines_after_decorators=[])

    def leave_if_exp(self, original: cst.IfExp, updated: cst.IfExp) -> cst.BaseExpression:
        """Take torch's own class where a condition chooses DeepSpeed's placeholder."""
        if self._is_stand_in(original.orelse):
            return updated.body.with_changes(lpar=[], rpar=[])
        if self._is_stand_in(original.body):
            return updated.orelse.with_changes(lpar=[], rpar=[])
        return updated

    def _is_stand_in(self, node: cst.CSTNode) -> bool:
        return any(self._script.origin(each) in _STAND_INS for each in walk(node) if isinstance(each, cst.Name))

    def leave_if(
        self, original: cst.If, updated: cst.If
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement] | cst.RemovalSentinel:
        script = self._script
        body = block(updated)
        if isinstance(updated.orelse, cst.Else):
            other = block(updated.orelse)
            for mine, theirs in ((body, other), (other, body)):
                if len(theirs) == 1 and self._is_stand_in(theirs[0]) and not isinstance(theirs[0], cst.If):
                    return cst.FlattenSentinel([led_by(mine[0], [*leading(updated), *leading(mine[0])]), *mine[1:]])
        if (newer := _asks_version(original.test)) is not None:
            chosen = body if newer else block(updated.orelse) if updated.orelse is not None else []
            if not chosen:
                return cst.RemoveFromParent()
            return cst.FlattenSentinel([led_by(chosen[0], [*leading(updated), *leading(chosen[0])]), *chosen[1:]])
        if updated.orelse is None and asks_main(script, original.test) and calls_all(script, original):
            return cst.FlattenSentinel(opened(script, updated))
        return updated


def _asks_version(test: cst.BaseExpression) -> bool | None:
    """Whether a condition asks for a new Accelerate; False for an old one, None for another condition."""
    if not isinstance(test, cst.Comparison) or "accelerate.__version__" not in text_of(test.left):
        return None
    operator = test.comparisons[0].operator
    if isinstance(operator, (cst.GreaterThan, cst.GreaterThanEqual)):
        return True
    return False if isinstance(operator, (cst.LessThan, cst.LessThanEqual)) else None


def _imports_tests(node: cst.If) -> bool:
    return any(
        isinstance(each, cst.ImportFrom)
        and each.module is not None
        and full_name(each.module).startswith("accelerate.test_utils")
        for each in walk(node)
    )


def drop_scaffolds(module: cst.Module, notes: Remarks) -> cst.Module:
    """Leave out what takes the place of data in Accelerate's own tests."""
    lines = Lines()
    for node in cast("Sequence[cst.BaseStatement]", module.body):
        if isinstance(node, cst.If) and node.orelse is None and _imports_tests(node):
            lines.hold([notes.change("data of accelerate.test_utils is left out")])
            notes.leave_out(node)
        else:
            lines.add(node)
    return module.with_changes(body=lines.body, footer=[*lines.rest(), *module.footer])


class Dropped(ScriptPass):
    """Leave out statements that nothing takes the place of, with their comments."""

    def leave_indented_block(self, original: cst.IndentedBlock, updated: cst.IndentedBlock) -> cst.IndentedBlock:
        body, rest = self._kept(updated.body)
        lines = [*rest, *updated.footer] if rest else updated.footer
        return updated.with_changes(body=body or [cst.SimpleStatementLine([cst.Pass()])], footer=lines)

    def leave_if(self, original: cst.If, updated: cst.If) -> cst.If | cst.RemovalSentinel:
        """Leave out a condition with all of its lines."""
        gone = original.orelse is None and all(self._goes(each) for each in block(original))
        if gone:
            self._notes.leave_out(original)
        return cst.RemoveFromParent() if gone else updated

    def leave_module(self, original: cst.Module, updated: cst.Module) -> cst.Module:
        body, rest = self._kept(updated.body)
        return updated.with_changes(body=body, footer=[*rest, *updated.footer])

    def _kept(self, nodes: Sequence[object]) -> tuple[list[cst.BaseStatement], list[cst.EmptyLine]]:
        lines = Lines()
        for node in cast("Sequence[cst.BaseStatement]", nodes):
            if self._goes(node):
                self._notes.leave_out(node)
            else:
                lines.add(node)
        return lines.body, lines.rest()

    def _goes(self, node: cst.BaseStatement) -> bool:
        script = self._script
        inner = small(node)
        if isinstance(inner, (cst.Nonlocal, cst.Global)):
            return all(each.name.value in script.holders for each in inner.names)
        if isinstance(inner, cst.Assign) and script.is_attribute(inner.targets[0].target, "native_amp"):
            return True  # autocast asks the device
        if isinstance(inner, cst.Assign) and isinstance(inner.value, cst.Name) and script.is_alias(node):
            return True
        if len(targets(node)) == 1 and targets(node)[0] in script.taken:
            made = script.configures(script.assigned[targets(node)[0]])
            return all(script.origin(each.func) in _CONFIGURES for each in made)
        call = called(node)
        if call is None:
            return False
        method = script.method(call)
        if method == "end_training" and not script.tracks:
            return True
        if method in ("register_for_checkpointing", "destroy_process_group"):
            return True
        if method.startswith("register_"):
            return any(full_name(arg.value) in script.hooked for arg in call.args)
        owner, name = method_of(call)
        moved = full_name(owner) if owner is not None else ""
        if name == "to" and moved in script.models | script.loaders and len(call.args) == 1:
            return targets(node) in ([], [moved]) and script.is_device(call.args[0].value) and moved in script.prepared
        return False


_CONFIGURES = (
    *("DataLoaderConfiguration", "ProjectConfiguration", "GradientAccumulationPlugin"),
    *("DistributedDataParallelKwargs", "InitProcessGroupKwargs", "FullyShardedDataParallelPlugin"),
    *("DDPCommunicationHookType", "GradScalerKwargs", "AutocastKwargs", "ProfileKwargs"),
)


class _Renamed(Change):
    """Gives a variable another name, and the keywords of calls too; attributes stay."""

    def __init__(self, old: str, new: str) -> None:
        self._old = old
        self._new = new

    def leave_attribute(self, original: cst.Attribute, updated: cst.Attribute) -> cst.Attribute:
        return updated.with_changes(attr=original.attr)

    def leave_name(self, original: cst.Name, updated: cst.Name) -> cst.Name:
        return updated.with_changes(value=self._new) if updated.value == self._old else updated


_PREFIX = "self__"


class _OwnContexts(NamedTuple):
    """The classes of a script that keep an Accelerator, and its variables."""

    classes: frozenset[str]
    holders: frozenset[str]


def _find_kept(shared: Shared, module: cst.Module) -> _OwnContexts:
    """Return the classes that keep an Accelerator, by `self.accelerator = Accelerator()` or by their base."""
    if any(isinstance(each, cst.Name) and each.value.startswith(_PREFIX) for each in walk(module)):
        return _OwnContexts(frozenset(), frozenset())
    names = [node.name.value for node in module.body if isinstance(node, cst.ClassDef)]
    classes = {name for name in names if shared.kept(name)}
    holders = {_PREFIX + held for name in classes for held in shared.kept(name)}
    return _OwnContexts(frozenset(classes), frozenset(holders))


def _own(node: cst.CSTNode) -> str:
    """Return the name of an attribute of `self`, empty for other expressions."""
    own = isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name) and node.value.value == "self"
    return cast(cst.Attribute, node).attr.value if own else ""


class _Flattened(Change):
    """Write attributes of `self` as variables in the classes that keep an Accelerator; methods stay."""

    def __init__(self, kept: _OwnContexts) -> None:
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


class _Restored(OfVariables):
    """Write the variables as attributes again; the context and the trackers are attributes in these classes too."""

    def __init__(self, script: Script, kept: _OwnContexts) -> None:
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


def rewrite(text: str, where: str = "", *, cells: bool = False, shared: Shared = ALONE) -> Migrated:
    """Return a script on accel; one without Accelerate, or with notes already, as it is."""
    if DECIDE in text:
        return Migrated(text, tuple(decisions(text)))
    if "accelerat" not in text:
        return Migrated(text)
    if is_deep(text, where):
        return in_child(Asked(text, where, cells, shared))
    return rewrite_here(text, where, cells=cells, shared=shared)


def rewrite_here(text: str, where: str, *, cells: bool, shared: Shared) -> Migrated:
    """Return a script on accel, written by this process."""
    try:
        module = cst.parse_module(text)
    except cst.ParserSyntaxError as error:
        problem = re.sub(r"^parser error: error at \d+:\d+: ", "", error.message.splitlines()[0])
        above = re.findall(r"^#@accel-cell (\d+)$", "\n".join(text.split("\n")[: error.raw_line]), flags=re.MULTILINE)
        place = f"{where}, cell {int(above[-1]) + 1}" if cells and above else f"{where}:{error.raw_line}"
        raise ConfigError("the file is not valid Python", got=problem, where=place) from None
    try:
        module = unjoined(unannotated(module))
        if "accel" in loads(module) - bound_names(module, imported=True):  # a variable of this name
            module = changed_by(module, _Renamed("accel", "accelerator"))
        return _passed(text, module, shared.joined(shared_in([text])), cells=cells)
    except RecursionError:
        raise ConfigError("the file cannot be rewritten", got=TOO_DEEP, where=where) from None


def _passed(text: str, module: cst.Module, shared: Shared, *, cells: bool) -> Migrated:
    script = Script(module, shared=shared)
    kept = _find_kept(shared, module)
    if not script.uses_accelerate and not kept.classes:
        written = noted_uses(text)
        return Migrated(written, tuple(decisions(written)))
    if kept.classes:
        module = changed_by(module, _Flattened(kept))
        script = Script(module, kept.holders, shared)
    notes = Remarks()
    trained = changed_by(module, PlainBackward(script, notes, module))
    if trained is not module:
        module = trained
        script = Script(module, kept.holders, shared)
    passes: list[Change] = [
        Before(script, notes),
        Lengths(script, notes),
        HandedTrackers(script, notes, module),
        Evaluation(script, notes),
        Training(script, notes),
        Checkpoints(script, notes),
        Sessions(script, notes, module, cells=cells),
        Dropped(script, notes),
        Names(script, notes),
        Imports(script, notes),
        _Restored(script, kept),
    ]
    module = drop_scaffolds(module, notes)
    for each in passes:
        module = changed_by(module, each)
    written = fitted(text, module.code, module.default_indent)
    written = with_comments(text, written, MARK, notes.gone)
    written = noted(text, written, script.ctx, script.state, script.trackers)
    written, changes = notes.finish(written)
    return Migrated(written, tuple(decisions(written)), changes)
