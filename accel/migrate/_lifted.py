# SPDX-License-Identifier: Apache-2.0
"""A function that makes an Accelerator, split: the rest takes the context, and is not indented further."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import libcst as cst

from accel.migrate._script import Script
from accel.migrate._tree import (
    SCOPES,
    calls,
    children,
    expression,
    full_name,
    led_by,
    loads,
    names_in,
    statement,
    text_of,
    walk,
    with_block,
)

_NO_SIGN = cst.MaybeSentinel.DEFAULT
_SHORT = 12  # most lines that stay in a block; longer code becomes a function


def lifted(
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
