# SPDX-License-Identifier: Apache-2.0
"""Plain `loss.backward()` of loops that step a prepared optimizer, written as the accelerator's before all else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import libcst as cst

from accel.migrate._script import Script
from accel.migrate._tree import (
    Change,
    Remarks,
    block,
    calls,
    children,
    full_name,
    leading,
    loads,
    outer_loops,
    text_of,
    walk,
)

_STAYS = "whether this backward() trains: it stays as it is, as no prepared optimizer steps its gradients next"


class _GradientCall(NamedTuple):
    """A call that makes, steps or drops gradients: the call, and the innermost loop around it."""

    kind: str
    call: cst.Call
    loop: cst.CSTNode


class PlainBackward(Change):
    """Write a plain backward as `accelerator.backward(loss)` if a prepared optimizer takes the next step.

    Others stay with a note: gradients of inputs, and those that are dropped before a step.
    """

    def __init__(self, script: Script, notes: Remarks, module: cst.Module) -> None:
        self._notes = notes
        self._written: dict[cst.CSTNode, str] = {}
        self._plain: set[cst.CSTNode] = set()
        shared = _holders(script, module)
        for function in (node for node in walk(module) if isinstance(node, (cst.FunctionDef, cst.Module))):
            names = sorted(_holders(script, function)) or sorted(shared)
            loops = list(outer_loops(function))
            for loop in loops:
                self._read(list(_events(script, loop, loop)), names, repeats=True)
            self._read(list(_events(script, function, function, loops)), names, repeats=False)

    def _read(self, events: list[_GradientCall], names: list[str], *, repeats: bool) -> None:
        for at, event in enumerate(events):
            if event.kind != "backward":
                continue
            self._plain.add(event.call)
            following = [*events[at + 1 :], *(events[:at] if repeats else [])]
            until = next((index for index, each in enumerate(following) if each.kind in ("step", "reset")), None)
            if until is None or following[until].kind != "step" or not names or not _is_plain(event.call):
                continue
            steps_here = any(each.kind == "step" and each.loop is event.loop for each in events)
            others = [each for each in following[:until] if each.kind in ("backward", "prepared")]
            if steps_here or all(each.loop is event.loop for each in others):  # no search for inputs within the loop
                self._written[event.call] = names[0]

    def leave_call(self, original: cst.Call, updated: cst.Call) -> cst.Call:
        name = self._written.get(original)
        if name is None or not isinstance(updated.func, cst.Attribute):
            return updated
        loss = updated.func.value
        if len(loss.lpar) == 1:
            loss = loss.with_changes(lpar=[], rpar=[])
        comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        first = cst.Arg(loss, comma=comma) if updated.args else cst.Arg(loss)
        func = cst.Attribute(cst.Name(name), cst.Name("backward"))
        return updated.with_changes(func=func, args=[first, *updated.args])

    def leave_simple_statement_line(
        self, original: cst.SimpleStatementLine, updated: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine:
        plain = [each for each in walk(original) if each in self._plain and each not in self._written]
        if not plain:
            return updated
        return updated.with_changes(leading_lines=[*leading(updated), self._notes.decide(_STAYS, "step")])


def _holders(script: Script, node: cst.FunctionDef | cst.Module) -> set[str]:
    """Return the accelerators that a function, or a module's top level, uses."""
    body = node.body if isinstance(node, cst.Module) else block(node)
    taken = {name for line in body if not isinstance(line, (cst.FunctionDef, cst.ClassDef)) for name in loads(line)}
    if isinstance(node, cst.FunctionDef):
        taken |= {each.name.value for each in node.params.params} | {
            each.name.value for each in node.params.kwonly_params
        }
    return taken & script.holders


def _events(
    script: Script, node: cst.CSTNode, loop: cst.CSTNode, without: Sequence[cst.CSTNode] = ()
) -> Iterator[_GradientCall]:
    """Yield the events below a node in source order; functions, classes and some loops in it are skipped."""
    for each in children(node):
        if isinstance(each, (cst.FunctionDef, cst.ClassDef, cst.Lambda)) or each in without:
            continue
        yield from _events(script, each, each if isinstance(each, (cst.For, cst.While)) else loop, without)
        if isinstance(each, cst.Call) and isinstance(each.func, cst.Attribute):
            name = each.func.attr.value
            if name == "backward":
                is_known = bool(script.method(each)) or "accelerator" in text_of(each.func)
                yield _GradientCall("prepared" if is_known else "backward", each, loop)
            elif name == "step" and full_name(each.func.value) in script.optimizers:
                yield _GradientCall("step", each, loop)
            elif name == "zero_grad" or text_of(each.func).endswith(".grad.zero_"):
                yield _GradientCall("reset", each, loop)


def _is_plain(call: cst.Call) -> bool:
    """Whether a call is a backward of a tensor: a call that passes gradients is not rewritten."""
    return all(arg.keyword is not None and arg.keyword.value == "retain_graph" for arg in call.args)


def callers_of(script: Script, name: str) -> str:
    """Return a clause on the functions of a script that call one of its functions; "" for none."""
    callers = [
        other
        for other, node in script.functions.items()
        if other != name and any(_last(call) == name for call in calls(node))
    ]
    return f": {', '.join(callers)} {'calls' if len(callers) == 1 else 'call'} {name}" if callers else ""


def stepping_in(script: Script, node: cst.CSTNode) -> list[str]:
    """Return the functions of a script that a node calls and that run `backward`."""
    found = {_last(call) for call in calls(node)} & script.reaching_backward
    return [name for name in script.functions if name in found]


def _last(call: cst.Call) -> str:
    """Return the last part of a called name: the method of `self.step(...)`."""
    return full_name(call.func).rpartition(".")[2]
