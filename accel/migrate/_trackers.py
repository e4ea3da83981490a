# SPDX-License-Identifier: Apache-2.0
"""Trackers: the ones in `log_with=`, calls that log, functions that get trackers, loops over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import libcst as cst
from typing_extensions import override

from accel.migrate._script import Script, ScriptPass
from accel.migrate._signatures import is_tracker
from accel.migrate._tree import (
    Remarks,
    argument,
    block,
    calls,
    expression,
    full_name,
    keyword_arg,
    loads,
    statement,
    text_of,
    walk,
    with_block,
)


class Tracking:
    """Calls of trackers: `init_trackers` with the trackers of `log_with=`, `log` with the trackers and a step."""

    def __init__(self, script: Script, decide: Callable[[str, str], None], change: Callable[[str], None]) -> None:
        self._script = script
        self._decide = decide
        self._change = change

    def begun(self, call: cst.Call) -> cst.BaseExpression:
        """Return the call that begins trackers."""
        tracked = self._script.tracked
        if not self._script.tracked and not any(self._script.makes(each) for each in self._made()):
            self._decide("the trackers of log_with=, which another function is given", "trackers")
        project = argument(call, "project_name", 0) or expression('"run"')
        config = argument(call, "config", 1)
        folder = tracked.get("logging_dir") or tracked.get("project_dir")
        options = f", to={self._to(tracked.get('log_with'), argument(call, 'init_kwargs', 2))}"
        if folder is not None and text_of(folder) != "None":
            options += f", dir={text_of(folder)}"
        if config is not None:
            options += f", config={text_of(config)}"
        return cst.parse_expression(f"accel.init_trackers({self._script.ctx}, {text_of(project)}{options})")

    def _made(self) -> list[cst.Call]:
        """Return the calls that make an Accelerator here, not by another function."""
        return [call for made in self._script.makers.values() for call in made if not self._script.is_factory(call)]

    def _to(self, given: cst.BaseExpression | None, kwargs: cst.BaseExpression | None) -> str:
        names: list[str] = []
        elements = [each.value for each in given.elements] if isinstance(given, (cst.List, cst.Tuple)) else [given]
        for each in elements:
            own = isinstance(each, cst.Call) and full_name(each.func) in self._script.classes
            name = text_of(each).strip("\"'") if each is not None else ""
            name = name.removeprefix("LoggerType.").lower() if name.startswith("LoggerType.") else name
            if is_tracker(name):
                names.append(f"accel.trackers.{name}({self._options(name, kwargs)})")
            elif name in ("all", ""):
                self._change('log_with="all": no tracker is on because it is installed; jsonl() writes metrics.jsonl')
                names.append("accel.trackers.jsonl()")
            elif name == "None":
                continue
            elif isinstance(each, (cst.Name, cst.Attribute, cst.Subscript, cst.IfExp, cst.Call)) and not own:
                self._change(f'log_with={name}: "all" writes metrics.jsonl: no tracker is on because it is installed')
                options = f", {text_of(kwargs)}" if kwargs is not None else ""
                names.append(f"*accel.trackers.by_name({text_of(each)}{options})")
            else:
                self._decide(f"the trackers in place of log_with={name}", "trackers")
                names.append("accel.trackers.jsonl()")
        if len(names) == 1 and names[0].startswith("*"):
            return names[0][1:]
        return f"[{', '.join(names)}]"

    @staticmethod
    def _options(name: str, kwargs: cst.BaseExpression | None) -> str:
        if not isinstance(kwargs, cst.Dict):
            return ""
        for element in kwargs.elements:
            if isinstance(element, cst.DictElement) and text_of(element.key).strip("\"'") == name:
                return _keywords(element.value)
        return ""

    def _without_step(self, arg: cst.Arg) -> cst.Arg:
        """Return the values of a line without "step", which each line has; "time" and values elsewhere are noted."""
        value = arg.value
        if isinstance(value, cst.Call) and full_name(value.func) == "dict":
            kept_args = [each for each in value.args if each.keyword is None or each.keyword.value != "step"]
            last = [each.with_changes(comma=cst.MaybeSentinel.DEFAULT) for each in kept_args[-1:]]
            return arg.with_changes(value=value.with_changes(args=[*kept_args[:-1], *last]))
        if isinstance(value, cst.Dict):
            kept = [
                each for each in value.elements if not (isinstance(each, cst.DictElement) and _is_key(each.key, "step"))
            ]
            if len(kept) < len(value.elements) and kept:
                kept[-1] = kept[-1].with_changes(comma=value.elements[-1].comma)
            value = value.with_changes(elements=kept)
            times = [each for each in kept if isinstance(each, cst.DictElement) and _is_key(each.key, "step", "time")]
            if times:
                self._decide('another name for the value "time": each line of a log has its own', "trackers")
            return arg.with_changes(value=value)
        if isinstance(value, cst.Name) and self._script.has_key(value.value, "step"):
            text = '{{name: value for name, value in {values}.items() if name != "step"}}'
            return arg.with_changes(value=cst.parse_expression(text.format(values=value.value)))
        return arg

    def logged(self, call: cst.Call, *, in_steps: bool = False) -> cst.BaseExpression:
        """Return the call that logs values; in steps of the optimizer where another step is left out."""
        args = [arg for arg in call.args if not arg.keyword or arg.keyword.value not in ("log_kwargs",)]
        if in_steps:
            args = [arg for arg in args[:1] + args[2:] if not arg.keyword or arg.keyword.value != "step"]
            call = call.with_changes(args=args)
            self._change("values of an epoch are logged by the optimizer's steps, as others are: they only grow")
        args[:1] = [self._without_step(arg) for arg in args[:1]]
        plain = [arg for arg in args if arg.keyword is None]
        if len(plain) > 1:
            args[1] = keyword_arg("step", args[1].value).with_changes(comma=args[1].comma)
        elif argument(call, "step") is None:
            own = None if in_steps else _own_step(call.args[0].value)
            counted = own or expression(f"{self._script.state}.updates")
            args = [args[0].with_changes(comma=cst.MaybeSentinel.DEFAULT), keyword_arg("step", counted)]
            if not in_steps and own is None:
                self._change("log needs a step: the step of the optimizer")
        if len(args) < len(call.args):
            args[-1] = args[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        first = [cst.Arg(cst.Name(self._script.ctx)), cst.Arg(cst.Name(self._script.trackers))]
        if isinstance(call.whitespace_before_args, cst.ParenthesizedWhitespace):
            comma = cst.Comma(whitespace_after=call.whitespace_before_args)
            first = [each.with_changes(comma=comma) for each in first]
        return call.with_changes(func=expression("accel.log"), args=[*first, *args])


def _own_step(values: cst.BaseExpression) -> cst.BaseExpression | None:
    """Return the value "step" of a dict that is logged."""
    if isinstance(values, cst.Call) and full_name(values.func) == "dict":
        return argument(values, "step")
    found = values.elements if isinstance(values, cst.Dict) else ()
    return next((each.value for each in found if isinstance(each, cst.DictElement) and _is_key(each.key, "step")), None)


def _is_key(key: cst.BaseExpression | None, *names: str) -> bool:
    return isinstance(key, cst.SimpleString) and key.raw_value in names


def _keywords(value: cst.BaseExpression) -> str:
    """Return a dict's items as keywords of a call, or the dict itself with two stars."""
    elements = value.elements if isinstance(value, cst.Dict) else ()
    pairs = [
        (text_of(each.key).strip("\"'"), text_of(each.value)) for each in elements if isinstance(each, cst.DictElement)
    ]
    if isinstance(value, cst.Dict) and len(pairs) == len(elements) and all(key.isidentifier() for key, _ in pairs):
        return ", ".join(f"{key}={text}" for key, text in pairs)
    return f"**{text_of(value)}"


_USES = ("log", "log_images", "get_tracker", "end_training")
_RUNS = ("tracker", "writer", "run")  # attributes of Accelerate's trackers that are the package's own object


class HandedTrackers(ScriptPass):
    """Hand the trackers to functions that take the context and log; write loops over all trackers by their names."""

    def __init__(self, script: Script, notes: Remarks, module: cst.Module) -> None:
        super().__init__(script, notes)
        self._needing = _needing(script)

    def leave_function_def(self, original: cst.FunctionDef, updated: cst.FunctionDef) -> cst.FunctionDef:
        if original.name.value not in self._needing:
            return updated
        params: list[cst.Param] = []
        for param in updated.params.params:
            params.append(param.with_changes(comma=cst.MaybeSentinel.DEFAULT))
            if param.name.value in self._script.holders:
                params.append(cst.Param(cst.Name(self._script.trackers)))
        return updated.with_changes(params=updated.params.with_changes(params=params))

    def leave_call(self, original: cst.Call, updated: cst.Call) -> cst.Call:
        if full_name(original.func) not in self._needing:
            return updated
        args: list[cst.Arg] = []
        name = cst.Name(self._script.trackers)
        for arg in updated.args:
            args.append(arg)
            if self._script.holds(arg.value):
                given = cst.Arg(name) if arg.keyword is None else keyword_arg(name.value, name)
                args.append(given.with_changes(comma=arg.comma))
                args[-2] = arg.with_changes(comma=cst.MaybeSentinel.DEFAULT) if arg is updated.args[-1] else arg
        return updated.with_changes(args=args)

    def leave_if(self, original: cst.If, updated: cst.If) -> cst.If:
        """Begin a run without trackers where a condition leaves them out and functions are handed them."""
        begins = any(self._script.method(call) == "init_trackers" for call in calls(original.body))
        if not begins or not self._needing or original.orelse is not None or not self._script.tracked_if:
            return updated
        none = statement(f'{self._script.trackers} = accel.init_trackers({self._script.ctx}, "none", to=[])')
        return updated.with_changes(orelse=cst.Else(body=cst.IndentedBlock([none])))

    def leave_for(self, original: cst.For, updated: cst.For) -> cst.For:
        script = self._script
        if not script.is_attribute(original.iter, "trackers") or not isinstance(original.target, cst.Name):
            return updated
        tracker = original.target.value
        change = _Runs(tracker, f"{tracker}_name")
        body = with_block(updated, [cast(cst.BaseStatement, each.visit(change)) for each in block(updated)])
        if change.unknown:
            return updated
        lines = block(body)
        if tracker in loads(body.body):
            own = statement(f"{tracker} = accel.get_tracker({script.trackers}, {tracker}_name)")
            lines = [own, *lines]
        names = expression(f"{script.trackers}.names")
        return with_block(body, lines).with_changes(target=cst.Name(f"{tracker}_name"), iter=names)


class _Runs(cst.CSTTransformer):
    """Uses of a tracker of Accelerate, written for its package's own object."""

    def __init__(self, tracker: str, name: str) -> None:
        super().__init__()
        self.unknown = False
        self._tracker = tracker
        self._name = name
        self._known = 0
        self._kinds: list[str] = []

    @override
    def visit_If_body(self, node: cst.If) -> None:
        self._kinds.append(text_of(node.test))

    @override
    def leave_If_body(self, node: cst.If) -> None:
        _ = self._kinds.pop()

    @override
    def visit_Attribute(self, node: cst.Attribute) -> bool:
        if not (isinstance(node.value, cst.Name) and node.value.value == self._tracker):
            return True
        logs = node.attr.value == "log" and any("wandb" in kind for kind in self._kinds)
        self.unknown = self.unknown or not (node.attr.value in (*_RUNS, "name") or logs)
        return False

    @override
    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        if isinstance(original_node.value, cst.Name) and original_node.value.value == self._tracker:
            if original_node.attr.value == "name":
                return cst.Name(self._name)
            return original_node.value if original_node.attr.value in _RUNS else original_node
        return updated_node

    @override
    def visit_Name(self, node: cst.Name) -> None:
        self.unknown = self.unknown or node.value == self._tracker


def _needing(script: Script) -> set[str]:
    """Return functions that take an Accelerator and use its trackers, or call one that does, without beginning them."""
    if not script.tracks:
        return set()
    begin = [node for node in script.functions.values() if _methods(script, node) & {"init_trackers"}]
    inside = {each.name.value for node in begin for each in walk(node) if isinstance(each, cst.FunctionDef)}
    own = {
        name: node
        for name, node in script.functions.items()
        if name not in inside and any(param.name.value in script.holders for param in node.params.params)
    }
    found = {name for name, node in own.items() if _methods(script, node) & {*_USES, "trackers"}}
    while more := {
        name for name, node in own.items() if name not in found and {full_name(c.func) for c in calls(node)} & found
    }:
        found |= more
    return found


def _methods(script: Script, node: cst.CSTNode) -> set[str]:
    """Return the attributes and methods of an Accelerator that a node uses."""
    return {each.attr.value for each in walk(node) if isinstance(each, cst.Attribute) and script.holds(each.value)}
