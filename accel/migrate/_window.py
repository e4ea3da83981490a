# SPDX-License-Identifier: Apache-2.0
"""Statements of a training step: the forward, within `accel.autocast`; backward, clipping, step, the `if` around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import libcst as cst

from accel.migrate._script import Script
from accel.migrate._tree import (
    Lines,
    argument,
    block,
    called,
    calls,
    comments,
    expression,
    full_name,
    leading,
    led_by,
    loads,
    matches_code,
    method_of,
    small,
    statement,
    targets,
    text_of,
    walk,
    with_block,
)

_CLIPS = {"clip_grad_norm_": "max_norm", "clip_grad_value_": "max_value"}


class Step:
    """The step of a window: arguments of `optimizer_step`, and the statements around it."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.optimizers: list[cst.BaseExpression] = []
        self.schedulers: list[cst.BaseExpression] = []
        self.clip: tuple[str, cst.BaseExpression] | None = None
        self.norm_type: cst.BaseExpression | None = None
        self.norm_name = ""
        self.accumulation: cst.BaseExpression | None = None
        self.by_hand = False
        self.held: list[cst.EmptyLine] = []
        self.clips: set[str] = set()  # names that clipping reads

    def takes(self, node: cst.BaseStatement) -> bool:
        """Take a statement that `optimizer_step` replaces; whether it was one."""
        if isinstance(node, cst.If) and node.orelse is None:
            return self._takes_guarded(node)
        if targets(node) and set(targets(node)) <= self.script.clipped:
            return True
        call = called(node)
        if call is None:
            return False
        owner, name = method_of(call)
        if name in _CLIPS and (
            self.script.holds(owner) or full_name(call.func).startswith(("torch.nn.utils", "nn.utils"))
        ):
            return self._takes_clip(node, call, name)
        if name in _CLIPS and owner is None:
            return self._takes_clip(node, call, name)
        if owner is None or targets(node):
            return False
        if name == "zero_grad" and not self.script.holds(owner):
            return True
        if name != "step" or call.args:
            return False
        return self._takes_step(owner)

    def _takes_step(self, owner: cst.BaseExpression) -> bool:
        name = full_name(owner)
        if name in self.script.optimizers:
            self.optimizers.append(owner)
            return True
        if name in self.script.schedulers:
            self.schedulers.append(owner)
            return True
        return False

    def _takes_clip(self, node: cst.BaseStatement, call: cst.Call, name: str) -> bool:
        keyword = "max_norm" if name == "clip_grad_norm_" else "clip_value"
        value = argument(call, keyword, 1)
        if value is None or self.clip is not None or len(targets(node)) > 1:
            return False
        self.clip = (_CLIPS[name], value)
        self.clips = loads(call.args[0].value) if call.args else set()
        self.norm_type = argument(call, "norm_type", 2)
        self.norm_name = next(iter(targets(node)), "")
        return True

    def _takes_guarded(self, node: cst.If) -> bool:
        """Take `if not accelerator.optimizer_step_was_skipped: scheduler.step()`."""
        if "optimizer_step_was_skipped" not in text_of(node.test):
            return False
        inner = block(node)
        return len(inner) == 1 and self.takes(inner[0])

    def call(self, ctx: str, state: str) -> cst.BaseStatement:
        """Return the line `state = accel.optimizer_step(...)`."""
        options = ""
        parts: dict[str, cst.BaseExpression] = {}
        if self.schedulers:
            options += f", scheduler={_listed(self.schedulers)}"
        if self.clip:
            options += f", {self.clip[0]}={{clip}}"
            parts["clip"] = self.clip[1]
        if self.norm_type is not None:
            options += ", norm_type={kind}"
            parts["kind"] = self.norm_type
        text = f"{state} = accel.optimizer_step({ctx}, {_listed(self.optimizers)}, {state}{options})"
        return statement(text, **parts)


def _listed(nodes: Sequence[cst.BaseExpression]) -> str:
    names = list(dict.fromkeys(text_of(node) for node in nodes))
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]"


def steps(script: Script, node: cst.CSTNode) -> bool:
    """Whether an optimizer takes its step within a node."""
    owners = [owner for owner, name in map(method_of, calls(node)) if name == "step" and owner is not None]
    return any(full_name(owner) in script.optimizers for owner in owners)


def window_length(test: cst.BaseExpression) -> cst.BaseExpression | None:
    """Return n of `if step % n == 0`, or of a like condition, also one of two joined by `or`."""
    for node in walk(test):
        if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Modulo):
            return node.right
    return None


def asks_sync(script: Script, test: cst.BaseExpression) -> bool:
    """Whether a condition is `accelerator.sync_gradients`."""
    return script.is_attribute(test, "sync_gradients")


def split_step(
    script: Script, nodes: Sequence[cst.BaseStatement], step: Step, batch: str
) -> tuple[list[cst.BaseStatement], int]:
    """Take the statements of a step out of those after the backward.

    Returns the statements that remain, and the index of the step; -1 without one.
    """
    rest = Lines()
    at = -1
    inside: list[cst.BaseStatement] = []
    for node in nodes:
        guarded = isinstance(node, cst.If) and node.orelse is None
        whole = guarded and (asks_sync(script, cast(cst.If, node).test) or steps(script, node))
        if guarded and not whole and _clips_under(script, cast(cst.If, node), step):
            step.held += [line for line in leading(node) if line.comment]
            continue
        if whole and any(map(Step(script).takes, block(node))):
            test = cast(cst.If, node).test
            if not asks_sync(script, test) and (length := window_length(test)) is not None:
                step.accumulation, step.by_hand = length, True
            had = bool(step.optimizers)
            kept = Lines()
            kept.hold([line for line in leading(node) if line.comment])
            for each in block(node):
                if step.takes(each):
                    kept.drop(each)
                else:
                    kept.add(each)
            inside += kept.body
            step.held += kept.rest()
            if step.optimizers and not had:
                at = len(rest.body)
        elif (local := _local(script, node)) is not None:
            given = f"{script.ctx}, {script.local[local]}, {local}, last={batch}.is_last"
            line = f"{local} = accel.parallel.local_sgd_step({given})"
            inside.append(led_by(statement(line), [x for x in leading(node) if x.comment]))
        elif step.takes(node):
            if step.optimizers and at < 0:
                at = len(rest.body)
            step.held += [*_blank(node), *comments(node)]
        elif guarded and at == len(rest.body) and asks_sync(script, cast(cst.If, node).test):
            inner = block(node)
            inside += [led_by(inner[0], [*[x for x in leading(node) if x.comment], *leading(inner[0])]), *inner[1:]]
        else:
            rest.add(node)
    if at >= 0:
        body = list(rest.body)
        body.insert(at, _sync_block(script, step, inside))
        return body, at
    return rest.body, -1


def _clips_under(script: Script, node: cst.If, step: Step) -> bool:
    """Take a block that clips, under a condition besides the end of the window; return whether it was one."""
    test, held = node.test, step.clip
    if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
        parts = [each for each in (test.left, test.right) if not asks_sync(script, each)]
        test = parts[0] if len(parts) == 1 else test
    probe = Step(script)
    lines = block(node)
    if held is not None or not all(probe.takes(each) for each in lines) or probe.clip is None or probe.optimizers:
        return False
    for each in lines:
        _ = step.takes(each)
    kind, value = probe.clip
    step.clip = (kind, expression("{value} if {test} else None", value=value, test=test))
    return True


def _blank(node: cst.BaseStatement) -> list[cst.EmptyLine]:
    return [line for line in leading(node)[:1] if line.comment is None]


def _local(script: Script, node: cst.BaseStatement) -> str | None:
    """Return the variable of `local_sgd.step()`."""
    call = called(node)
    owner, name = method_of(call) if call is not None else (None, "")
    found = full_name(owner) if owner is not None else ""
    return found if name == "step" and found in script.local else None


def _sync_block(script: Script, step: Step, inside: Sequence[cst.BaseStatement]) -> cst.BaseStatement:
    lines = [step.call(script.ctx, script.state)]
    if step.norm_name:
        lines.append(statement(f"{step.norm_name} = {script.state}.grad_norm"))
    built = cst.If(test=expression(f"{script.state}.sync"), body=cst.IndentedBlock([*lines, *inside]))
    blanks = [line for line in step.held if line.comment is None][:1]
    return built.with_changes(leading_lines=[*blanks, *[line for line in step.held if line.comment]])


def is_division(script: Script, node: cst.BaseStatement, length: cst.BaseExpression | None) -> bool:
    """Whether a line divides a loss by the number of micro-batches in a window."""
    inner = small(node)
    if isinstance(inner, cst.AugAssign) and isinstance(inner.operator, cst.DivideAssign):
        return _is_length(script, inner.value, length)
    if isinstance(inner, cst.Assign) and isinstance(inner.value, cst.BinaryOperation):
        value = inner.value
        same = targets(node) == [full_name(value.left)]
        return same and isinstance(value.operator, cst.Divide) and _is_length(script, value.right, length)
    return False


def undivided(script: Script, loss: cst.BaseExpression, length: cst.BaseExpression | None) -> cst.BaseExpression:
    """Return a loss without a division by the number of micro-batches."""
    divides = isinstance(loss, cst.BinaryOperation) and isinstance(loss.operator, cst.Divide)
    if divides and _is_length(script, cast(cst.BinaryOperation, loss).right, length):
        return cast(cst.BinaryOperation, loss).left
    return loss


def whole_loss(
    script: Script, node: cst.BaseStatement, length: cst.BaseExpression | None, names: set[str]
) -> cst.BaseStatement:
    """Return a line that makes the loss without a division of it by the number of micro-batches."""
    inner = small(node)
    if not isinstance(inner, cst.Assign) or not set(targets(node)) <= names:
        return node
    value = undivided(script, inner.value, length)
    if value is inner.value:
        return node
    return cast(cst.SimpleStatementLine, node).with_changes(body=[inner.with_changes(value=value)])


def _is_length(script: Script, node: cst.BaseExpression, length: cst.BaseExpression | None) -> bool:
    return script.is_attribute(node, "gradient_accumulation_steps") or matches_code(node, length)


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
