# SPDX-License-Identifier: Apache-2.0
"""The training loop, found by its backward, written as the open loop on one state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import libcst as cst

from accel.migrate._epochs import Caller, Epochs, OnState, find_epochs, state_lines
from accel.migrate._items import Items, restores
from accel.migrate._reading import Body, Gathers, aliases_in, marked, read_loop, retarget
from accel.migrate._script import ScopePass, Script
from accel.migrate._tree import (
    LOOPS,
    Change,
    Lines,
    Remarks,
    block,
    called,
    calls,
    changed_at,
    changed_by,
    children,
    expression,
    full_name,
    keyword_arg,
    leading,
    led_by,
    loads,
    own_lines,
    replace_names,
    small,
    statement,
    text_of,
    walk,
    with_block,
)
from accel.migrate._window import (
    Step,
    autocast,
    flattened,
    forward,
    is_division,
    models_of,
    runs,
    split_step,
    steps,
    undivided,
    whole_loss,
)

_ROWS = "a mean loss is weighed by the batch's samples; pass weight= to accel.backward where it is one over tokens"
_OUTPUTS = (
    "under bf16 and fp16 the model's outputs keep that format; Accelerate converts them to fp32: "
    'Precision(outputs="fp32"), or .float()'
)


def _backwards(script: Script, node: cst.CSTNode) -> list[cst.Call]:
    return [call for call in calls(node) if script.method(call) == "backward"]


def _own_loops(node: cst.CSTNode, outer: tuple[cst.CSTNode, ...] = ()) -> list[tuple[cst.CSTNode, ...]]:
    """Return the chains of loops below a node, outermost first, without the loops of functions inside."""
    found: list[tuple[cst.CSTNode, ...]] = []
    for child in children(node):
        if isinstance(child, (cst.FunctionDef, cst.ClassDef, cst.Lambda)):
            continue
        if isinstance(child, LOOPS):
            found.append((*outer, child))
            found += _own_loops(child, (*outer, child))
        else:
            found += _own_loops(child, outer)
    return found


_CLIPPED = "max_norm= clips by the norm of all parameters that the step changes, not of some models only"
_AGAIN = (
    "gradients of all backward passes of a batch are averaged over ranks; in DDP a second one through a graph is not"
)


class Training(ScopePass):
    """Rewrite each function's training loop, and make the state above the outermost loop."""

    def __init__(self, script: Script, notes: Remarks) -> None:
        super().__init__(script, notes)
        self._called: set[str] = set()
        self._epochs: dict[str, Epochs] = {}
        self._lengths: dict[str, cst.BaseExpression | None] = {}  # of windows, in the caller's words

    def visit_module(self, node: cst.Module) -> None:
        """Find the functions that train one epoch per call and have a loop that can be rewritten."""
        script = self._script
        for name, each in find_epochs(script, node).items():
            chains = [chain for chain in _own_loops(each.function.body) if _holds_backward(script, chain)]
            loop = _Loop(script, self._notes, each.function, chains[0], ()) if len(chains) == 1 else None
            words = each.of_caller(loop.length) if loop is not None else None
            if loop is not None and len(chains[0]) == 1 and loop.failed is None and words is not None:
                self._epochs[name] = each
                self._lengths[name] = None if loop.length is None else replace_names(loop.length, words)
        script.epochs |= self._epochs.keys()

    def rewritten(self, node: cst.FunctionDef | cst.Module) -> cst.CSTNode:
        body = node.body if isinstance(node, cst.FunctionDef) else node
        chains = [chain for chain in _own_loops(body) if _holds_backward(self._script, chain)]
        if isinstance(node, cst.FunctionDef) and node.name.value in self._epochs and chains:
            loop = _Loop(self._script, self._notes, node, chains[0], (), carried=True)
            return OnState(self._script, self._epochs[node.name.value]).applied(cast(cst.FunctionDef, loop.applied()))
        if not chains:
            return self._calling(node)
        methods = {self._script.method(call) for call in calls(node)}
        together = len({id(chain[0]) for chain in chains}) < len(chains)
        if len(chains) > 1 and (together or methods & {"save_state", "load_state"}):
            note = self._notes.decide("which state each of several training loops in one function carries", "parts")
            return _noted(node, [chain[0] for chain in chains], note)
        return self._one_by_one(node)

    def _calling(self, node: cst.FunctionDef | cst.Module) -> cst.CSTNode:
        """Make the state above the loop that calls a function of one epoch."""
        body = node.body if isinstance(node, cst.FunctionDef) else node
        for chain in _own_loops(body):
            for line in own_lines(chain[0]):
                name = full_name(call.func) if (call := called(line)) is not None else ""
                if name in self._epochs.keys() - self._called and len(chain) == 1:
                    self._called.add(name)
                    given = (self._epochs[name], self._lengths[name])
                    caller = Caller(self._script, self._notes, node, chain[0], line, *given)
                    return self._calling(cast("cst.FunctionDef | cst.Module", caller.applied()))
        return node

    def _one_by_one(self, node: cst.FunctionDef | cst.Module) -> cst.CSTNode:
        """Rewrite loops that follow each other, all on one state."""
        left = 0
        loaders: list[str] = []
        while True:
            body = node.body if isinstance(node, cst.FunctionDef) else node
            chains = [chain for chain in _own_loops(body) if _holds_backward(self._script, chain)]
            if len(chains) <= left:
                return node
            loop = _Loop(self._script, self._notes, node, chains[left], tuple(loaders))
            left += loop.failed is not None
            loaders += [loop.loader] if loop.failed is None else []
            node = cast("cst.FunctionDef | cst.Module", loop.applied())


def _holds_backward(script: Script, chain: tuple[cst.CSTNode, ...]) -> bool:
    """Whether the last loop of a chain is the innermost one around a backward."""
    loop = chain[-1]
    inner = [call for chain in _own_loops(loop) for call in _backwards(script, chain[-1])]
    nested = [
        call
        for each in walk(loop)
        if isinstance(each, (cst.FunctionDef, cst.Lambda))
        for call in _backwards(script, each)
    ]
    return any(call not in inner and call not in nested for call in _backwards(script, loop))


def _noted(scope: cst.CSTNode, nodes: Sequence[cst.CSTNode], note: cst.EmptyLine) -> cst.CSTNode:
    """Return a scope with a note before some of its statements."""

    def change(original: cst.BaseStatement, node: cst.BaseStatement) -> cst.BaseStatement:
        return marked(node, note) if any(original is each for each in nodes) else node

    return changed_at(scope, cst.BaseStatement, change)


class _Loop(Change):
    """One training loop: its innermost loop rewritten, the state before the outermost one."""

    def __init__(
        self,
        script: Script,
        notes: Remarks,
        scope: cst.FunctionDef | cst.Module,
        chain: tuple[cst.CSTNode, ...],
        before: Sequence[str],
        *,
        carried: bool = False,
    ) -> None:
        self._script = script
        self._notes = notes
        self._scope = scope
        self._chain = chain
        self._aliases = aliases_in(script, scope)
        self._items = Items(script, notes, scope)
        self._step = Step(script)
        self.failed: cst.EmptyLine | None = None
        self._carried = carried  # whether the state is the caller's
        self.loader = ""
        self._before = before  # loaders of the loops before this one
        self._inner = self._rewritten(chain[-1])

    def applied(self) -> cst.CSTNode:
        """Return the scope with the loop rewritten, or with one note where it could not be."""
        if self.failed is not None:
            return _noted(self._scope, [self._chain[-1]], self.failed)
        anchors = restores(self._script, self._scope, self._chain[0])
        self._anchor = anchors[0] if anchors else self._chain[0]
        return changed_by(self._scope, self)

    def on_leave(self, original: cst.CSTNode, updated: cst.CSTNode) -> object:
        result: object = self._inner if original is self._chain[-1] else updated
        if original is self._chain[0] and self._carried:
            return result
        if original is self._chain[0]:
            result = self._items.outer(cast(cst.BaseStatement, result))
        return cst.FlattenSentinel(self._begun(cast(cst.BaseStatement, result))) if original is self._anchor else result

    def _begun(self, loop: cst.BaseStatement) -> list[cst.BaseStatement]:
        """Return the lines that make items and state, then the statement after them."""
        state = self._script.state
        if self._before:
            if self.loader == self._before[-1]:
                return [loop]
            again = statement(f"{state} = {state}.at(accel.Cursor(seed={state}.cursor.seed))")
            blank = [line for line in leading(loop)[:1] if line.comment is None]
            return [led_by(again, blank), loop]
        lines = state_lines(self._script, self._notes, self._scope, self._items.made(), self.length)
        own = self._scope.name.value if isinstance(self._scope, cst.FunctionDef) else ""
        if len(self._chain) == 1 and own in self._script.looped:
            what = f"the state that {own} takes and returns: one made here begins the same epoch at each call"
            lines[0] = led_by(lines[0], [*leading(lines[0]), self._notes.decide(what, "loop")])
        first = [line for line in leading(loop)[:1] if line.comment is None]
        lines[0] = led_by(lines[0], [*first, *leading(lines[0])])
        return [*lines, loop]

    @property
    def length(self) -> cst.BaseExpression | None:
        """The number of micro-batches in a window, where the script says one."""
        return self._step.accumulation or self._script.accumulation

    def _rewritten(self, node: cst.CSTNode) -> cst.BaseStatement:
        reading = read_loop(self._script, node, self._aliases) if isinstance(node, cst.For) else None
        self.loader = text_of(reading.loader) if reading is not None else ""
        if not isinstance(node, cst.For) or reading is None:
            why = "how the state moves: this loop draws its batches by hand"
            return self._give_up(cast(cst.BaseStatement, node), why, "loop")
        flat, models, outside = flattened(self._script, block(node))
        self._begin = next((at for at, each in enumerate(block(node)) if isinstance(each, cst.With) and models), None)
        if outside is not None:
            return self._give_up(node, outside, "step")
        body = Body(self._script, self._notes, reading, flat)
        at = [index for index, each in enumerate(body.statements) if _backwards(self._script, each)]
        passes = [called(body.statements[each]) is not None for each in at]
        if not at or not all(passes) or any(steps(self._script, each) for each in body.statements[at[0] : at[-1]]):
            stepping = {full_name(call.func) for call in calls(node) if steps(self._script, call)}
            if len(stepping) > 1:
                why = "the accumulation and loss scale that each of the models that step in turn carries"
                return self._give_up(node, why, "parts")
            return self._give_up(node, "how several or guarded backward passes share a window", "step")
        before, backward, after = body.statements[: at[-1]], body.statements[at[-1]], body.statements[at[-1] + 1 :]
        lines = self._window(body, models, before, backward, after)
        if self.failed is not None:
            return node
        iterator = reading.wrap(
            expression(f"accel.batches({self._script.ctx}, {{loader}}, {self._script.state})", loader=reading.loader)
        )
        built = with_block(retarget(node, reading, body.batch), lines)
        return built.with_changes(iter=iterator)

    def _give_up(self, node: cst.BaseStatement, why: str, page: str) -> cst.BaseStatement:
        self.failed = self._notes.decide(why, page)
        return node

    def _window(
        self,
        body: Body,
        models: list[str],
        before: list[cst.BaseStatement],
        backward: cst.BaseStatement,
        after: list[cst.BaseStatement],
    ) -> list[cst.BaseStatement]:
        script, step = self._script, self._step
        early, begin = self._early(body, before)
        rest, at = split_step(script, after, step, body.batch)
        if at < 0 or not step.optimizers:
            _ = self._give_up(self._chain[-1], "where the optimizer takes its step", "step")  # type: ignore[arg-type]
            return []
        behind = [_with_synced(script, each) for each in rest[at:]]
        asks = any(one is not other for one, other in zip(behind, rest[at:], strict=True))
        rest = [*rest[:at], *behind]
        script.windows = script.windows or step.by_hand
        call = cast(cst.Call, called(backward))
        inside, begin, several = self._whole(early.body, begin, call)
        loss = undivided(script, call.args[0].value, self.length)
        if any(full_name(each.func).partition(".")[0] in script.models for each in calls(loss)):
            name = script.free("loss", "step_loss")
            made = statement(f"{name} = {{value}}", value=loss)
            inside.add(led_by(made, [line for line in leading(backward) if line.comment]))
            backward = led_by(backward, [])
            loss = cst.Name(name)
        names = models or [name for name in models_of(script, inside.body) if name]
        running = [name for name in names if not name.startswith("*")]
        running += models_of(script, inside.body) if len(running) < len(names) else []
        start, end = forward(script, inside.body, loss, running)
        start = start if begin is None else begin
        held = [*early.rest(), *inside.rest()]
        window = self._accumulated(
            inside.body[start:],
            end - start,
            self._backward(led_by(backward, [*held, *leading(backward)]), loss, again=several),
            names,
            running,
        )
        trained = {name for name in names if name in script.models}
        if step.clips & trained and trained - step.clips:
            rest[at] = led_by(rest[at], [*leading(rest[at]), self._notes.change(_CLIPPED)])
        head = [*body.head, statement(f"{script.state} = {script.state}.next({body.batch})")]
        if asks:
            head.append(statement(f"{script.synced} = {script.state}.sync"))
        every = (*inside.body, *rest)
        if any(script.method(call) == "set_trigger" for each in every for call in calls(each)):
            head.append(statement("trigger = False"))
        lines = [*head, *inside.body[:start], window, *rest]
        gathers = Gathers(script, body.batch, evaluating=False)
        lines = [changed_by(each, gathers) for each in lines]
        leave = _Leave(script, body.batch, names, returns=self._carried)
        return [changed_by(each, leave) for each in lines]

    def _whole(
        self, nodes: Sequence[cst.BaseStatement], begin: int | None, last: cst.Call
    ) -> tuple[Lines, int | None, bool]:
        """Return the statements before the last backward without divisions of losses, and whether one is a backward."""
        script = self._script
        inside = Lines()
        earlier = [each for node in nodes for each in _backwards(script, node)]
        losses = {name for each in (last, *earlier) for name in loads(each)}
        seen = 0
        for at, each in enumerate(nodes):
            if _backwards(script, each):
                loss = undivided(script, cast(cst.Call, called(each)).args[0].value, self.length)
                inside.add(self._backward(each, loss, again=seen > 0))
                seen += 1
            elif is_division(script, each, self.length):
                self._notes.leave_out(each)
                begin = begin - 1 if begin is not None and at < begin else begin
            else:
                inside.add(whole_loss(script, each, self.length, losses))
        return inside, begin, seen > 0

    def _early(self, body: Body, before: Sequence[cst.BaseStatement]) -> tuple[Lines, int | None]:
        """Return the statements before the backward that stay, and the first of them inside of `accumulate`."""
        early = Lines()
        begin: int | None = None
        for at, each in zip(body.places, before, strict=False):
            if self._begin is not None and begin is None and at >= self._begin:
                begin = len(early.body)
            if self._step.takes(each):
                early.drop(each)
            else:
                early.add(each)
        return early, begin

    def _backward(self, line: cst.BaseStatement, loss: cst.BaseExpression, *, again: bool) -> cst.BaseStatement:
        """Return the line of a backward; a second one of a window is of the same samples."""
        script = self._script
        call = cast(cst.Call, called(line))
        written = statement(f"{script.state} = accel.backward({script.ctx}, {{loss}}, {script.state})", loss=loss)
        options = [arg for arg in call.args[1:] if arg.keyword is not None]
        options += [keyword_arg("same_units", cst.Name("True"))] if again else []
        if options:
            inner = cast(cst.Assign, small(written))
            made = cast(cst.Call, inner.value)
            inner = inner.with_changes(value=made.with_changes(args=[*made.args, *options]))
            written = cast(cst.SimpleStatementLine, written).with_changes(body=[inner])
        marks = [self._notes.change(_ROWS), *([self._notes.change(_AGAIN)] if again else [])]
        trailing = cast(cst.SimpleStatementLine, line).trailing_whitespace
        return written.with_changes(leading_lines=[*leading(line), *marks], trailing_whitespace=trailing)

    def _accumulated(
        self,
        nodes: Sequence[cst.BaseStatement],
        end: int,
        written: cst.BaseStatement,
        names: list[str],
        running: list[str],
    ) -> cst.BaseStatement:
        script = self._script
        own = any(script.method(each) == "autocast" for node in nodes for each in calls(node))
        lines: list[cst.BaseStatement] = list(nodes)
        first = next((at for at, each in enumerate(nodes[:end]) if not running or runs(script, each, running)), None)
        if first is not None and not own:
            marks = [self._notes.change(_OUTPUTS)]
            lines = [*nodes[:first], *autocast(script, nodes[first:end], marks), *nodes[end:]]
        lines.append(written)
        wrapped = [name for name in names if name not in script.local.values()]
        outer = statement(f"with accel.accumulate({', '.join([script.ctx, script.state, *wrapped])}):\n    pass")
        opened = self._begin is not None and block(self._chain[-1])[self._begin]
        if isinstance(opened, cst.With) and isinstance(opened.body, cst.IndentedBlock):
            outer = cast(cst.With, outer)
            outer = outer.with_changes(body=outer.body.with_changes(header=opened.body.header))
        blanks = [each for each in leading(lines[0])[:1] if each.comment is None]
        lines[0] = led_by(lines[0], leading(lines[0])[len(blanks) :])
        return led_by(with_block(outer, lines), blanks)


def _with_synced(script: Script, node: cst.BaseStatement) -> cst.BaseStatement:
    """Write `accelerator.sync_gradients` behind the step, after which the state waits for the next window."""

    def change(original: cst.Attribute, changed: cst.Attribute) -> cst.BaseExpression:
        return cst.Name(script.synced) if script.is_attribute(original, "sync_gradients") else changed

    return changed_at(node, cst.Attribute, change)


class _Leave(Change):
    """A `break` out of the epoch, or a return of its state: the next pass begins with the next epoch."""

    skips = (cst.For, cst.While, cst.FunctionDef)

    def __init__(self, script: Script, batch: str, models: list[str], *, returns: bool) -> None:
        self._script = script
        self._batch = batch
        self._models = models
        self._kinds = (cst.Break, cst.Return) if returns else (cst.Break,)

    def leave_simple_statement_line(
        self, original: cst.SimpleStatementLine, updated: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.BaseStatement]:
        if not isinstance(small(original), self._kinds):
            return updated
        state = self._script.state
        dropped = f"accel.training.discard({', '.join([state, *self._models])})" if self._models else state
        left = statement(f"if not {self._batch}.is_last:\n    {state} = {dropped}.next_epoch()")
        return cst.FlattenSentinel([led_by(left, updated.leading_lines), led_by(updated, [])])  # type: ignore[list-item]
