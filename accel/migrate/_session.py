# SPDX-License-Identifier: Apache-2.0
"""`Accelerator(...)` to `accel.session(...)`: around the call of the function that made it, or around what follows.

Of a function that made it, long code below becomes a second function, which takes the context and keeps its indents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import libcst as cst
from typing_extensions import override

from accel.migrate._options import Made, Options, merged
from accel.migrate._script import Script, ScriptPass
from accel.migrate._tree import (
    SCOPES,
    Change,
    Remarks,
    block,
    bound,
    called,
    calls,
    changed_by,
    children,
    expression,
    full_name,
    keyword_arg,
    leading,
    led_by,
    loads,
    names_in,
    replace_names,
    small,
    statement,
    targets,
    text_of,
    walk,
    with_block,
)

_OPEN = "who closes this context: accel.close({ctx}), or the accel.session of a caller that passes it"


class Sessions(ScriptPass):
    """Put a session around what used an Accelerator."""

    def __init__(self, script: Script, notes: Remarks, module: cst.Module, *, cells: bool = False) -> None:
        super().__init__(script, notes)
        self._module = module
        self._cells = cells
        self._options = Options(script, notes)
        self._hoisted: dict[str, Made] = {}
        self.above: dict[str, list[cst.EmptyLine]] = {}  # comments of an opener, by the function that it leaves
        self._launched = _launched(script, module)
        self._names: list[str] = []

    def visit_function_def(self, node: cst.FunctionDef) -> None:
        self._names.append(node.name.value)

    def leave_function_def(
        self, original: cst.FunctionDef, updated: cst.FunctionDef
    ) -> cst.FunctionDef | cst.FlattenSentinel[cst.BaseStatement]:
        _ = self._names.pop()
        body = block(updated)
        found = self._maker(body)
        name = original.name.value
        if name in self._script.shared.factories and not self._names:
            return self._opening(updated, found)
        if name in self._script.shared.returners and not self._names:
            return self._returning(updated, found)
        if found is None:
            return updated
        at, made = found
        kept = [*self._lead(body[at]), *made.notes]
        is_kept = bool(set(targets(body[at])) & self._script.kept)
        if is_kept or self._returns(made):
            owner = f"self.{self._script.ctx}" if is_kept else self._script.ctx
            kept.append(self._notes.decide(_OPEN.format(ctx=owner), "classes"))
            line = led_by(self._line(made), kept)
            return with_block(updated, [*body[:at], line, *body[at + 1 :]])
        rest = body[at + 1 :]
        if name in self._launched and not self._names:
            self._launched[name] = made
            rest = [*self._replaced(name, made), *rest]
            return _taking(with_block(updated, [*body[:at], *_led(rest, kept)]), self._script.ctx)
        if not self._names and self._can_hoist(original, made):
            self._hoisted[name] = made
            self.above[name] = [line for line in kept if line.comment]
            return _taking(with_block(updated, [*body[:at], *_led(rest, kept[:0])]), self._script.ctx)
        if not self._names:
            opened = cast(cst.With, led_by(self.opened(made, {}), kept))
            parts = _lifted(updated, opened, body[:at], rest, self._script, self._read_later(rest))
            if parts is not None:
                return parts
        return with_block(updated, [*body[:at], self._around(made, rest, kept)])

    def leave_module(self, original: cst.Module, updated: cst.Module) -> cst.Module:
        body = list(cast("Sequence[cst.BaseStatement]", updated.body))
        found = self._maker(body)
        if found is not None:
            at, made = found
            kept = [*self._lead(body[at]), *made.notes]
            if self._cells or at == len(body) - 1:
                body = [*body[:at], led_by(self._line(made), kept), *body[at + 1 :]]
            else:
                body = [*body[:at], self._around(made, body[at + 1 :], kept)]
            updated = updated.with_changes(body=body)
        wrap = _Callers(self._script, self._hoisted, self._launched, self)
        return changed_by(updated, wrap)

    def _read_later(self, rest: Sequence[cst.BaseStatement]) -> set[str]:
        """Return the names that a later pass writes into lines: names in the options of trackers."""
        begins = any(self._script.method(call) == "init_trackers" for line in rest for call in calls(line))
        return {name for each in self._script.tracked.values() for name in loads(each)} if begins else set()

    def _opening(self, node: cst.FunctionDef, found: tuple[int, Made] | None) -> cst.FunctionDef:
        """Return a function that opens a session for its caller, in place of one that returned an Accelerator."""
        body = block(node)
        last = cast(cst.Return, small(body[-1]))
        at, made = found if found is not None else (len(body) - 1, self._options.read(cast(cst.Call, last.value)))
        lead = [*leading(body[at]), *made.notes]
        given = led_by(statement(f"yield {self._script.ctx}"), leading(body[-1]) if found is not None else [])
        rest = [*body[at + 1 : -1], given]
        decorator = cst.Decorator(expression("contextlib.contextmanager"))
        node = with_block(node, [*body[:at], led_by(with_block(self.opened(made, {}), rest), lead)])
        return node.with_changes(decorators=[decorator], returns=None)

    def _returns(self, made: Made) -> bool:
        """Whether what opens a context is a function that returns it."""
        opener = made.opener
        return opener is not None and full_name(opener.func).rpartition(".")[2] in self._script.shared.returners

    def _returning(self, node: cst.FunctionDef, found: tuple[int, Made] | None) -> cst.FunctionDef:
        """Return a function that returns a context, in place of one that returned an Accelerator."""
        body = block(node)
        last = small(body[-1])
        value = last.value if isinstance(last, cst.Return) else None
        if value is None or (found is None and not self._script.makes(value)):
            return node  # another function of that name
        if found is None:
            made = self._options.read(cast(cst.Call, value))
            self._notes.leave_out(value)
            given = statement("return {opened}", opened=self._call("accel.from_env", made))
            return with_block(node, [*body[:-1], led_by(given, [*leading(body[-1]), *made.notes])])
        at, made = found
        line = led_by(self._line(made), [*leading(body[at]), *made.notes])
        given = led_by(statement(f"return {self._script.ctx}"), leading(body[-1]))
        return with_block(node, [*body[:at], line, *body[at + 1 : -1], given])

    def _replaced(self, name: str, made: Made) -> list[cst.BaseStatement]:
        """Return the line that gives a launched function's context the settings that its launcher does not take."""
        launches = [call for call in calls(self._module) if _runs(self._script, call) == name]
        is_placed = _is_text(made.settings.get("precision")) and all(map(self.takes_precision, launches))
        settings = {key: value for key, value in made.settings.items() if not (is_placed and key == "precision")}
        if not settings:
            return []
        call = self._call("accel.replace", Made(settings, []))
        first = cst.Arg(cst.Name(self._script.ctx))
        return [statement(f"{self._script.ctx} = {{made}}", made=call.with_changes(args=[first, *call.args]))]

    def takes_precision(self, launch: cst.Call) -> bool:
        """Whether the call of a launcher can get a precision, and has none."""
        given = {arg.keyword.value for arg in launch.args if arg.keyword}
        return self._script.origin(launch.func) == "notebook_launcher" and "mixed_precision" not in given

    def _line(self, made: Made) -> cst.BaseStatement:
        """Return a line that opens a context, which nothing closes."""
        opened = self._call("accel.from_env", made) if made.opener is None else made.opener
        return statement(f"{self._script.ctx} = {{opened}}", opened=opened)

    def opened(self, made: Made, values: Mapping[str, cst.BaseExpression]) -> cst.With:
        """Return `with accel.session(...) as ctx:`, its settings in the words of a caller."""
        settings = {name: replace_names(value, values) for name, value in made.settings.items()}
        opener = None if made.opener is None else replace_names(made.opener, values)
        call = self._call("accel.session", Made(settings, [])) if opener is None else opener
        item = cst.WithItem(call, asname=cst.AsName(name=cst.Name(self._script.ctx)))
        return cst.With(items=[item], body=cst.IndentedBlock([]))

    def _around(
        self, made: Made, rest: Sequence[cst.BaseStatement], kept: Sequence[cst.EmptyLine]
    ) -> cst.BaseStatement:
        if not self._names:
            rest = [cast(cst.BaseStatement, node.visit(_Blank())) for node in rest]
        return led_by(with_block(self.opened(made, {}), rest), kept)

    @staticmethod
    def _lead(node: cst.BaseStatement) -> list[cst.EmptyLine]:
        """Return the comments above and behind a line that opens a context."""
        behind = node.trailing_whitespace.comment if isinstance(node, cst.SimpleStatementLine) else None
        return [*leading(node), *([cst.EmptyLine(comment=behind)] if behind is not None else [])]

    @staticmethod
    def _call(function: str, made: Made) -> cst.Call:
        call = cast(cst.Call, expression(f"{function}()"))
        return call.with_changes(args=[keyword_arg(name, value) for name, value in made.settings.items()])

    def _maker(self, body: Sequence[cst.BaseStatement]) -> tuple[int, Made] | None:
        for at, node in enumerate(body):
            parts = self._parts(node)
            if parts:
                return at, merged(parts)
        return None

    def _parts(self, node: cst.BaseStatement) -> list[tuple[cst.BaseExpression | None, Made]]:
        """Return the branches of a statement that makes an Accelerator, the last without a condition."""
        if isinstance(node, cst.If):
            inner = block(node)
            first = self._parts(inner[0]) if len(inner) == 1 else []
            other: list[tuple[cst.BaseExpression | None, Made]] = []
            if isinstance(node.orelse, cst.If):
                other = self._parts(node.orelse)
            elif node.orelse is not None:
                last = block(node.orelse)
                other = self._parts(last[0]) if len(last) == 1 else []
            return [(node.test, first[0][1]), *other] if len(first) == 1 and other else []
        inner_line = small(node)
        if not isinstance(inner_line, cst.Assign) or not set(targets(node)) & set(self._script.makers):
            return []
        return self._values(inner_line.value)

    def _values(self, value: cst.BaseExpression) -> list[tuple[cst.BaseExpression | None, Made]]:
        if isinstance(value, cst.IfExp):
            first = self._values(value.body)
            other = self._values(value.orelse)
            return [(value.test, first[0][1]), *other] if len(first) == 1 and other else []
        if not self._script.makes(value) or not isinstance(value, cst.Call):
            return []
        self._notes.leave_out(value)
        if self._script.is_factory(value):
            return [(None, Made({}, [], value))]
        return [(None, self._options.read(value))]

    def _can_hoist(self, node: cst.FunctionDef, made: Made) -> bool:
        name = node.name.value
        mentions = sum(1 for each in walk(self._module) if isinstance(each, cst.Name) and each.value == name)
        found = [call for call in calls(self._module) if full_name(call.func) == name]
        lines = [
            each for each in walk(self._module) if isinstance(each, cst.SimpleStatementLine) and called(each) in found
        ]
        if (
            mentions != 2
            or len(found) != 1
            or len(lines) != 1
            or node.decorators
            or any(arg.star for arg in found[0].args)
        ):
            return False
        values = dict(bound(found[0], node))
        read = list(made.settings.values())
        read += [] if made.opener is None else [arg.value for arg in made.opener.args]
        used = {each for value in read for each in loads(value)}
        local = {each for line in walk(node.body) for each in targets(line)}
        params = {each.name.value for each in node.params.params}
        literal = {name for name, value in values.items() if not isinstance(value, (cst.Name, cst.Attribute))}
        if any(literal & loads(value) and not isinstance(value, cst.Name) for value in read):
            return False
        for each in used & (local | params):
            if each in local or not isinstance(
                values.get(each), (cst.Name, cst.Attribute, cst.SimpleString, cst.Integer)
            ):
                return False
        return True


def _led(rest: Sequence[cst.BaseStatement], kept: Sequence[cst.EmptyLine]) -> list[cst.BaseStatement]:
    if not rest:
        return []
    held = [line for line in kept if line.comment is not None]
    if kept and kept[0].comment is None and not any(line.comment is None for line in leading(rest[0])[:1]):
        held.insert(0, kept[0])
    return [led_by(rest[0], [*held, *leading(rest[0])]), *rest[1:]]


def _taking(node: cst.FunctionDef, ctx: str) -> cst.FunctionDef:
    """Return a function that takes the context first."""
    params = node.params
    if any(param.name.value == ctx for param in params.params):
        return node
    first = cst.Param(cst.Name(ctx))
    return node.with_changes(params=params.with_changes(params=[first, *params.params]))


def _runs(script: Script, call: cst.Call) -> str:
    """Return the function that a call hands to `notebook_launcher` or `debug_launcher`; empty for other calls."""
    is_launcher = script.origin(call.func) in ("notebook_launcher", "debug_launcher") and call.args
    return full_name(call.args[0].value) if is_launcher else ""


def _is_text(value: cst.BaseExpression | None) -> bool:
    return isinstance(value, cst.SimpleString)


def _launched(script: Script, module: cst.Module) -> dict[str, Made | None]:
    """Return the functions that a script hands to `notebook_launcher` or `debug_launcher`."""
    return {name: None for call in calls(module) if (name := _runs(script, call)) in script.functions}


class _Blank(cst.CSTTransformer):
    """Blank lines of a module stay blank where they are indented."""

    @override
    def leave_EmptyLine(self, original_node: cst.EmptyLine, updated_node: cst.EmptyLine) -> cst.EmptyLine:
        if original_node.comment is None and not original_node.whitespace.value:
            return updated_node.with_changes(indent=False)
        return updated_node


class _Callers(Change):
    """Open the session around the one call of a function that takes the context now."""

    def __init__(
        self, script: Script, hoisted: Mapping[str, Made], launched: Mapping[str, Made | None], sessions: Sessions
    ) -> None:
        super().__init__()
        self._script = script
        self._hoisted = hoisted
        self._launched = launched
        self._sessions = sessions

    def leave_call(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        if full_name(original.func) in self._hoisted:
            first = cst.Arg(cst.Name(self._script.ctx))
            return updated.with_changes(args=[first, *updated.args])
        if _runs(self._script, original):
            made = self._launched.get(_runs(self._script, original))
            precision = made.settings.get("precision") if made else None
            if precision is not None and _is_text(precision) and self._sessions.takes_precision(original):
                args = [arg.with_changes(comma=cst.MaybeSentinel.DEFAULT) for arg in updated.args]
                return updated.with_changes(args=[*args, keyword_arg("precision", precision)])
        return updated

    def leave_simple_statement_line(
        self, original: cst.SimpleStatementLine, updated: cst.SimpleStatementLine
    ) -> cst.BaseStatement:
        call = called(original)
        name = full_name(call.func) if call is not None else ""
        if call is None or name not in self._hoisted:
            return updated
        function = self._script.functions[name]
        values = dict(bound(call, function))
        opened = self._sessions.opened(self._hoisted[name], values)
        line = led_by(updated, [])
        above = self._sessions.above.get(name, [])
        return led_by(with_block(opened, [line]), [*updated.leading_lines, *above])


_NO_SIGN = cst.MaybeSentinel.DEFAULT
_SHORT = 12  # most lines that stay in a block; longer code becomes a function


def _lifted(
    node: cst.FunctionDef,
    opened: cst.With,
    before: Sequence[cst.BaseStatement],
    rest: Sequence[cst.BaseStatement],
    script: Script,
    later: set[str],
) -> cst.FlattenSentinel[cst.BaseStatement] | None:
    """Return a function that opens a session for another one, which has the rest; None where that is impossible.

    Args:
        node: function that made the Accelerator.
        opened: `with accel.session(...) as ctx:`, its body is replaced.
        before: lines above it.
        rest: lines below it.
        script: names of its functions and of the context.
        later: names that a later pass writes into the lines below.
    """
    made = {name for line in before for name in _bound(line)}
    params = [*node.params.posonly_params, *node.params.params, *node.params.kwonly_params]
    stars = [each for each in (node.params.star_arg, node.params.star_kwarg) if isinstance(each, cst.Param)]
    names = [each.name.value for each in (*params, *stars)]
    own = bool(params) and names[0] in ("self", "cls")
    read = {name for line in rest for name in loads(line)} | _nonlocals(rest) | later
    ctx = script.ctx
    if not _can_be_lifted(node, before, rest):
        return None
    name = f"run_{node.name.value}".removesuffix("_main")
    if name in script.functions:
        return None
    given = [each for each in (*names[own:], *sorted(made - set(names))) if each in read]
    function = f"{names[0]}.{name}" if own else name
    call = expression(f"{function}({', '.join([ctx, *given])})")
    returns = any(isinstance(each, cst.Return) and each.value is not None for each in _own(rest))
    line = statement("return {call}" if returns else "{call}", call=call)
    outer = with_block(node, [*before, with_block(opened, [line])])
    annotated = {each.name.value: each.with_changes(default=None, equal=_NO_SIGN, star="") for each in params}
    plain = [annotated.get(each, cst.Param(cst.Name(each))) for each in given]
    first = [cst.Param(cst.Name(each)) for each in ([names[0]] if own else [])]
    built = [*first, cst.Param(cst.Name(ctx)), *plain]
    built = [each.with_changes(comma=cst.MaybeSentinel.DEFAULT, equal=cst.MaybeSentinel.DEFAULT) for each in built]
    blank = [cst.EmptyLine(indent=False)] * (1 if own else 2)
    body = [led_by(rest[0], [each for each in getattr(rest[0], "leading_lines", ()) if each.comment]), *rest[1:]]
    inner = cst.FunctionDef(
        cst.Name(name), cst.Parameters(built), cst.IndentedBlock(body), returns=node.returns, leading_lines=blank
    )
    return cst.FlattenSentinel([outer, inner])


def _can_be_lifted(
    node: cst.FunctionDef, before: Sequence[cst.BaseStatement], rest: Sequence[cst.BaseStatement]
) -> bool:
    """Whether lines can be a function: long ones that yield nothing and share no variable with those before."""
    if node.asynchronous is not None or sum(text_of(line).count("\n") + 1 for line in rest) <= _SHORT:
        return False
    if any(isinstance(each, cst.Yield) for each in _own([*before, *rest])):
        return False
    first = [each for line in before for each in walk(line)]
    if any(isinstance(each, (cst.Nonlocal, cst.Global, cst.Del)) for each in first):
        return False
    if any(isinstance(each, (cst.Nonlocal, cst.Global)) for each in _own(rest)):
        return False
    if any(full_name(call.func) in ("locals", "super", "vars") and not call.args for call in calls(node)):
        return False
    later = {name for line in rest for name in _bound(line)}
    closures = [each for line in before for each in walk(line) if isinstance(each, (cst.FunctionDef, cst.Lambda))]
    return not any(loads(each) & later for each in closures)


def _nonlocals(lines: Sequence[cst.CSTNode]) -> set[str]:
    """Return the variables that functions in lines share with the function around them."""
    shared = [each for line in lines for each in walk(line) if isinstance(each, cst.Nonlocal)]
    return {item.name.value for each in shared for item in each.names}


def _bound(line: cst.CSTNode) -> set[str]:
    """Return the names that a statement binds in its function."""
    found: set[str] = set()
    waiting = [line]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            found.add(node.name.value)
            continue
        if isinstance(node, (cst.AssignTarget, cst.For, cst.AnnAssign, cst.AugAssign, cst.NamedExpr)):
            found |= set(names_in(node.target))
        elif isinstance(node, cst.AsName):
            found |= set(names_in(node.name))
        elif isinstance(node, cst.ImportAlias) and node.asname is None:
            found.add(node.evaluated_name.partition(".")[0])
        waiting += [] if isinstance(node, (cst.Lambda, cst.CompFor)) else children(node)
    return found


def _own(lines: Sequence[cst.CSTNode]) -> Iterator[cst.CSTNode]:
    """Yield the nodes of lines, without the nodes of functions and classes in them."""
    return (each for line in lines for each in walk(line, (*SCOPES, cst.Lambda)))
