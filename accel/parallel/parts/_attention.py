# SPDX-License-Identifier: Apache-2.0
"""Rules of torch's attention: each rank computes some heads. `multi_head_attention_forward` is written out. Attention
functions of transformers, such as flex and flash attention, compute with plain tensors of some heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from accel.parallel._private import flat_tensors
from accel.parallel.parts._layout import RowCut, RowLayout, even, no_rule
from accel.parallel.parts._local_map import Independence, mapped
from accel.parallel.parts._part import (
    Args,
    Named,
    PartTensor,
    Ranks,
    aligned,
    entered,
    layout_of,
    layouts_of,
    make,
    named,
    own_rows,
    plain_of,
    ranks_of,
    whole_shape,
)
from accel.parallel.parts._shapes import repeat_interleave
from accel.random import Key, torch_rng_scope

_BY_RULES = ("eager", "sdpa")  # implementations that call functions of torch, which have rules for parts


def scaled_dot_product(func: Any, args: Args, kwargs: Named) -> Any:
    """scaled_dot_product_attention, of parts along the heads or another dimension of the batch."""
    given = named("query key value attn_mask dropout_p is_causal", args, kwargs)
    ranks = ranks_of(args, kwargs)
    tensors: list[Tensor] = [given.pop(name) for name in ("query", "key", "value")]
    if (mask := given.pop("attn_mask", None)) is not None:
        if type(mask).__name__ == "CausalBias":  # of torch.nn.attention.bias: a sign, and no values
            raise no_rule("with a mask of torch.nn.attention.bias; pass is_causal=True, or a boolean mask")
        tensors.append(mask)
    own, layout = _by_heads(tensors, ranks, is_grouped=bool(given.get("enable_gqa")))
    if len(own) > 3:
        given["attn_mask"] = own.pop()
    if not given.get("dropout_p") or layout is None:
        return make(func(*own, **given), layout, ranks)
    with own_draws("tp", ranks.rank, own[0].device):
        return make(func(*own, **given), layout, ranks)


def attention_of_heads(
    function: Callable[..., Any], module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **keywords: Any
) -> Any:
    """Call an attention function of transformers, which computes each head alone, with this rank's heads of parts."""
    given = (query, key, value)
    if has_torch_function(given):
        return handle_torch_function(attention_of_heads, given, function, module, *given, mask, **keywords)
    return function(module, query, key, value, mask, **keywords)


def _heads_alone(func: Any, args: Args, kwargs: Named) -> Any:
    """attention_of_heads, of plain tensors inside of the function."""
    function, module, *tensors, mask = args
    ranks = ranks_of(tuple(tensors))
    query, key, _ = tensors
    if any(callable(each) for each in kwargs.values()):
        raise no_rule("with functions of heads")
    if mask is not None and not isinstance(mask, Tensor) and mask.shape[1] != 1:  # of a BlockMask
        raise no_rule("with a mask for each head that is no tensor")
    if whole_shape(query)[1] != whole_shape(key)[1] and not _share_groups(query, key, ranks):
        tensors[1:] = [_of_queries(each, whole_shape(query)[1]) for each in tensors[1:]]
    others = flat_tensors((mask, kwargs))
    heads = (1, 1, 1, *(_dim_of_heads(each, whole_shape(query)[1]) for each in others))
    declared = Independence(heads, (2, 1), like=0)
    is_divided = any(layout_of(each) is not None for each in tensors)
    with own_draws("tp", ranks.rank, query.device) if kwargs.get("dropout") and is_divided else nullcontext():
        return mapped(func, (function, declared, (module, *tensors, mask), kwargs), {})


def _dim_of_heads(each: Tensor, heads: int) -> int | None:
    """The dimension of heads of a tensor with an entry for each, [heads] or [batch, heads, queries, keys]."""
    dim = {1: 0, 4: 1}.get(each.dim())
    return dim if dim is not None and whole_shape(each)[dim] == heads else None


def own_draws(axis: str, rank: int, device: torch.device) -> AbstractContextManager[None]:
    """Draw for this rank's heads or queries from a separate stream that is derived from the shared stream. A graph of
    torch.compile cannot enter another stream: there all ranks drop the same places of theirs."""
    if is_dynamo_compiling():
        return nullcontext()
    seed = int(torch.randint(2**62, (), device="cpu"))
    return torch_rng_scope(Key(seed).fold_in(axis, rank), device)


def across_positions(func: Any, args: Args, kwargs: Named) -> Any:
    """context_attention: each rank along tp computes some heads of its positions."""
    ctx, *tensors = args
    given = dict(kwargs)
    if given["score_mod"] is not None or given["mask_mod"] is not None:
        raise no_rule("with functions of heads")
    ranks = ranks_of(args)
    query, key, _ = tensors
    if (mask := given["attn_mask"]) is not None:
        tensors.append(mask)
    own, layout = _by_heads(tensors, ranks, is_grouped=whole_shape(query)[1] != whole_shape(key)[1])
    if layout is not None and layout.dim != 1:
        raise no_rule("of a dimension other than heads")
    if len(own) > 3:
        given["attn_mask"] = plain_of(own.pop())
    if (sinks := given["sinks"]) is not None:
        rows = entered(sinks, ranks) if layout is None else own_rows(sinks, 0, layout.cut, ranks)
        given["sinks"] = plain_of(rows)
    with own_draws("tp", ranks.rank, own[0].device) if given["dropout_p"] and layout else nullcontext():
        return make(func(ctx, *map(plain_of, own), **given), layout, ranks)


def _by_heads(tensors: list[Tensor], ranks: Ranks, *, is_grouped: bool) -> tuple[list[Tensor], RowLayout | None]:
    """The own heads of queries, keys, values and a mask, and their layout."""
    rank = tensors[0].dim()
    layouts = layouts_of(tensors[:3])
    if any(each.dim >= rank - 2 for each in layouts):
        raise no_rule("over a divided dimension")
    is_grouped = is_grouped and any(each.dim == rank - 3 for each in layouts)
    if is_grouped and _share_groups(tensors[0], tensors[1], ranks):
        return _grouped(tensors, ranks)
    if is_grouped:
        repeated = [_of_queries(each, whole_shape(tensors[0])[-3]) for each in tensors[1:3]]
        tensors = [tensors[0], *repeated, *tensors[3:]]
    own, alignment = aligned(tensors, ranks)
    return own, alignment.layout(rank)


def _share_groups(query: Tensor, key: Tensor, ranks: Ranks) -> bool:
    """Whether ranks have equal runs of queries, with whole groups or parts of one."""
    layout = layout_of(query)
    keys = whole_shape(key)[-3]
    is_even = layout is not None and layout.cut.is_equal and layout.cut == even(layout.cut.total, ranks.size)
    return is_even and math.gcd(keys, ranks.size) in (keys, ranks.size)


def _of_queries(each: Tensor, heads: int) -> Tensor:
    """Keys or values, repeated for the queries of their groups."""
    times = heads // whole_shape(each)[-3]
    if isinstance(each, PartTensor):
        return repeat_interleave(torch.repeat_interleave, (each, times, -3), {})
    return each.repeat_interleave(times, -3)


def _grouped(tensors: list[Tensor], ranks: Ranks) -> tuple[list[Tensor], RowLayout]:
    """Heads of queries with the keys and values of their groups: as many of them on each rank, or one."""
    query, key, value, *masks = tensors
    layout = layouts_of([query])[0]
    keys = whole_shape(key)[-3]
    ways = math.gcd(keys, ranks.size)
    need = RowCut(1, ((keys, ways),))
    own = [entered(each, ranks) if ways == 1 else own_rows(each, each.dim() - 3, need, ranks) for each in (key, value)]
    for mask in masks:
        dim = mask.dim() - 3
        has_heads = dim >= 0 and whole_shape(mask)[dim] != 1
        own.append(own_rows(mask, dim, layout.cut, ranks) if has_heads else entered(mask, ranks))
    return [query, *own], layout


class _Given(NamedTuple):
    """Arguments of `multi_head_attention_forward`, as torch names them."""

    query: Tensor
    key: Tensor
    value: Tensor
    embed_dim_to_check: int
    num_heads: int
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None
    add_zero_attn: bool
    dropout_p: float
    out_proj_weight: Tensor
    out_proj_bias: Tensor | None
    training: bool = True
    key_padding_mask: Tensor | None = None
    need_weights: bool = True
    attn_mask: Tensor | None = None
    use_separate_proj_weight: bool = False
    q_proj_weight: Tensor | None = None
    k_proj_weight: Tensor | None = None
    v_proj_weight: Tensor | None = None
    static_k: Tensor | None = None
    static_v: Tensor | None = None
    average_attn_weights: bool = True
    is_causal: bool = False


def multi_head(func: Any, args: Args, kwargs: Named) -> Any:
    """multi_head_attention_forward, in functions that have rules."""
    return written_out(*args, **kwargs)


def written_out(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Compute what `multi_head_attention_forward` does, of whole tensors or parts."""
    given = _Given(*args, **kwargs)
    if given.static_k is not None or given.static_v is not None:
        raise no_rule("with static keys or values")
    if given.is_causal and given.attn_mask is None:
        raise no_rule("with is_causal, which is a hint, and without the attn_mask that it is of")
    inputs = [given.query, given.key, given.value]
    is_single = given.query.dim() == 2
    if is_single:
        inputs = [each.unsqueeze(1) for each in inputs]
    query, key, value = _projected(given, inputs)
    mask = _mask(given, query)
    rate = given.dropout_p if given.training else 0.0
    weights = None
    if given.need_weights:
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
        weights = functional.dropout((scores if mask is None else scores + mask).softmax(-1), rate)
        mixed = weights @ value
        weights = weights.mean(1) if given.average_attn_weights else weights
    else:
        mixed = functional.scaled_dot_product_attention(query, key, value, mask, rate)
    output = functional.linear(mixed.transpose(1, 2).flatten(2), given.out_proj_weight, given.out_proj_bias)
    output = output.transpose(0, 1)
    if is_single:
        return output.squeeze(1), None if weights is None else weights.squeeze(0)
    return output, weights


def _projected(given: _Given, inputs: list[Tensor]) -> list[Tensor]:
    """Queries, keys and values, [batch, heads, tokens, features of a head]."""
    query, key, value = inputs
    linear: Any = functional.linear
    by_batch = {id(each): each.transpose(0, 1) for each in inputs}
    if given.use_separate_proj_weight:
        weights = [given.q_proj_weight, given.k_proj_weight, given.v_proj_weight]
    else:
        assert given.in_proj_weight is not None
        weights = list(given.in_proj_weight.chunk(3))
    biases = [None] * 3 if given.in_proj_bias is None else list(given.in_proj_bias.chunk(3))
    if query is key is value and not given.use_separate_proj_weight:
        made: Any = linear(by_batch[id(query)], given.in_proj_weight, given.in_proj_bias).chunk(3, -1)
    else:
        triples = zip(inputs, weights, biases, strict=True)
        made = [linear(by_batch[id(each)], weight, bias) for each, weight, bias in triples]
    added = (None, given.bias_k, given.bias_v)
    made = [
        each if more is None else torch.cat([each, more.expand(len(each), 1, -1)], 1)
        for each, more in zip(made, added, strict=True)
    ]
    queries, *others = [each.unflatten(-1, (given.num_heads, -1)).transpose(1, 2) for each in made]
    if given.add_zero_attn:
        others = [functional.pad(each, (0, 0, 0, 1)) for each in others]
    return [queries, *others]


def _mask(given: _Given, query: Tensor) -> Tensor | None:
    """The sum of both masks, which broadcasts to [batch, heads, queries, keys]."""
    mask = None if given.attn_mask is None else _added(given.attn_mask, query.dtype)
    if mask is not None and mask.dim() == 3:
        mask = mask.view(query.size(0), given.num_heads, *mask.shape[1:])
    if given.key_padding_mask is not None:
        padding = _added(given.key_padding_mask, query.dtype)
        padding = padding.view(-1, 1, 1, padding.size(-1))
        mask = padding if mask is None else mask + padding
    added = (given.bias_k is not None) + given.add_zero_attn  # keys that no mask keeps out
    return functional.pad(mask, (0, added)) if mask is not None and added else mask


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to add to scores: -inf for True."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)


RULES = {
    "scaled_dot_product_attention": scaled_dot_product,
    "attention_of_heads": _heads_alone,
    "context_attention": across_positions,
    "multi_head_attention_forward": multi_head,
}


class ByHeads:
    """An attention function as transformers calls it, which gives the function this rank's heads of parts."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(
        self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, *args: Any, **keywords: Any
    ) -> Any:
        """Return the outputs and weights of the attention."""
        keywords = {**dict(zip(("scaling", "dropout"), args, strict=False)), **keywords}
        return attention_of_heads(self.function, module, query, key, value, attention_mask, **keywords)


def use_own_heads(model: nn.Module) -> None:
    """Let the attention functions that a model of transformers names take parts. Mutates transformers' list of these
    functions; others call them as before."""
    configs = (getattr(each, "config", None) for each in model.modules())
    names = {getattr(each, "_attn_implementation", None) for each in configs}
    names = {name for name in names if isinstance(name, str) and name not in _BY_RULES}
    if not names:
        return
    interface: Any = getattr(import_module("transformers"), "AttentionInterface", dict)
    known: Mapping[str, Any] = interface()
    for name in names & {*known}:
        if not isinstance(known[name], ByHeads):
            interface.register(name, ByHeads(known[name]))
