# SPDX-License-Identifier: Apache-2.0
"""Heads of attention in divided layers: the number on each rank, and counts and arguments of the module around."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from accel.comm import own_part
from accel.parallel.axes.tensor._styles import (
    COLWISE,
    Rule,
    is_adapted,
    is_linear,
    is_transposed,
    output_dim,
    uneven_heads,
)

if TYPE_CHECKING:
    import torch.distributed as dist

# arguments of an attention that may have an entry for each head, by name
_SHARED = ("alibi", "position_bias", "attention_mask", "mask")
_WIDTHS = ("all_head_size",)  # of all heads together
_NO_COUNTS = ("dim", "size", "width", "group", "mask")


class HeadCounts(NamedTuple):
    """Heads in a column-wise layer's outputs, for its rule and for the module that calls it."""

    number: int = 0  # of heads, where ranks do not divide them evenly
    attributes: Mapping[str, Mapping[str, int]] = {}  # values on one rank for attributes of modules, by path and name
    total: int = 0  # number of heads of the whole module that calls the layer, where it counts them; 0 elsewhere
    problems: tuple[str, ...] = ()  # reasons why ranks cannot share them


def heads_of(model: nn.Module, path: str, style: str, size: int) -> HeadCounts:
    """Return the heads in the outputs of a layer; none for styles without any."""
    module = model.get_submodule(path)
    if style not in COLWISE - {"colwise_gather_output"} or not (is_linear(module) or is_transposed(module)):
        return HeadCounts()
    holder = holder_of(model, path)
    around = model.get_submodule(holder)
    if is_transposed(module):
        local = {path: {"nf": cast(int, module.nf) // size}}
        heads: object = getattr(around, "n_head", None)
        if type(heads) is int and heads % size == 0:  # as the first GPT splits its outputs
            local[holder] = {"n_head": heads // size}
        if style.startswith("packed") and type(getattr(around, "split_size", None)) is int:
            local.setdefault(holder, {})["split_size"] = cast(int, around.split_size) // size
        return HeadCounts(attributes=local)
    outputs = module.get_parameter("weight").shape[output_dim(module)]
    width: Any = getattr(around, "head_dim", None) or getattr(around, "attention_head_size", None)
    if style == "colwise" and type(width) is int:
        heads = outputs // width
        if outputs % width == 0 and heads and heads % size:
            return _few(around, holder, outputs, heads, size)
    return _counted(around, holder, outputs, size)


def _few(around: nn.Module, holder: str, outputs: int, heads: int, size: int) -> HeadCounts:
    """Heads that ranks cannot divide evenly: key heads that several query heads share, or a problem."""
    groups: Any = getattr(around, "num_key_value_groups", None)
    if size % heads == 0 and outputs % size == 0 and type(groups) is int and heads * groups % size == 0:
        # a rank has heads * groups / size queries for one head of keys
        own = {name: 1 for name, value in _counts(around, outputs) if value == heads}
        return HeadCounts(heads, attributes={holder: {**own, "num_key_value_groups": heads * groups // size}})
    return HeadCounts(problems=(uneven_heads(heads, size),))


def _counted(around: nn.Module, holder: str, outputs: int, size: int) -> HeadCounts:
    """The module's own counts of heads, and this rank's."""
    found = {name: value for name, value in _counts(around, outputs) if value % size == 0}
    if not found:
        return HeadCounts()
    total = max(found.values())
    own = {name: each // size for name, each in (found | _widths(around, outputs, total)).items()}
    return HeadCounts(attributes={holder: own}, total=total)


def _widths(around: nn.Module, outputs: int, heads: int) -> dict[str, int]:
    """The module's attributes for the width of all heads together, which is the width of the outputs or of the queries
    in them."""
    size: object = getattr(around, "head_dim", None) or getattr(around, "attention_head_size", None)
    held = cast("dict[str, object]", vars(around))
    widths = (outputs, heads * size if type(size) is int else outputs)
    return {name: value for name in _WIDTHS if type(value := held.get(name)) is int and value in widths}


def _counts(around: nn.Module, outputs: int) -> Iterator[tuple[str, int]]:
    for name, value in cast("dict[str, object]", vars(around)).items():
        if "head" not in name or any(each in name for each in _NO_COUNTS) or type(value) is not int:
            continue
        if value and outputs % value == 0:
            yield name, value


def holder_of(model: nn.Module, path: str) -> str:
    """Return the path of the module that calls a layer, or calls what adapts it."""
    holder = path.rpartition(".")[0]
    while holder and (
        is_adapted(model.get_submodule(holder)) or isinstance(model.get_submodule(holder), nn.ModuleDict)
    ):
        holder = holder.rpartition(".")[0]
    return holder


def shares_of(module: nn.Module) -> dict[str, int]:
    """Return the places of the arguments of a module's forward that may have an entry for each head, by name."""
    names = list(inspect.signature(module.forward).parameters)
    return {name: names.index(name) for name in _SHARED if name in names}


def with_own_heads(
    rule: Rule, group: dist.ProcessGroup, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments where those with an entry for each head have the entries of this rank's heads. The backward is
    a collective for those that need a gradient."""
    changed = list(args)
    named = dict(kwargs)
    for name, place in rule.shares.items():
        if name in named:
            named[name] = _own_heads(name, named[name], rule.heads, group)
        elif place < len(changed):
            changed[place] = _own_heads(name, changed[place], rule.heads, group)
    return tuple(changed), named


def _own_heads(name: str, value: Any, heads: int, group: dist.ProcessGroup) -> Any:
    """This rank's heads of an argument with an entry for each, [batch, heads, queries, keys] or
    [batch * heads, queries, keys]; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.ndim == 4 and value.shape[1] == heads:
        return own_part(value, 1, group)
    if value.ndim != 3 or value.shape[0] % heads or "mask" in name:  # a mask may be of [batch, ...]
        return value
    return own_part(value.view(-1, heads, *value.shape[1:]), 1, group).flatten(0, 1)
