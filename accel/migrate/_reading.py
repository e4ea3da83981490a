# SPDX-License-Identifier: Apache-2.0
"""Loops over a loader, and its length: `accel.batches`, a batch's data along its flow, moves to the device left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import libcst as cst

from accel.migrate._backward import stepping_in
from accel.migrate._script import Script, ScriptPass, is_rate
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
    expression,
    full_name,
    keyword_arg,
    leading,
    led_by,
    loads,
    method_of,
    names_in,
    replace_names,
    small,
    statement,
    targets,
    walk,
    with_block,
)

_BARS = ("tqdm", "trange", "track", "progress_bar", "auto_tqdm")


class Reading(NamedTuple):
    """A loop over a loader: its loader, its iterator around another expression, and the loop's own target."""

    loader: cst.BaseExpression
    wrap: Callable[[cst.BaseExpression], cst.BaseExpression]
    target: cst.BaseAssignTargetExpression
    counted: bool


def read_loop(script: Script, node: cst.For, aliases: dict[str, cst.BaseExpression]) -> Reading | None:
    """Return how a loop reads a loader; None for a loop over something else."""
    peeled = _peel(script, node.iter, aliases)
    if peeled is None:
        return None
    loader, wrap, counted = peeled
    if not counted:
        return Reading(loader, wrap, node.target, counted=False)
    if isinstance(node.target, cst.Tuple) and len(node.target.elements) == 2:
        inner = cast(cst.BaseAssignTargetExpression, node.target.elements[1].value)
        return Reading(loader, wrap, inner, counted=True)
    return None


def _peel(
    script: Script, node: cst.BaseExpression, aliases: dict[str, cst.BaseExpression]
) -> tuple[cst.BaseExpression, Callable[[cst.BaseExpression], cst.BaseExpression], bool] | None:
    if isinstance(node, cst.Name) and node.value in aliases:
        return aliases[node.value], lambda inner: inner, False
    if isinstance(node, cst.Name) and node.value in script.loaders:
        return node, lambda inner: inner, False
    if not isinstance(node, cst.Call) or not node.args:
        return None
    if script.method(node) == "skip_first_batches":
        found = _peel(script, node.args[0].value, aliases)
        return found and (found[0], lambda inner: inner, False)
    name = full_name(node.func).rpartition(".")[2]
    if name != "enumerate" and name not in _BARS:
        return None
    found = _peel(script, node.args[0].value, aliases)
    if found is None:
        return None
    loader, inside, counted = found

    def wrap(inner: cst.BaseExpression) -> cst.BaseExpression:
        args = [node.args[0].with_changes(value=inside(inner)), *node.args[1:]]
        if name != "enumerate" and argument(node, "total") is None:
            args.append(keyword_arg("total", expression("len({loader})", loader=loader)))
            args = [arg.with_changes(comma=cst.MaybeSentinel.DEFAULT) for arg in args]
        return node.with_changes(args=args)

    return loader, wrap, counted or name == "enumerate"


def aliases_in(script: Script, node: cst.CSTNode) -> dict[str, cst.BaseExpression]:
    """Return variables that are a loader, or a loader after `skip_first_batches`."""
    found: dict[str, cst.BaseExpression] = {}
    for each in walk(node):
        if isinstance(each, cst.SimpleStatementLine) and len(names := targets(each)) == 1:
            inner = small(each)
            value = inner.value if isinstance(inner, cst.Assign) else None
            if isinstance(value, cst.Name) and value.value in script.loaders and names[0] not in script.loaders:
                found[names[0]] = value
            elif script.method(value) == "skip_first_batches":
                base = cast(cst.Call, value).args[0].value
                if isinstance(base, cst.Name) and base.value in script.loaders:
                    found[names[0]] = base
    return {name: base for name, base in found.items() if name not in script.loaders or name != full_name(base)}


class Body:
    """The body of a loop over a loader, as statements on the data of its batch."""

    def __init__(self, script: Script, notes: Remarks, reading: Reading, body: Sequence[cst.BaseStatement]) -> None:
        self.script = script
        self.notes = notes
        names = names_in(reading.target)
        lines = Lines()
        moved: set[str] = set(names)
        self.places: list[int] = []
        for at, node in enumerate(body):
            if self._is_move(node, moved):
                notes.leave_out(node)
            else:
                lines.add(node)
                self.places.append(at)
        self.rest = lines.rest()
        plain = isinstance(reading.target, cst.Name)
        stored = {name for node in lines.body for each in walk(node) for name in targets(each)}
        keeps = plain and names[0] not in stored and names[0] != "_"
        self.batch = names[0] if keeps else self._free(lines.body)
        stripped = [_without_moves(script, node, moved) for node in lines.body]
        self.head: list[cst.BaseStatement] = []
        if keeps:
            data = expression(f"{self.batch}.data")
            stripped = [replace_names(node, {self.batch: data}) for node in stripped]
        elif any(name != "_" for name in names):
            alone = isinstance(reading.target, cst.Tuple) and len(reading.target.elements) == 1
            bare = reading.target if alone else reading.target.with_changes(lpar=[], rpar=[])
            code = cst.Module([]).code_for_node(bare)
            self.head.append(statement(f"{code} = {self.batch}.data"))
        self.statements = stripped

    def _free(self, body: Sequence[cst.BaseStatement]) -> str:
        taken = {name for node in body for name in loads(node)}
        choices = ("batch", "loaded", "loaded_batch")
        return next(each for each in choices if each not in taken and each not in self.script.loaders)

    def _is_move(self, node: cst.BaseStatement, names: set[str]) -> bool:
        """Whether a line does nothing but move the batch, or parts of it, to the device."""
        if isinstance(node, cst.For) and isinstance(node.iter, cst.Name) and node.iter.value in names:
            inner = block(node)
            return len(inner) == 1 and self._moves(_assigned(inner[0]), names)
        call = called(node)
        if call is not None and self.script.origin(call.func) == "send_to_device":
            return targets(node) == [full_name(call.args[0].value)] and full_name(call.args[0].value) in names
        value = _assigned(node)
        inside = targets(node)
        if not inside:
            return isinstance(small(node), cst.Expr) and self._moves(call, names)
        return set(inside) <= names and self._moves(value, names)

    def _moves(self, value: cst.BaseExpression | None, names: set[str]) -> bool:
        if isinstance(value, cst.Tuple):
            return all(self._moves(each.value, names) for each in value.elements)
        if isinstance(value, (cst.DictComp, cst.ListComp, cst.GeneratorExp)):
            inner = value.value if isinstance(value, cst.DictComp) else value.elt
            local = set(names_in(value.for_in.target))
            if isinstance(inner, cst.IfExp):
                inner = inner.body
            return root(value.for_in.iter) in names and self._moves(inner, local)
        if not isinstance(value, cst.Call):
            return False
        owner, name = method_of(value)
        if name == "to" and owner is not None and value.args and self.script.is_device(value.args[0].value):
            return root(owner) in names and argument(value, "dtype") is None
        return False


def _assigned(node: cst.CSTNode) -> cst.BaseExpression | None:
    inner = small(node)
    return inner.value if isinstance(inner, cst.Assign) else None


def root(node: cst.CSTNode | None) -> str:
    """Return the variable that an expression such as `a["b"].c()` begins with."""
    while isinstance(node, (cst.Attribute, cst.Subscript, cst.Call)):
        node = node.func if isinstance(node, cst.Call) else node.value
    return node.value if isinstance(node, cst.Name) else ""


def _without_moves(script: Script, node: cst.BaseStatement, names: set[str]) -> cst.BaseStatement:
    """Leave `.to(device)` out of expressions that begin with the batch."""

    def change(original: cst.Call, changed: cst.Call) -> cst.BaseExpression:
        owner, name = method_of(original)
        if name != "to" or root(owner) not in names or not original.args:
            return changed
        if original.args[0].keyword is not None or not script.is_device(original.args[0].value):
            return changed
        rest = [arg for arg in changed.args[1:] if arg.keyword is None or arg.keyword.value != "non_blocking"]
        return changed.with_changes(args=rest) if rest else cast(cst.Attribute, changed.func).value

    return changed_at(node, cst.Call, change)


class Gathers(Change):
    """`gather_for_metrics` with the batch that the values are of; in loops for evaluation `gather` as well."""

    skips = (cst.FunctionDef,)

    def __init__(self, script: Script, batch: str, *, evaluating: bool) -> None:
        self._script = script
        self._batch = batch
        self._methods = ("gather_for_metrics", "gather") if evaluating else ("gather_for_metrics",)

    def leave_call(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        method = self._script.method(original)
        if method not in self._methods or not updated.args:
            return updated
        first = updated.args[0].value
        if isinstance(first, cst.Call) and method_of(first)[1] == "repeat" and len(first.args) == 1:
            rows = expression(f"{self._batch}.rows")
            first = first.with_changes(args=[first.args[0].with_changes(value=rows)])
        elif method == "gather" and isinstance(first, cst.Name) and "loss" in first.value:
            return updated
        built = cast(
            cst.Call,
            expression(f"accel.gather_for_metrics({self._script.ctx}, {{value}}, {self._batch})", value=first),
        )
        extra = [arg for arg in updated.args[1:] if arg.keyword is not None]
        return built.with_changes(args=[*built.args, *extra])


class Evaluation(ScriptPass):
    """Loops over loaders without a backward: one pass from the start."""

    def __init__(self, script: Script, notes: Remarks) -> None:
        super().__init__(script, notes)
        self._aliases: list[dict[str, cst.BaseExpression]] = [{}]

    def visit_module(self, node: cst.Module) -> None:
        self._aliases.append(aliases_in(self._script, node))

    def leave_for(self, original: cst.For, updated: cst.For) -> cst.BaseStatement:
        reading = read_loop(self._script, updated, self._aliases[-1])
        if reading is None or any(self._script.method(call) == "backward" for call in calls(updated)):
            return updated
        script = self._script
        body = Body(script, self._notes, reading, block(updated))
        gathers = Gathers(script, body.batch, evaluating=True)
        lines = [changed_by(node, gathers) for node in body.statements]
        lines = [_with_autocast(script, node) for node in lines]
        iterator = reading.wrap(expression(f"accel.batches({script.ctx}, {{loader}})", loader=reading.loader))
        built = with_block(retarget(updated, reading, body.batch), [*body.head, *lines])
        built = built.with_changes(iter=iterator)
        if stepping := stepping_in(script, original):
            run = "runs" if len(stepping) == 1 else "run"
            what = f"which state this loop's batches move: {' and '.join(stepping)} {run} backward in it"
            return marked(built, self._notes.decide(what, "parts"))
        return built


def retarget(node: cst.For, reading: Reading, batch: str) -> cst.For:
    """Return a loop with the batch as its target."""
    name = cst.Name(batch)
    if not reading.counted:
        return node.with_changes(target=name)
    pair = cast(cst.Tuple, node.target)
    return node.with_changes(
        target=pair.with_changes(elements=[pair.elements[0], pair.elements[1].with_changes(value=name)])
    )


def _with_autocast(script: Script, node: cst.BaseStatement) -> cst.BaseStatement:
    """Add autocast to `torch.no_grad()`; Accelerate runs it inside the forward of the prepared model."""

    def change(original: cst.With, changed: cst.With) -> cst.With:
        names = [full_name(each.item.func) for each in original.items if isinstance(each.item, cst.Call)]
        if not any(name.endswith(("no_grad", "inference_mode")) for name in names):
            return changed
        if any(script.method(each.item) == "autocast" for each in original.items):
            return changed
        if not any(full_name(call.func) in script.models for call in calls(original.body)):
            return changed
        item = cst.WithItem(expression(f"accel.autocast({script.ctx})"))
        items = [each.with_changes(comma=cst.MaybeSentinel.DEFAULT) for each in changed.items]
        return changed.with_changes(items=[*items, item])

    return changed_at(node, cst.With, change)


def marked(node: cst.BaseStatement, *lines: cst.EmptyLine) -> cst.BaseStatement:
    """Return a statement with notes right before it."""
    return led_by(node, [*leading(node), *lines])


class Lengths(ScriptPass):
    """`len(loader)` before `prepare` to steps on this number of ranks; factors of processes in schedules left out."""

    def leave_function_def(self, original: cst.FunctionDef, updated: cst.FunctionDef) -> cst.FunctionDef:
        return with_block(updated, self._before_prepare(block(updated)))

    def leave_module(self, original: cst.Module, updated: cst.Module) -> cst.Module:
        return updated.with_changes(body=self._before_prepare(cast("list[cst.BaseStatement]", list(updated.body))))

    def _before_prepare(self, body: list[cst.BaseStatement]) -> list[cst.BaseStatement]:
        at = [index for index, node in enumerate(body) if self._script.method(called(node)) == "prepare"]
        if not at:
            return body
        change = _Length(self._script)
        lines: list[cst.BaseStatement] = []
        for index, node in enumerate(body):
            if index < at[-1] and not isinstance(node, (cst.FunctionDef, cst.ClassDef)):
                node = changed_by(node, change)
            lines.append(node)
        return lines

    def leave_simple_statement_line(
        self, original: cst.SimpleStatementLine, updated: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine:
        if self._script.feeds_schedule(original):
            return changed_by(updated, _Shrink(self._script))
        return updated


class _Length(Change):
    def __init__(self, script: Script) -> None:
        self._script = script

    def leave_call(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        if full_name(original.func) in ("math.ceil", "ceil") and _is_total(updated.args[0].value):
            return updated.args[0].value
        if full_name(original.func) == "len" and len(original.args) == 1:
            value = original.args[0].value
            if isinstance(value, cst.Name) and value.value in self._script.loaders:
                return expression(f"accel.total_steps({{loader}}, ctx={self._script.ctx})", loader=value)
        return updated

    def leave_binary_operation(self, original: cst.BinaryOperation, updated: cst.BinaryOperation) -> cst.BaseExpression:
        """Write `len(loader) * epochs // accumulation` as one call, and without a division by the ranks."""
        right, left = updated.right, updated.left
        if isinstance(original.operator, (cst.Divide, cst.FloorDivide)) and _is_total(left):
            if self._script.is_attribute(right, "num_processes"):
                return left
            right = without_ranks(self._script, right)
            updated = updated.with_changes(right=right)
        if isinstance(original.operator, cst.Multiply):
            for total, epochs in ((left, right), (right, left)):
                if _is_total(total) and len(cast(cst.Call, total).args) == 2:
                    return self._with(cast(cst.Call, total), original, epochs=epochs)
        divided = isinstance(original.operator, cst.FloorDivide) and _is_total(left)
        if divided and "epochs" in {arg.keyword.value for arg in cast(cst.Call, left).args if arg.keyword}:
            return self._with(cast(cst.Call, left), original, accumulation=right)
        return updated

    @staticmethod
    def _with(call: cst.Call, node: cst.BinaryOperation, **options: cst.BaseExpression) -> cst.Call:
        made = [keyword_arg(name, value.with_changes(lpar=[], rpar=[])) for name, value in options.items()]
        args = [arg.with_changes(comma=cst.MaybeSentinel.DEFAULT) for arg in (*call.args, *made)]
        return call.with_changes(args=args, lpar=[], rpar=[])


def _is_total(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Call) and full_name(node.func) == "accel.total_steps"


class _Shrink(Change):
    """Leave `* accelerator.num_processes` out of a schedule, and a division of its steps by them."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._steps: set[str] = set()

    def visit_lambda(self, node: cst.Lambda) -> None:
        self._steps |= {param.name.value for param in node.params.params}

    def leave_binary_operation(self, original: cst.BinaryOperation, updated: cst.BinaryOperation) -> cst.BaseExpression:
        divides = isinstance(updated.operator, (cst.Divide, cst.FloorDivide))
        ranks = self._script.is_attribute(updated.right, "num_processes")
        if divides and ranks and self._steps & loads(updated.left):
            return updated.left
        return without_ranks(self._script, updated)

    def leave_arg(self, original: cst.Arg, updated: cst.Arg) -> cst.Arg:
        return original if is_rate(original) else updated


def without_ranks(script: Script, node: cst.BaseExpression) -> cst.BaseExpression:
    """Return an expression without `* accelerator.num_processes`."""
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Multiply):
        for part, other in ((node.right, node.left), (node.left, node.right)):
            if script.is_attribute(part, "num_processes"):
                return other if other.lpar or not node.lpar else other.with_changes(lpar=node.lpar, rpar=node.rpar)
    return node
