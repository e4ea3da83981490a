# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a step for `save_state`, the state from `load_state`, and the folders of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import libcst as cst

from accel.migrate._items import counted
from accel.migrate._reading import marked
from accel.migrate._script import ScopePass, Script
from accel.migrate._tree import (
    Change,
    Lines,
    Remarks,
    argument,
    block,
    called,
    calls,
    changed_by,
    expression,
    full_name,
    leading,
    led_by,
    loads,
    own_lines,
    replace_names,
    small,
    statement,
    targets,
    text_of,
    value_of,
    walk,
    with_block,
)

_NEWEST = "accel.resume finds the newest checkpoint, or begins anew: the search by hand is left out"
_FOLDER = (
    "checkpoints are folders step-N of one folder, named by optimizer steps; folders of Accelerate are not read here"
)
_BESIDE = "files next to a save are no part of it, and keep= spares its folder; accel.items.Folder(save=) takes them in"


class Checkpoints(ScopePass):
    """`save_state` and `load_state` of a scope that has a state."""

    def rewritten(self, node: cst.FunctionDef | cst.Module) -> cst.CSTNode:
        body = node.body if isinstance(node, cst.FunctionDef) else node
        made = any(f"{self._script.state} = accel.train_state" in text_of(each) for each in own_lines(body))
        methods = {self._script.method(call) for call in calls(body)}
        if not made or not methods & {"save_state", "load_state"}:
            return node
        return changed_by(node, _Scope(self._script, self._notes, node))


def _lines(node: cst.CSTNode) -> Iterator[cst.SimpleStatementLine]:
    return (each for each in walk(node) if isinstance(each, cst.SimpleStatementLine))


class _Scope(Change):
    def __init__(self, script: Script, notes: Remarks, scope: cst.CSTNode) -> None:
        self._script = script
        self._notes = notes
        self._training = {id(loop) for loop in _trained(scope)}
        self._around: list[str] = []
        self._counters = self._counted(scope)
        self._epochs = self._starts(scope)
        self._paths: dict[str, cst.BaseExpression] = {}
        for node in walk(scope):
            self._note_path(node)
        self._gone: set[str] = set()
        self._scope = scope

    def _counted(self, scope: cst.CSTNode) -> dict[str, bool]:
        """Return counters of the training loop, and whether they count optimizer steps."""
        found: dict[str, bool] = {}
        for loop in _trained(scope):
            for node in block(loop):
                for line in _lines(node):
                    inner = small(line)
                    if isinstance(inner, cst.AugAssign) and text_of(inner.value) == "1" and targets(line):
                        synced = isinstance(node, cst.If) and self._is_sync(node.test)
                        found[targets(line)[0]] = synced
        return found

    def _is_sync(self, test: cst.BaseExpression) -> bool:
        return text_of(test) in (f"{self._script.state}.sync", self._script.synced)

    def _starts(self, scope: cst.CSTNode) -> set[str]:
        found: set[str] = set()
        for loop in walk(scope):
            call = counted(loop)
            if call is None or len(call.args) < 2:
                continue
            trains = any(full_name(each.func) in self._script.epochs for each in calls(loop))
            if trains or "accel.backward(" in text_of(loop):
                found.add(full_name(call.args[0].value))
        return found

    def _note_path(self, node: cst.CSTNode) -> None:
        """Note the folder of a variable that is the path of a checkpoint."""
        if isinstance(node, cst.If) and len(inner := block(node)) == 1 and targets(inner[0]):
            folder = _folder(value_of(inner[0]))
            if folder is not None and text_of(node.test) == f"{text_of(folder)} is not None":
                self._paths[targets(inner[0])[0]] = expression('{folder} or "."', folder=folder)
        elif isinstance(node, cst.SimpleStatementLine) and len(names := targets(node)) == 1:
            folder = _folder(value_of(node))
            if folder is not None and isinstance(small(node), cst.Assign):
                _ = self._paths.setdefault(names[0], folder)

    def visit_for(self, node: cst.For) -> None:
        self._around.append("loop" if id(node) in self._training else "for")

    def leave_for(self, original: cst.For, updated: cst.For) -> cst.For:
        _ = self._around.pop()
        return updated

    def visit_if(self, node: cst.If) -> None:
        self._around.append(text_of(node.test))

    def leave_if(self, original: cst.If, updated: cst.If) -> cst.BaseStatement | cst.RemovalSentinel:
        _ = self._around.pop()
        if "accel.load_state(" in text_of(updated):
            nested = [each for each in self._around if each not in ("loop", "for")]
            return updated if nested or self._around else self._restored(updated)
        lines = block(updated)
        saves = any(text_of(each).startswith("accel.save_state(") for each in lines)
        if saves and self._in_window():
            between_windows = expression(f"{self._script.state}.valid is None")
            test = cst.BooleanOperation(left=_operand(updated.test), operator=cst.And(), right=between_windows)
            why = "a checkpoint holds no gradients: saves within a window are left to its end"
            return marked(updated.with_changes(test=test), self._notes.change(why))
        return updated

    def _in_window(self) -> bool:
        """Whether this is the innermost training loop, outside of the block that ends a window."""
        loops = [at for at, each in enumerate(self._around) if each in ("loop", "for")]
        if not self._script.windows or not loops or self._around[loops[-1]] != "loop":
            return False
        return not {f"{self._script.state}.sync", self._script.synced} & set(self._around[loops[-1] :])

    def leave_indented_block(self, original: cst.IndentedBlock, updated: cst.IndentedBlock) -> cst.IndentedBlock:
        """Leave out the names of folders that nothing else reads, and what asks for a batch to skip."""
        lines = Lines()
        saves = any("accel.save_state(" in text_of(each) for each in updated.body)
        keep = path = ""
        for node in cast("tuple[cst.BaseStatement, ...]", updated.body):
            if text_of(node).startswith("accel.save_state("):
                node = _saved(cast(cst.SimpleStatementLine, node), keep, path)
            if saves and (limit := _rotation(node)):
                keep = limit
                self._notes.leave_out(node)
            elif saves and self._is_path(node):
                lines.drop(node)
            elif self._skips(node):
                self._notes.leave_out(node)
            elif saves and self._names_save(node):
                path = targets(node)[0]
                lines.hold([*leading(node), *self._written_into(path)])
            else:
                lines.add(node)
        if len(lines.body) == len(updated.body) and not keep and not path:
            return updated
        body = lines.body or [cst.SimpleStatementLine([cst.Pass()])]
        if updated.body[0] not in body:  # no blank line begins a block
            body[0] = led_by(body[0], [line for line in leading(body[0]) if line.comment])
        return updated.with_changes(body=body, footer=[*lines.rest(), *updated.footer])

    def _names_save(self, node: cst.BaseStatement) -> bool:
        """Whether a line makes the path of a save, which other lines read too."""
        if len(targets(node)) != 1 or _folder(value_of(node)) is None:
            return False
        saves = (call for call in calls(self._scope) if self._script.method(call) == "save_state" and call.args)
        return any(full_name(call.args[0].value) == targets(node)[0] for call in saves)

    def _written_into(self, path: str) -> list[cst.EmptyLine]:
        """Return a mark where calls other than messages get the path of a save."""
        for call in calls(self._scope):
            name = self._script.method(call) or full_name(call.func)
            values = [arg.value for arg in call.args if not isinstance(arg.value, cst.FormattedString)]
            if any(path in loads(each) for each in values) and name not in ("save_state", "load_state", "print", "str"):
                return [self._notes.change(_BESIDE)]
        return []

    def _is_path(self, node: cst.BaseStatement) -> bool:
        names = targets(node)
        if isinstance(node, cst.If):
            inner = block(node)
            return node.orelse is None and bool(inner) and all(self._is_path(each) for each in inner)
        if len(names) != 1 or names[0] not in self._paths or not isinstance(small(node), cst.Assign):
            return False
        return self._only_path(names[0])

    def _only_path(self, name: str) -> bool:
        """Whether a variable is read by nothing but saves and the lines that make it."""
        mine = 0
        for each in walk(self._scope):
            if isinstance(each, cst.SimpleStatementLine) and name in loads(each):
                saving = self._script.method(called(each)) == "save_state"
                mine += targets(each) != [name] and not saving
        return mine == 0

    def _skips(self, node: cst.BaseStatement) -> bool:
        if not isinstance(node, cst.If) or not self._gone & loads(node) or node.orelse is not None:
            return False
        return all(
            self._skips(each) or isinstance(small(each), (cst.Pass, cst.Continue)) or ".update(" in text_of(each)
            for each in block(node)
        )

    def _restored(self, node: cst.If) -> cst.BaseStatement:
        """Reduce the idiom that reads epoch and step from the folder's name to what the state knows."""
        state = self._script.state
        lines = Lines()
        assigned = {name for line in _lines(node) for name in targets(line)}
        derived = assigned - {state, "loaded", *self._counters}
        kept = [line for line in _lines(node) if set(targets(line)) & derived and self._is_copy(line)]
        pending = list(block(node))
        while pending:
            each = pending.pop(0)
            text = text_of(each)
            if isinstance(each, cst.If) and "accel.load_state(" in text:
                inner = block(each)
                if each.orelse is not None:
                    if not any("accel.load_state(" in text_of(line) for line in inner):
                        inner = block(each.orelse)
                    for other in [line for line in (*block(each), *block(each.orelse)) if line not in inner]:
                        self._leave_out(other, kept, derived)
                lines.hold([line for line in leading(each) if line.comment])
                pending = [*inner, *pending]
                continue
            mine = {name for line in _lines(each) for name in targets(line)}
            if "accel.load_state(" in text:
                for made in self._newest(each, derived, node):
                    lines.add(made)
            elif "loaded[" in text or not (mine | loads(each)) & (derived | set(self._counters)):
                lines.add(each)
            else:
                self._leave_out(each, kept, derived)
        for name in sorted(self._epochs & assigned):
            lines.add(statement(f"{name} = {state}.epoch"))
        for name, synced in self._counters.items():
            if name in assigned and synced:
                lines.add(statement(f"{name} = {state}.updates"))
        for line in {text_of(each): each for each in kept}.values():
            lines.add(led_by(line, []))
        reduced = with_block(node, lines.body)
        left = {name for line in _lines(reduced) for name in targets(line)}
        self._gone |= {name for name in derived - self._epochs - left if not self._set_elsewhere(name, node)}
        return reduced

    def _leave_out(self, node: cst.BaseStatement, kept: Sequence[cst.BaseStatement], derived: set[str]) -> None:
        """Leave out the comments of lines that go, except lines that also occur elsewhere, and those above conditions
        of `derived` variables."""
        texts = [text_of(line) for line in (*_lines(self._scope), *kept)]
        for line in _lines(node):
            if texts.count(text_of(line)) == 1:
                self._notes.leave_out(line)
        for each in walk(node):
            if isinstance(each, cst.If) and loads(each.test) & derived:
                for line in leading(each):
                    self._notes.leave_out(line)

    def _is_copy(self, line: cst.SimpleStatementLine) -> bool:
        """Whether a line keeps a counter under another name."""
        return full_name(cast(cst.CSTNode, value_of(line))) in self._counters

    def _newest(self, line: cst.BaseStatement, derived: set[str], node: cst.If) -> list[cst.BaseStatement]:
        """Return a load from a folder that the script searched for as `resume` of the newest checkpoint.

        A branch that takes the folder's name from elsewhere stays a load of that folder.
        """
        call = value_of(line)
        call = call.value if isinstance(call, cst.Subscript) else call
        if not isinstance(call, cst.Call) or len(call.args) < 2 or not loads(call.args[1].value) & derived:
            return [line]
        named, test = _named(node, call.args[1].value, derived)
        if named is not None:
            named = line.with_deep_changes(call.args[1], value=named)
        folder = _folder(call.args[1].value)
        state, ctx = self._script.state, self._script.ctx
        if folder is None or loads(folder) & derived:
            if named is not None:
                return [named]
            what = self._notes.decide(
                "the folder to resume from: accel.resume(ctx, folder, items, state)", "checkpoints"
            )
            return [led_by(line, [*leading(line), what])]
        made = cst.parse_statement(f"{state} = accel.resume({ctx}, {text_of(folder)}, items, {state})")
        if targets(line) == ["loaded"]:  # with counters, which resume does not return
            made = cst.parse_statement(text_of(line).replace(text_of(call.args[1].value), text_of(folder), 1))
        marks = [*leading(line), self._notes.change(_NEWEST)]
        if named is None or test is None:
            return [led_by(made, marks)]
        other = cst.Else(cst.IndentedBlock([made]))
        return [cst.If(test, cst.IndentedBlock([led_by(named, [])]), other, leading_lines=marks)]

    def _set_elsewhere(self, name: str, node: cst.If) -> bool:
        inside = sum(1 for line in _lines(node) if name in targets(line))
        return sum(1 for line in _lines(self._scope) if name in targets(line)) > inside

    def leave_simple_statement_line(
        self, original: cst.SimpleStatementLine, updated: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        call = called(updated)
        method = self._script.method(call)
        if call is None or method not in ("save_state", "load_state"):
            return updated
        script, state = self._script, self._script.state
        path = argument(call, "output_dir" if method == "save_state" else "input_dir", 0) or expression('"checkpoints"')
        restored = [name for name, synced in self._counters.items() if not synced]
        held = ", ".join([f'"state": {state}', *(f'"{name}": {name}' for name in restored)])
        if method == "save_state":
            folder = self._paths.get(full_name(path)) or _folder(path) or path
            keep = f", keep={text_of(script.tracked['total_limit'])}" if "total_limit" in script.tracked else ""
            text = f"accel.save_state({script.ctx}, {text_of(folder)}, items | {{{held}}}, step={state}.updates{keep})"
            return _like(updated, [cst.parse_statement(text)], [self._notes.change(_FOLDER)])
        text = f"accel.load_state({script.ctx}, {text_of(path)}, items | {{{held}}})"
        if not restored:
            return _like(updated, [cst.parse_statement(f'{state} = {text}["state"]')], [])
        names = ", ".join((state, *restored))
        values = ", ".join(f'loaded["{name}"]' for name in ("state", *restored))
        lines: list[cst.BaseStatement] = [
            cst.parse_statement(f"loaded = {text}"),
            cst.parse_statement(f"{names} = {values}"),
        ]
        return _like(updated, lines, [])


def _named(
    node: cst.If, path: cst.BaseExpression, derived: set[str]
) -> tuple[cst.BaseExpression | None, cst.BaseExpression | None]:
    """Return the path of a checkpoint that the script names, and the condition of that branch; None where it searches.

    The branch gives the variables of the path: `if args.resume != "latest": name = os.path.basename(args.resume)`.
    """
    for each in walk(node.body):
        if not isinstance(each, cst.If) or not isinstance(each.orelse, cst.Else):
            continue
        other = expression("not ({test})", test=each.test)
        for body, test in ((block(each), each.test), (block(each.orelse), other)):
            made = {targets(line)[0]: value for line in body if (value := value_of(line)) is not None and targets(line)}
            if len(made) == len(body):
                found = replace_names(path, made)
                if loads(path) & made.keys() and not loads(found) & derived:
                    return found, test
    return None, None


def _saved(node: cst.SimpleStatementLine, keep: str, path: str) -> cst.BaseStatement:
    """Return a save with a limit on the checkpoints that are kept, and with its path for other lines."""
    text = text_of(node)
    if keep and "keep=" not in text:
        text = f"{text[:-1]}, keep={keep})"
    made = cst.parse_statement(f"{path} = {text}" if path else text)
    return made.with_changes(leading_lines=node.leading_lines, trailing_whitespace=node.trailing_whitespace)


def _rotation(node: cst.BaseStatement) -> str:
    """Return the limit of `if limit is not None:` around a deletion of older checkpoints, empty for other lines."""
    if not isinstance(node, cst.If) or node.orelse is not None:
        return ""
    if not any(full_name(call.func) == "shutil.rmtree" for call in calls(node)):
        return ""
    test = text_of(node.test)
    return test.removesuffix(" is not None") if test.endswith(" is not None") else ""


def _trained(scope: cst.CSTNode) -> list[cst.For]:
    """Return the innermost loops with a backward."""
    found = [loop for loop in walk(scope) if isinstance(loop, cst.For) and "accel.backward(" in text_of(loop)]
    return [loop for loop in found if not any(inner is not loop and inner in found for inner in walk(loop))]


def _operand(node: cst.BaseExpression) -> cst.BaseExpression:
    loose = isinstance(node, (cst.IfExp, cst.Lambda)) or (
        isinstance(node, cst.BooleanOperation) and isinstance(node.operator, cst.Or)
    )
    if loose and not node.lpar:
        return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return node


def _like(
    node: cst.SimpleStatementLine, lines: list[cst.BaseStatement], marks: list[cst.EmptyLine]
) -> cst.FlattenSentinel[cst.BaseStatement]:
    lines[0] = led_by(lines[0], [*leading(node), *marks])
    lines[-1] = lines[-1].with_changes(trailing_whitespace=node.trailing_whitespace)
    return cst.FlattenSentinel(lines)


def _folder(value: cst.CSTNode | None) -> cst.BaseExpression | None:
    """Return the folder of `os.path.join(folder, name)` and similar numbered paths; None for other values."""
    if isinstance(value, cst.FormattedString) and len(value.parts) > 1:
        first, second = value.parts[0], value.parts[1]
        if isinstance(first, cst.FormattedStringExpression) and isinstance(second, cst.FormattedStringText):
            return first.expression if second.value.startswith("/") else None
        folder = first.value.rpartition("/")[0] if isinstance(first, cst.FormattedStringText) else ""
        return cst.SimpleString(f"{value.quote}{folder}{value.quote}") if folder else None
    if isinstance(value, cst.BinaryOperation) and isinstance(value.operator, cst.Divide):
        return value.left if isinstance(value.right, cst.FormattedString) else None
    if not isinstance(value, cst.Call) or full_name(value.func) not in ("os.path.join", "join", "Path"):
        return None
    if len(value.args) == 2 and not isinstance(value.args[1].value, cst.SimpleString):
        first_arg = value.args[0].value
        numbered = isinstance(value.args[1].value, cst.FormattedString)
        return first_arg if loads(first_arg) or numbered else None
    return None
