# SPDX-License-Identifier: Apache-2.0
"""Functions that train one epoch a call: they take the state and return it, and their caller makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import libcst as cst

from accel.migrate._items import Items, restores
from accel.migrate._script import Script, is_seeding
from accel.migrate._tree import (
    SCOPES,
    Change,
    Remarks,
    argument,
    block,
    bound,
    called,
    calls,
    changed_by,
    expression,
    full_name,
    keyword_arg,
    leading,
    led_by,
    loads,
    outer_loops,
    own_lines,
    small,
    statement,
    walk,
    with_block,
)

_SHARE = "batch_size= is the size on each rank, as before; prepare_loader(global_batch=) cuts one batch over all ranks"


class Epochs(NamedTuple):
    """A function that trains one epoch a call, and the one line that calls it, within a loop of another scope."""

    function: cst.FunctionDef
    call: cst.Call
    returns: bool
    scope: cst.CSTNode

    def of_caller(self, value: cst.BaseExpression | None) -> Mapping[str, cst.BaseExpression] | None:
        """Return the caller's words for the names of a value; None where it has none."""
        if value is None:
            return {}
        given = dict(bound(self.call, self.function))
        local = {param.name.value for param in self.function.params.params}
        made = {
            name.value
            for each in walk(self.function.body)
            for name in walk(each)
            if isinstance(each, (cst.AssignTarget, cst.CompFor, cst.For)) and isinstance(name, cst.Name)
        }
        names = loads(value)
        if names & (made - local) or (names & local) - given.keys():
            return None
        return {name: given[name] for name in names & local}


def find_epochs(script: Script, module: cst.Module) -> dict[str, Epochs]:
    """Return the functions with one loop that trains; a single line, in a loop of another scope, calls each."""
    found: dict[str, Epochs] = {}
    scopes = [module, *(each for each in walk(module) if isinstance(each, cst.FunctionDef))]
    names = [each.value for each in walk(module) if isinstance(each, cst.Name)]
    for function in (each for each in module.body if isinstance(each, cst.FunctionDef)):
        name = function.name.value
        methods = {script.method(call) for call in calls(function)}
        if name not in script.looped or names.count(name) != 2 or methods & {"save_state", "load_state"}:
            continue
        if "backward" not in methods or any(isinstance(each, cst.Yield) for each in walk(function)):
            continue
        loops = [loop for scope in scopes for loop in outer_loops(_body(scope))]
        lines = [line for loop in loops for line in own_lines(loop.body) if _is_call(line, name)]
        scope = next((each for each in scopes if any(_is_call(line, name) for line in own_lines(_body(each)))), None)
        if len(lines) != 1 or scope is None:
            continue
        if any(script.method(call) == "backward" for line in own_lines(_body(scope)) for call in calls(line)):
            continue
        inside = walk(function.body, SCOPES)
        returns = any(isinstance(each, cst.Return) and each.value is not None for each in inside)
        found[name] = Epochs(function, cast(cst.Call, called(lines[0])), returns, scope)
    callers = [id(each.scope) for each in found.values()]
    return {name: each for name, each in found.items() if callers.count(id(each.scope)) == 1}


def _body(scope: cst.FunctionDef | cst.Module) -> cst.CSTNode:
    return scope.body if isinstance(scope, cst.FunctionDef) else scope


def _is_call(line: cst.SimpleStatementLine, name: str) -> bool:
    call = called(line)
    inner = small(line)
    plain = isinstance(inner, cst.Expr) or (isinstance(inner, cst.Assign) and len(inner.targets) == 1)
    return plain and call is not None and full_name(call.func) == name


class OnState(Change):
    """A function that takes the state after its context and returns it before what it returned."""

    def __init__(self, script: Script, epochs: Epochs) -> None:
        self._script = script
        self._epochs = epochs
        self._depth = 0

    def applied(self, node: cst.FunctionDef) -> cst.FunctionDef:
        """Return the function with the state among its parameters and in what it returns."""
        node = changed_by(node, self)
        params = list(node.params.params)
        at = next((at for at, each in enumerate(params) if each.name.value in self._script.holders), -1) + 1
        params.insert(at, cst.Param(cst.Name(self._script.state)))
        params = [each.with_changes(comma=cst.MaybeSentinel.DEFAULT) if at else each for at, each in enumerate(params)]
        if at == len(params) - 1 and at > 0:
            params[at - 1] = params[at - 1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        body = block(node)
        if not isinstance(small(body[-1]), (cst.Return, cst.Raise)):
            body.append(cst.SimpleStatementLine([self._returned(cst.Return())]))
        return with_block(node.with_changes(params=node.params.with_changes(params=params)), body)

    def visit_function_def(self, node: cst.FunctionDef) -> bool:
        self._depth += 1
        return self._depth == 1

    def leave_function_def(self, original: cst.FunctionDef, updated: cst.FunctionDef) -> cst.FunctionDef:
        self._depth -= 1
        return updated

    def leave_return(self, original: cst.Return, updated: cst.Return) -> cst.Return:
        return self._returned(updated) if self._depth == 1 else updated

    def _returned(self, node: cst.Return) -> cst.Return:
        state = cst.Name(self._script.state)
        if node.value is None:
            parts = [state, cst.Name("None")] if self._epochs.returns else [state]
        elif isinstance(node.value, cst.Tuple):
            parts = [state, _grouped(node.value)]
        else:
            parts = [state, node.value]
        return node.with_changes(value=_joined(parts), whitespace_after_return=cst.SimpleWhitespace(" "))


def _joined(parts: Sequence[cst.BaseExpression]) -> cst.BaseExpression:
    """Return several expressions as a tuple without parentheses, one as it is."""
    return parts[0] if len(parts) == 1 else cst.Tuple([cst.Element(each) for each in parts], lpar=[], rpar=[])


def _grouped(node: cst.BaseExpression) -> cst.BaseExpression:
    return node if node.lpar else node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def calling(script: Script, epochs: Epochs, line: cst.SimpleStatementLine) -> cst.SimpleStatementLine:
    """Return the line that calls such a function, with the state given and taken."""
    state = cst.Name(script.state)
    call = cast(cst.Call, called(line))
    args = list(call.args)
    at = next((at for at, each in enumerate(args) if script.holds(each.value)), -1) + 1
    keyed = args[at - 1].keyword is not None if at else bool(args) and args[0].keyword is not None
    made = keyword_arg(state.value, state) if keyed else cst.Arg(state)
    if at and at == len(args):
        made = made.with_changes(comma=args[-1].comma)
        args[-1] = args[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    elif args:
        made = made.with_changes(comma=args[max(at - 1, 0)].comma)
    args.insert(at, made)
    call = call.with_changes(args=args)
    inner = line.body[0]
    if isinstance(inner, cst.Assign):
        parts: list[cst.BaseExpression] = [state, inner.targets[0].target]
        parts[1] = _grouped(parts[1]) if isinstance(parts[1], cst.Tuple) else parts[1]
    else:
        parts = [state, cst.Name("_")] if epochs.returns else [state]
    made_line = cst.Assign([cst.AssignTarget(cast(cst.BaseAssignTargetExpression, _joined(parts)))], call)
    return line.with_changes(body=[made_line])


class Caller(Change):
    """A scope with a loop that calls such a function: the state is created above the loop."""

    def __init__(
        self,
        script: Script,
        notes: Remarks,
        scope: cst.FunctionDef | cst.Module,
        loop: cst.CSTNode,
        line: cst.SimpleStatementLine,
        epochs: Epochs,
        length: cst.BaseExpression | None,
    ) -> None:
        self._script = script
        self._notes = notes
        self._scope = scope
        self._loop = loop
        self._line = line
        self._epochs = epochs
        self._length = length
        self._items = Items(script, notes, scope)
        self._anchor = next(iter(restores(script, scope, loop)), loop)

    def applied(self) -> cst.CSTNode:
        """Return the scope with the state made, given and taken."""
        return changed_by(self._scope, self)

    def on_leave(self, original: cst.CSTNode, updated: cst.CSTNode) -> object:
        result = calling(self._script, self._epochs, self._line) if original is self._line else updated
        if original is self._loop:
            result = self._items.outer(cast(cst.BaseStatement, result))
        if original is self._anchor:
            made = state_lines(self._script, self._notes, self._scope, self._items.made(), self._length)
            node = cast(cst.BaseStatement, result)
            first = [line for line in leading(node)[:1] if line.comment is None]
            made[0] = led_by(made[0], [*first, *leading(made[0])])
            return cst.FlattenSentinel([*made, node])
        return result


_DRAWN = "no seed is set: rank 0 draws one, shares and logs it, and checkpoints of the state keep it"


def state_lines(
    script: Script, notes: Remarks, scope: cst.CSTNode, items: Sequence[cst.BaseStatement], length: cst.CSTNode | None
) -> list[cst.BaseStatement]:
    """Return the lines that create the items of a checkpoint, and then the state."""
    options = ""
    parts: dict[str, cst.BaseExpression] = {}
    seed, marks = _seed(script, notes, scope)
    if seed is not None:
        options += ", seed={seed}"
        parts["seed"] = seed
    if length is not None and not script.carried:
        options += ", accumulation={length}"
        parts["length"] = cast(cst.BaseExpression, length)
    lines = [*items, statement(f"{script.state} = accel.train_state({script.ctx}{options})", **parts)]
    lines[0] = led_by(lines[0], [notes.change(_SHARE), *marks, *leading(lines[0])])
    return lines


def _seed(script: Script, notes: Remarks, scope: cst.CSTNode) -> tuple[cst.BaseExpression | None, list[cst.EmptyLine]]:
    """Return the seed of a state, None for the default, and the mark of one that is drawn."""
    drawn = expression(f"accel.seeding.draw_seed({script.ctx})")
    guarded = False
    for node in walk(scope):
        if isinstance(node, cst.If) and any(is_seeding(call) for call in calls(node)):
            guarded = True
        if isinstance(node, cst.Call) and is_seeding(node):
            value = argument(node, "seed", 0)
            if value is None or isinstance(value, cst.Call):
                return None, []
            if not guarded:
                return value, []
            chosen = expression("{value} if {value} is not None else {drawn}", value=value, drawn=drawn)
            return chosen, [notes.change(_DRAWN)]
    return (None, []) if script.seeded else (drawn, [notes.change(_DRAWN)])
