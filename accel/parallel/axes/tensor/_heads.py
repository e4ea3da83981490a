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
_NO_COUNTS = ("dim", "size", "width", "group", "mask")


class HeadCounts(NamedTuple):
    """Heads in a column-wise layer's outputs, for its rule and for the module that calls it.

    Attributes:
        number: of heads, where ranks do not divide them evenly; of "multi_query_colwise" the width of a head.
        attributes: values on one rank for attributes of modules, by path and name.
        total: number of heads of the whole module that calls the layer, where it counts them; 0 elsewhere.
        problems: reasons why ranks cannot share them.
    """

    number: int = 0
    attributes: Mapping[str, Mapping[str, int]] = {}
    total: int = 0
    problems: tuple[str, ...] = ()


def heads_of(model: nn.Module, path: str, style: str, size: int) -> HeadCounts:
    """Return the heads in the outputs of a layer; none for styles without any."""
    module = model.get_submodule(path)
    if style not in COLWISE - {"colwise_gather_output"} or not (is_linear(module) or is_transposed(module)):
        return HeadCounts()
    holder = holder_of(model, path)
    around = model.get_submodule(holder)
    if is_transposed(module):
        local = {path: {"nf": cast(int, module.nf) // size}}
        if style.startswith("packed") and type(getattr(around, "split_size", None)) is int:
            local[holder] = {"split_size": cast(int, around.split_size) // size}
        return HeadCounts(attributes=local)
    outputs = module.get_parameter("weight").shape[output_dim(module)]
    width: Any = getattr(around, "head_dim", None) or getattr(around, "attention_head_size", None)
    if style == "multi_query_colwise":
        return _with_one_key(around, holder, outputs, width, size)
    if style == "colwise" and type(width) is int:
        heads = outputs // width
        if outputs % width == 0 and heads and heads % size:
            return _few(around, holder, outputs, heads, size)
    return _counted(around, holder, outputs, size)


def _few(around: nn.Module, holder: str, outputs: int, heads: int, size: int) -> HeadCounts:
    """Heads that ranks cannot divide evenly: those of keys that several queries share, or a problem."""
    groups: Any = getattr(around, "num_key_value_groups", None)
    if size % heads == 0 and outputs % size == 0 and type(groups) is int and heads * groups % size == 0:
        # a rank has heads * groups / size queries for one head of keys
        own = {name: 1 for name, value in _counts(around, outputs) if value == heads}
        return HeadCounts(heads, {holder: {**own, "num_key_value_groups": heads * groups // size}})
    return HeadCounts(problems=(uneven_heads(heads, size),))


def _with_one_key(around: nn.Module, holder: str, outputs: int, width: object, size: int) -> HeadCounts:
    if type(width) is not int or outputs % width or outputs // width < 3:
        return HeadCounts(problems=("multi_query_colwise is of layers in a module whose head_dim divides the outputs",))
    heads = outputs // width - 2
    if heads % size:
        return HeadCounts(problems=(uneven_heads(heads, size),))
    counted = _counted(around, holder, heads * width, size)
    own = {name: value // size for name, value in _sizes_of_queries(around, heads, width)}
    attributes = {holder: {**counted.attributes.get(holder, {}), **own}}
    return counted._replace(number=width, attributes=attributes)


def _sizes_of_queries(around: nn.Module, heads: int, width: int) -> Iterator[tuple[str, int]]:
    """Attributes by which a module splits a layer of all queries and one key, and repeats the key, as GPT-BigCode's."""
    held = cast("dict[str, object]", vars(around))
    if held.get("embed_dim") == heads * width and held.get("kv_dim") == width:
        yield "embed_dim", heads * width
    if held.get("num_key_value_groups") == heads:
        yield "num_key_value_groups", heads


def _counted(around: nn.Module, holder: str, outputs: int, size: int) -> HeadCounts:
    """The module's own counts of heads, and this rank's."""
    found = {name: value for name, value in _counts(around, outputs) if value % size == 0}
    if not found:
        return HeadCounts()
    return HeadCounts(
        attributes={holder: {name: each // size for name, each in found.items()}}, total=max(found.values())
    )


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
    """This rank's heads of [batch, heads, queries, keys] or, of a bias, [batch * heads, queries, keys]; other values as
    they are, parts too."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.ndim == 4 and value.shape[1] == heads:
        return own_part(value, 1, group)
    if value.ndim == 3 and value.shape[0] % heads == 0 and "mask" not in name:  # a mask may be of [batch, ...]
        return own_part(value.view(-1, heads, *value.shape[1:]), 1, group).flatten(0, 1)
    return value
