# SPDX-License-Identifier: Apache-2.0
"""The forward of a training step: the statements that run models, within `accel.autocast`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import libcst as cst

from accel.migrate._script import Script
from accel.migrate._tree import (
    block,
    calls,
    full_name,
    leading,
    led_by,
    loads,
    method_of,
    statement,
    targets,
    text_of,
    walk,
    with_block,
)

# methods that run no model, whatever they are given
_IDLE = ("train", "eval", "parameters", "named_parameters", "requires_grad_", "state_dict", "append", "extend")


def autocast(
    script: Script, nodes: Sequence[cst.BaseStatement], marks: Sequence[cst.EmptyLine]
) -> list[cst.BaseStatement]:
    """Return statements within `accel.autocast`, but for the backward passes among them."""
    lines: list[cst.BaseStatement] = []
    held: list[cst.BaseStatement] = []
    for node in (*nodes, None):
        if node is not None and not text_of(node).startswith(f"{script.state} = accel.backward("):
            held.append(node)
            continue
        if held:
            inner = [led_by(held[0], []), *held[1:]]
            built = with_block(statement(f"with accel.autocast({script.ctx}):\n    pass"), inner)
            lines.append(led_by(built, [*leading(held[0]), *marks]))
        lines += [] if node is None else [node]
        held = []
    return lines


def flattened(
    script: Script, nodes: Sequence[cst.BaseStatement]
) -> tuple[list[cst.BaseStatement], list[str], str | None]:
    """Return the statements of a loop with blocks of `accelerator.accumulate` inlined, and the models that it names."""
    lines: list[cst.BaseStatement] = []
    models: list[str] = []
    for node in nodes:
        inner = node if isinstance(node, cst.With) else None
        found = inner and [each for each in inner.items if script.method(each.item) == "accumulate"]
        if not inner or not found:
            lines.append(node)
            continue
        others = [each for each in inner.items if each not in found and script.method(each.item) != "autocast"]
        if others:
            return lines, models, "where the other managers of this block belong"
        models += [name for each in found for arg in cast(cst.Call, each.item).args for name in _given(script, arg)]
        body = block(inner)
        header = list(leading(inner))
        body[0] = led_by(body[0], [*header, *leading(body[0])])
        lines += body
    return lines, models, None


def _given(script: Script, arg: cst.Arg) -> list[str]:
    """Return the models that `accumulate` is given, the elements of a list one by one, or a list with a star."""
    if isinstance(arg.value, (cst.List, cst.Tuple)):
        return [text_of(each.value) for each in arg.value.elements]
    name = full_name(arg.value)
    made = script.values.get(name, ())
    grows = any(full_name(owner) == name for owner in script.extended)
    listed = name not in script.models and (grows or any(isinstance(each, (cst.List, cst.ListComp)) for each in made))
    return [("*" if listed and not arg.star else arg.star) + text_of(arg.value)]


def models_of(script: Script, nodes: Sequence[cst.BaseStatement]) -> list[str]:
    """Return the prepared models that statements run, in their order."""
    found: dict[str, None] = {}
    for node in nodes:
        for call in calls(node):
            for each in (call.func, *(arg.value for arg in call.args)):
                name = full_name(each).partition(".")[0]
                if name in script.models:
                    found[name] = None
    return list(found)


def runs(script: Script, node: cst.CSTNode, names: Sequence[str]) -> bool:
    """Whether a statement calls a model, or hands one to a function."""
    for call in calls(node):
        _owner, name = method_of(call)
        if name in _IDLE:
            continue
        if script.method(call):
            continue
        if full_name(call.func).partition(".")[0] in names or any(full_name(arg.value) in names for arg in call.args):
            return True
    return False


def forward(
    script: Script, nodes: Sequence[cst.BaseStatement], loss: cst.BaseExpression, names: Sequence[str]
) -> tuple[int, int]:
    """Return the first statement of the forward, and the one after the last that makes the loss."""
    running = [at for at, node in enumerate(nodes) if runs(script, node, names)]
    wanted = loads(loss)
    makes = [at for at, node in enumerate(nodes) if wanted & {n for each in walk(node) for n in targets(each)}]
    start = min(running or makes, default=len(nodes))  # without a known model, the lines that make the loss run it
    making = [at for at in makes if at >= start]
    end = max([*running, *making], default=len(nodes) - 1) + 1
    return start, end
