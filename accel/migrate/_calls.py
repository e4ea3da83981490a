# SPDX-License-Identifier: Apache-2.0
"""Calls of an Accelerator's methods and of its functions, with their arguments placed by accel's signatures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import libcst as cst

from accel.migrate._script import Script
from accel.migrate._signatures import places, takes
from accel.migrate._tree import expression, full_name, text_of
from accel.migrate._vocabulary import KEYWORDS

# parameters of Accelerate's functions by position, where accel takes them by keyword
_POSITIONS: Mapping[str, Sequence[str]] = {
    "reduce": ("tensor", "op", "scale"),
    "pad_across_processes": ("tensor", "dim", "pad_index", "pad_first"),
    "broadcast": ("tensor", "from_process"),
    "broadcast_object_list": ("object_list", "from_process"),
    "gather_for_metrics": ("input_data", "use_gather_object"),
    "split_between_processes": ("inputs", "apply_padding"),
    "send_to_device": ("tensor", "device", "non_blocking", "skip_keys"),
    "save": ("obj", "f", "safe_serialization"),
    "save_model": ("model", "save_directory", "max_shard_size", "safe_serialization"),
    "unwrap_model": ("model", "keep_fp32_wrapper", "keep_torch_compile"),
    "get_state_dict": ("model", "unwrap"),
    "prepare_model": ("model", "device_placement", "evaluation_mode"),
    "prepare_data_loader": ("data_loader", "device_placement", "slice_fn_for_dispatch"),
    "prepare_optimizer": ("optimizer", "device_placement"),
    "on_process": ("function", "process_index"),
    "on_local_process": ("function", "local_process_index"),
    "join_uneven_inputs": ("joinables", "even_batches"),
}
# values of arguments that say nothing: those of the default
_EMPTY = {"device_placement": ("True", "None"), "evaluation_mode": ("False",), "safe_serialization": ("True", "False")}
_NONE = ("None",)
_EVEN = 'even_batches= is left out: the last step is shorter and repeats nothing; else tail="pad"'
_NO_ARGUMENTS = ("free_memory", "clear", "synchronize_rng_states")
Note = Callable[[str, str], None]


def placed(
    script: Script, decide: Note, change: Callable[[str], None], found: tuple[str, bool], name: str, call: cst.Call
) -> cst.Call:
    """Return a call of accel's function in place of a method; a note says what has no place.

    Args:
        script: facts of the script.
        decide: leaves a note.
        change: leaves a remark on a change in meaning.
        found: name of accel's function, and whether it takes the context.
        name: name in Accelerate.
        call: call of the method.
    """
    function, with_ctx = found
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
    known = _POSITIONS.get(name, ())
    keyword = arg.keyword.value if arg.keyword is not None else known[at] if at < len(known) else ""
    if name == "join_uneven_inputs" and at == 0:
        return _models(arg)
    if (name, keyword) in KEYWORDS:
        new = KEYWORDS[name, keyword]
        if new is None:
            return None
        keyword = new
    by_place = [each for each in places(function) if each != "ctx"]
    if not keyword or (arg.keyword is None and (at == 0 or by_place[at : at + 1] == [keyword])):
        return [arg]
    if keyword == "tree" or (at == 0 and known[:1] == (keyword,)):
        return [arg.with_changes(keyword=None, equal=cst.MaybeSentinel.DEFAULT)]
    if takes(function, keyword):
        equal = cst.AssignEqual(whitespace_before=cst.SimpleWhitespace(""), whitespace_after=cst.SimpleWhitespace(""))
        equal = arg.equal if isinstance(arg.equal, cst.AssignEqual) else equal
        return [arg.with_changes(keyword=cst.Name(keyword), equal=equal)]
    text = " ".join(text_of(arg.value).split())
    if keyword == "even_batches":
        change(_EVEN)
    elif text not in _EMPTY.get(keyword, _NONE):
        decide(f"what takes the place of {keyword}={text[:40]} of {name}", "names")
    return None


def _models(arg: cst.Arg) -> list[cst.Arg]:
    """Return a list of models as arguments of their own."""
    if isinstance(arg.value, (cst.List, cst.Tuple)):
        return [cst.Arg(each.value) for each in arg.value.elements]
    return [arg.with_changes(star="*", keyword=None, equal=cst.MaybeSentinel.DEFAULT)]


def _context(script: Script, call: cst.Call, args: Sequence[cst.Arg]) -> cst.Arg:
    """Return the context as the first argument, on a line of its own where the others have one."""
    first = cst.Arg(cst.Name(script.ctx))
    comma = call.args[0].comma if len(call.args) > 1 else None
    if args and isinstance(comma, cst.Comma) and isinstance(comma.whitespace_after, cst.ParenthesizedWhitespace):
        return first.with_changes(comma=comma.with_changes(whitespace_after=call.whitespace_before_args))
    return first


def as_value(script: Script, found: tuple[str, bool]) -> cst.BaseExpression:
    """Return what takes the place of a method that is not called: a function, with its context."""
    function, with_ctx = found
    return expression(f"functools.partial({function}, {script.ctx})" if with_ctx else function)


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
