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
    FUSED_QUERIES,
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
_KEYS = ("num_key_value_heads", "num_kv_heads", "kv_heads", "n_head_kv")
_WIDTHS = ("all_head_size",)  # of all heads together
_NO_COUNTS = ("dim", "size", "width", "group", "mask")


class HeadCounts(NamedTuple):
    """Heads in a column-wise layer's outputs, for its rule and for the module that calls it.

    Attributes:
        number: of heads, where ranks do not divide them evenly; beside `keys` the width of a head.
        keys: number of heads of keys in outputs that are queries, keys and values; 0 in others.
        attributes: values on one rank for attributes of modules, by path and name.
        total: number of heads of the whole module that calls the layer, where it counts them; 0 elsewhere.
        problems: reasons why ranks cannot share them.
    """

    number: int = 0
    keys: int = 0
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
        if style in FUSED_QUERIES:
            return HeadCounts(problems=(f"{style} is of nn.Linear",))
        local = {path: {"nf": cast(int, module.nf) // size}}
        heads: object = getattr(around, "n_head", None)
        if type(heads) is int and heads % size == 0:  # as the first GPT splits its outputs
            local[holder] = {"n_head": heads // size}
        if style.startswith("packed") and type(getattr(around, "split_size", None)) is int:
            local.setdefault(holder, {})["split_size"] = cast(int, around.split_size) // size
        return HeadCounts(attributes=local)
    outputs = module.get_parameter("weight").shape[output_dim(module)]
    width: Any = getattr(around, "head_dim", None) or getattr(around, "attention_head_size", None)
    if style in FUSED_QUERIES:
        return _with_keys(around, holder, outputs, width, size, style)
    if style == "packed_colwise_4x3" and type(width) is int and outputs // (3 * width) % (4 * size):
        return HeadCounts(problems=(_uneven_groups(outputs // (3 * width), 4, size),))
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
        return HeadCounts(heads, attributes={holder: {**own, "num_key_value_groups": heads * groups // size}})
    return HeadCounts(problems=(uneven_heads(heads, size),))


def _with_keys(around: nn.Module, holder: str, outputs: int, width: object, size: int, style: str) -> HeadCounts:
    """Heads of a layer of queries, keys and values, where the module around it counts those of keys; else one."""
    named = (vars(around).get(name) for name in _KEYS)
    keys = next((each for each in named if type(each) is int and each), 1)
    if type(width) is not int or outputs % width or outputs // width <= 2 * keys:
        return HeadCounts(problems=(f"{style} is of layers in a module whose head_dim divides the outputs",))
    heads = outputs // width - 2 * keys
    if heads % size:
        return HeadCounts(problems=(uneven_heads(heads, size),))
    is_grouped = style == "grouped_query_colwise"
    if heads % keys or (size % keys and (is_grouped or keys % size)):
        return HeadCounts(problems=(f"{keys} heads of keys, which {size} ranks along tp cannot share",))
    here = max(keys // size, 1)
    local: dict[str, int] = {}
    for name, value in _counts(around, outputs=heads * keys * width):
        if value in (heads, keys):
            local[name] = heads // size if value == heads else here
    local |= {name: value // size for name, value in _widths(around, heads * width, heads).items()}
    held = cast("dict[str, object]", vars(around))
    if held.get("num_key_value_groups") == heads // keys:
        local["num_key_value_groups"] = heads // size // here
    if held.get("embed_dim") == heads * width and held.get("kv_dim") == keys * width:  # as GPT-BigCode splits outputs
        local |= {"embed_dim": heads // size * width, "kv_dim": here * width}
    return HeadCounts(number=width, keys=keys, attributes={holder: local}, total=heads)


def _uneven_groups(heads: int, groups: int, size: int) -> str:
    return f"{heads} heads in {groups} groups, not a multiple of {groups} times tp={size}"


def _counted(around: nn.Module, holder: str, outputs: int, size: int) -> HeadCounts:
    """The module's own counts of heads, and this rank's."""
    found = {name: value for name, value in _counts(around, outputs) if value % size == 0}
    if not found:
        return HeadCounts()
    total = max(found.values())
    own = {name: each // size for name, each in (found | _widths(around, outputs, total)).items()}
    return HeadCounts(attributes={holder: own}, total=total)


def _widths(around: nn.Module, outputs: int, heads: int) -> dict[str, int]:
    """The module's attributes for the width of all heads together, which is that of outputs or of queries in them."""
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
    """This rank's heads of an argument; other values as they are, parts too."""
    if not has_heads(value, heads) or (value.ndim == 3 and "mask" in name):  # a mask may be of [batch, ...]
        return value
    return own_heads(value, heads, group)


def has_heads(value: Any, heads: int) -> bool:
    """Return whether a value has an entry for each head: [batch, heads, queries, keys], or [batch * heads, queries,
    keys]."""
    if not isinstance(value, torch.Tensor):
        return False
    return (value.ndim == 4 and value.shape[1] == heads) or (value.ndim == 3 and value.shape[0] % heads == 0)


def own_heads(value: torch.Tensor, heads: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's heads of a tensor with an entry for each. The backward is a collective."""
    if value.ndim == 4:
        return own_part(value, 1, group)
    return own_part(value.view(-1, heads, *value.shape[1:]), 1, group).flatten(0, 1)
