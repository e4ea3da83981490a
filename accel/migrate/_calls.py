# SPDX-License-Identifier: Apache-2.0
"""Calls of an Accelerator's methods and of its functions, with their arguments placed by accel's signatures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import libcst as cst

from accel.migrate._script import Script
from accel.migrate._signatures import places, takes, takes_context
from accel.migrate._tree import expression, full_name, keyword_arg, text_of
from accel.migrate._vocabulary import PARAMETERS

# values that equal the default
_EMPTY = {"device_placement": ("True", "None"), "evaluation_mode": ("False",), "safe_serialization": ("True", "False")}
_NONE = ("None",)
_EVEN = 'even_batches= is left out: the last step is shorter and repeats nothing; else tail="pad"'
_NO_ARGUMENTS = ("free_memory", "clear", "synchronize_rng_states")
Note = Callable[[str, str], None]


def placed(
    script: Script, decide: Note, change: Callable[[str], None], function: str, name: str, call: cst.Call
) -> cst.Call:
    """Return a call of accel's function in place of a method; a note says what has no place.

    Args:
        script: facts of the script.
        decide: leaves a note.
        change: leaves a remark on a change in meaning.
        function: name of accel's function.
        name: name in Accelerate.
        call: call of the method.
    """
    with_ctx = takes_context(function)
    args: list[cst.Arg] = []
    for at, arg in enumerate(() if name in _NO_ARGUMENTS else call.args):
        made = _argument(decide, change, function, name, at, arg)
        args += [] if made is None else made
    if name in ("on_process", "on_local_process") and (not args or args[0].keyword is not None):
        args = [cst.Arg(expression(function)), *([cst.Arg(cst.Name(script.ctx))] if with_ctx else []), *args]
        args = [arg.with_changes(comma=cst.MaybeSentinel.DEFAULT) for arg in args]
        return call.with_changes(func=expression("functools.partial"), args=args)
    if with_ctx:
        args = [_context(script, call, args), *args]
    if args and call.args[-1:] != args[-1:]:
        args[-1] = args[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return call.with_changes(func=expression(function), args=args)


def _argument(
    decide: Note, change: Callable[[str], None], function: str, name: str, at: int, arg: cst.Arg
) -> list[cst.Arg] | None:
    """Return an argument in its place; None where it is left out."""
    if arg.star:
        return [arg]
    known = _parameters(name)
    old = arg.keyword.value if arg.keyword is not None else next(islice(known, at, None), "")
    if name == "join_uneven_inputs" and at == 0:
        return _models(arg)
    keyword = known.get(old, old)
    if keyword is None:
        return None
    by_place = [each for each in places(function) if each != "ctx"]
    if not keyword or (arg.keyword is None and (at == 0 or by_place[at : at + 1] == [keyword])):
        return [arg]
    if at == 0 and old == next(iter(known), None):
        return [arg.with_changes(keyword=None, equal=cst.MaybeSentinel.DEFAULT)]
    if takes(function, keyword):
        equal = arg.equal if arg.keyword is not None else keyword_arg(keyword, arg.value).equal
        return [arg.with_changes(keyword=cst.Name(keyword), equal=equal)]
    text = " ".join(text_of(arg.value).split())
    if keyword == "even_batches":
        change(_EVEN)
    elif text not in _EMPTY.get(keyword, _NONE):
        decide(f"what takes the place of {keyword}={text[:40]} of {name}", "names")
    return None


def _models(arg: cst.Arg) -> list[cst.Arg]:
    """Return a list of models as separate arguments."""
    if isinstance(arg.value, (cst.List, cst.Tuple)):
        return [cst.Arg(each.value) for each in arg.value.elements]
    return [arg.with_changes(star="*", keyword=None, equal=cst.MaybeSentinel.DEFAULT)]


def _context(script: Script, call: cst.Call, args: Sequence[cst.Arg]) -> cst.Arg:
    """Return the context as the first argument, on a separate line if the others are on separate lines."""
    first = cst.Arg(cst.Name(script.ctx))
    comma = call.args[0].comma if len(call.args) > 1 else None
    if args and isinstance(comma, cst.Comma) and isinstance(comma.whitespace_after, cst.ParenthesizedWhitespace):
        return first.with_changes(comma=comma.with_changes(whitespace_after=call.whitespace_before_args))
    return first


def _parameters(name: str) -> dict[str, str | None]:
    """Return a function's parameters in Accelerate, in order, with their names in accel; None for one left out."""
    parts = (each.partition("=") for each in PARAMETERS.get(name, ()))
    return {old: (new or None) if sign else old for old, sign, new in parts}


def as_value(script: Script, function: str) -> cst.BaseExpression:
    """Return what takes the place of a method that is not called: a function, with its context."""
    return expression(f"functools.partial({function}, {script.ctx})" if takes_context(function) else function)


def launched(name: str, call: cst.Call) -> cst.Call:
    """Return the call of a launcher."""
    renamed = {"num_processes": "nproc", "function": "fn", "mixed_precision": "precision"}
    args: list[cst.Arg] = []
    for arg in call.args:
        keyword = arg.keyword.value if arg.keyword else ""
        if keyword in ("use_port", "master_addr"):
            continue
        args.append(arg.with_changes(keyword=cst.Name(renamed[keyword])) if keyword in renamed else arg)
    if args:
        args[-1] = args[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return call.with_changes(func=expression(f"accel.{name}"), args=args)


def is_method_value(script: Script, node: cst.CSTNode, methods: Mapping[str, object]) -> bool:
    """Whether an expression is a method of an Accelerator."""
    return isinstance(node, cst.Attribute) and script.holds(node.value) and full_name(node.attr) in methods
