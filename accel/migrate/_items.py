# SPDX-License-Identifier: Apache-2.0
"""Items of checkpoints: what is prepared or registered, hooks as folders of files, trackers."""

from __future__ import annotations

from typing import cast

import libcst as cst

from accel.migrate._script import Script
from accel.migrate._tree import (
    Lines,
    Remarks,
    block,
    calls,
    children,
    expression,
    full_name,
    text_of,
    walk,
    with_block,
)

_POSITION = "the state holds the position in the data: nothing is skipped by hand"
_HOOKS = {"register_save_state_pre_hook": "save", "register_load_state_pre_hook": "load"}


def prepared(script: Script, node: cst.CSTNode) -> dict[str, str]:
    """Return names that a node prepares or registers, with the conditions of the branches that do."""
    found: dict[str, str] = {}
    if isinstance(node, cst.If):
        body = prepared(script, node.body)
        other = prepared(script, node.orelse) if node.orelse is not None else {}
        test = text_of(node.test)
        test = f"({test})" if isinstance(node.test, cst.BooleanOperation) and not node.test.lpar else test
        for name in {**body, **other}:
            if name in body and name in other:
                found[name] = body[name] if body[name] == other[name] else ""
            else:
                own, inner = (test, body[name]) if name in body else (f"not {test}", other[name])
                found[name] = f"{own} and {inner}" if inner else own
        return found
    if isinstance(node, cst.Call):
        method = script.method(node)
        if method.startswith("prepare") or method == "register_for_checkpointing":
            return {full_name(arg.value): "" for arg in node.args}
    for each in children(node):
        for name, test in prepared(script, each).items():
            found[name] = "" if not found.get(name, test) else test
    return found


def restores(script: Script, scope: cst.CSTNode, before: cst.CSTNode) -> list[cst.CSTNode]:
    """Return the statements before a loop, in the same block, that load a state."""
    for node in walk(scope):
        body = getattr(node, "body", None)
        if isinstance(body, (list, tuple)) and any(each is before for each in cast("tuple[object, ...]", body)):
            found: list[cst.CSTNode] = []
            for each in cast("tuple[cst.CSTNode, ...]", body):
                if each is before:
                    return found
                if any(script.method(call) in ("load_state", "save_state") for call in calls(each)):
                    found.append(each)
    return []


class Items:
    """The items of a scope's checkpoints, and what its loops need for a resume."""

    def __init__(self, script: Script, notes: Remarks, scope: cst.CSTNode) -> None:
        self._script = script
        self._notes = notes
        methods = {script.method(call) for call in calls(scope)}
        self.used = bool(methods & {"save_state", "load_state"})
        self._loads = "load_state" in methods
        self._scope = scope

    def made(self) -> list[cst.BaseStatement]:
        """Return the lines that make the items, if the scope saves or loads any."""
        if not self.used:
            return []
        held = self._held()
        pairs = [f'"{_item_name(self._script, name)}": {name}' for name, test in held.items() if not test]
        line = f"items = {{{', '.join(pairs)}}}"
        if len(line) > 100:
            line = "items = {\n" + "".join(f"    {pair},\n" for pair in pairs) + "}"
        made: list[cst.BaseStatement] = [cst.parse_statement(line)]
        models = [name for name in held if name in self._script.models]
        listed = self._script.free("prepared", "prepared_models") if any(held[name] for name in models) else ""
        hooks = self._hooks(models, listed)
        if hooks and listed:
            always = ", ".join(f"accel.unwrap_model({name})" for name in models if not held[name])
            made.append(cst.parse_statement(f"{listed} = [{always}]"))
        for test in dict.fromkeys(test for test in held.values() if test):
            names = [name for name, each in held.items() if each == test]
            lines = "".join(f'    items["{_item_name(self._script, name)}"] = {name}\n' for name in names)
            if hooks:
                lines += "".join(
                    f"    {listed}.append(accel.unwrap_model({name}))\n" for name in names if name in models
                )
            made.append(cst.parse_statement(f"if {test}:\n{lines}"))
        if hooks:
            text = "".join(f"    {kind}=lambda folder: {call},\n" for kind, call in hooks.items())
            made.append(cst.parse_statement(f'items["hooks"] = accel.items.Folder(\n{text})'))
        script = self._script
        begun = any(script.method(call) == "init_trackers" for call in calls(self._scope))
        if begun or (script.kept and script.tracks):
            kept = f'items["trackers"] = {script.trackers}'
            made.append(cst.parse_statement(f"if {script.tracked_if}:\n    {kept}\n" if script.tracked_if else kept))
        return made

    def _held(self) -> dict[str, str]:
        """Return what is prepared or registered, with the condition under which it is; empty where it always is."""
        script = self._script
        found = prepared(script, self._scope) or dict.fromkeys(self._given(), "")
        return {name: test for name, test in found.items() if name and name not in script.loaders and "." not in name}

    def _given(self) -> list[str]:
        """Return what another scope has prepared: parameters of this one, or attributes of its class."""
        script = self._script
        kinds = script.models | script.optimizers | script.schedulers
        params = self._scope.params.params if isinstance(self._scope, cst.FunctionDef) else ()
        names = [each.name.value for each in params]
        kept = [name for name in script.values if name.startswith("self__")] if script.kept else []
        return [name for name in dict.fromkeys([*names, *kept]) if name in kinds and name in script.prepared]

    def _hooks(self, models: list[str], listed: str) -> dict[str, str]:
        """Return the calls of the hooks, on a new list of the plain models, which a hook may empty."""
        script = self._script
        given = f"list({listed})" if listed else f"[{', '.join(f'accel.unwrap_model({each})' for each in models)}]"
        found: dict[str, str] = {}
        for call in calls(self._scope):
            kind = _HOOKS.get(script.method(call), "")
            hook = full_name(call.args[0].value) if kind and call.args else ""
            function = script.functions.get(hook)
            if function is None or len(function.params.params) != (3 if kind == "save" else 2) or kind in found:
                continue
            weights = f"{_weights(script, function, models, listed)}, " if kind == "save" else ""
            found[kind] = f"{hook}({given}, {weights}folder)"
            script.hooked.add(hook)
        return found

    def outer(self, loop: cst.BaseStatement) -> cst.BaseStatement:
        """Begin the loop over epochs at the state's epoch, and leave out what skips batches."""
        if not self._loads:
            return loop
        loop = _skipped(self._script, self._notes, loop)
        call = counted(loop)
        if call is not None and len(call.args) == 1:
            begin = cst.Arg(expression(f"{self._script.state}.epoch"))
            args = [begin, call.args[0].with_changes(comma=cst.MaybeSentinel.DEFAULT)]
            return loop.with_changes(iter=call.with_changes(args=args))
        return loop


def counted(loop: cst.CSTNode) -> cst.Call | None:
    """Return the call of `range` that a loop counts by."""
    call = loop.iter if isinstance(loop, cst.For) else None
    return call if isinstance(call, cst.Call) and full_name(call.func) == "range" else None


def _item_name(script: Script, name: str) -> str:
    for kind, names in (
        ("model", script.models),
        ("optimizer", script.optimizers),
        ("scheduler", script.schedulers),
    ):
        if names == {name}:
            return kind
    return name


def _skipped(script: Script, notes: Remarks, loop: cst.BaseStatement) -> cst.BaseStatement:
    lines = Lines()
    for node in block(loop):
        skips = any(script.method(call) == "skip_first_batches" for call in calls(node))
        if skips and isinstance(node, (cst.If, cst.SimpleStatementLine)):
            lines.hold([notes.change(_POSITION)])
            notes.leave_out(node)
        else:
            lines.add(node)
    return with_block(cast(cst.For, loop), lines.body)


def _weights(script: Script, function: cst.FunctionDef, models: list[str], listed: str) -> str:
    """Return the state dicts that a hook of saves gets; where it only drops them, as many empty ones."""
    name = function.params.params[1].name.value
    reads = 0
    for node in walk(function.body):
        if isinstance(node, cst.Call):
            dropped = full_name(node.func) in (f"{name}.pop", f"{name}.clear")
            reads -= dropped or (full_name(node.func) == "len" and full_name(node.args[0].value) == name)
        elif isinstance(node, cst.If):
            reads -= text_of(node.test) == name
        elif isinstance(node, cst.Name):
            reads += node.value == name
    if listed:
        return (
            f"[accel.get_state_dict({script.ctx}, each) for each in {listed}]" if reads else f"[{{}} for _ in {listed}]"
        )
    return f"[{', '.join(f'accel.get_state_dict({script.ctx}, {each})' if reads else '{}' for each in models)}]"
