# SPDX-License-Identifier: Apache-2.0
"""The attention function and the mask function of models of transformers along cp.

The models compute with parts of positions. Their attention gets parts, and takes the method of the plan. In the place
of a mask of all pairs it gets what the mask says, which takes no memory for pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from importlib import import_module
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from accel.context import DistContext
from accel.errors import ConfigError, MissingExtraError
from accel.parallel._modules import note_module, notes_of
from accel.parallel.axes.context._attention import context_attention, whole_positions
from accel.parallel.axes.context._checks import FORWARD, text_decoder
from accel.parallel.axes.context._positions import position_ranks
from accel.parallel.axes.context._split import ALL_POSITIONS

NAME = "accel_context"
# keywords of attentions that mean other scores or masks, and reach the function where a model has them
_OTHER_SCORES = ("head_mask", "cu_seq_lens_q", "block_mask", "indices", "block_indices", "sinks")
_PASS_MASK = "Pass attention_mask=, of shape [batch, 1, own, length]: the own queries and all keys."
# functions of transformers that make the masks of a `MaskSpan`
_OF_SPANS = {
    "causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay",
    "sliding_window_bidirectional_overlay", "chunked_overlay", "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
}  # fmt: skip


class MaskSpan(NamedTuple):
    """A mask of transformers as facts, without a tensor of pairs."""

    causal: bool  # whether a position only sees itself and earlier ones
    window: int | None = None  # as in `context_attention`
    # Numbers of documents, or of chunks, [batch, length]: a position only sees its own one. None for one document.
    documents: Tensor | None = None
    ignored: Tensor | None = None  # True for keys that no query sees, [batch, length]; None for none
    # Of the mask. A model inside of one that made the mask reads it, and asks for this mask again.
    shape: tuple[int, ...] = ()
    ndim: int = 4

    def __getitem__(self, at: Any) -> Any:
        """Return the mask of the last queries, which takes no other facts, for a model that only computes these."""
        if not isinstance(at, tuple):
            return [*cast("tuple[Any, ...]", self)][at]
        asked = cast("tuple[Any, ...]", at)
        places = [range(size) for size in self.shape]
        kept = [each[one] if isinstance(one, slice) else each[:0] for one, each in zip(asked, places, strict=False)]
        kept += places[len(kept) :]
        queries = kept.pop(2)
        if kept != [*places[:2], *places[3:]] or queries.step != 1 or queries.stop != self.shape[2]:
            raise ConfigError(
                "a selection of a mask that is not in memory",
                expected="the last queries",
                got=str(list(asked)),
                where=FORWARD,
                fix=_PASS_MASK,
            )
        return self._replace(shape=(*self.shape[:2], len(queries), self.shape[3]))


def use_context_attention(ctx: DistContext, model: Any) -> None:
    """Let a model of transformers attend by the method of the plan, or raise `MissingExtraError`. Mutates it, and
    transformers' lists of attentions and of masks."""
    transformers = import_module("transformers")
    interface = getattr(transformers, "AttentionInterface", None)
    if interface is None:
        raise MissingExtraError(
            "context parallelism needs transformers' AttentionInterface, which this version does not have",
            expected="transformers 5 or newer",
            where="prepare_model",
            fix="Run `pip install accel-torch[transformers]`.",
        )
    interface.register(NAME, _attention)
    transformers.AttentionMaskInterface.register(NAME, _mask)
    text = text_decoder(model) or model
    text.set_attn_implementation(NAME)
    for each in text.modules():
        note_module(each, context=ctx)


def _mask(*, mask_function: Any, attention_mask: Any = None, kv_length: int, **others: Any) -> Any:
    """Return what a mask says, as transformers' `AttentionMaskInterface` asks; of other masks than those of a
    `MaskSpan` the tensor that transformers makes, of all pairs."""
    if isinstance(attention_mask, MaskSpan):
        return attention_mask
    joined = [each for each in _joined(mask_function) if each[0] != "and_masks"]
    names = {name for name, _ in joined}
    is_full = attention_mask is None or attention_mask.shape[-1] == kv_length
    has_cache = any(others.get(name) for name in ("q_offset", "kv_offset"))
    if not is_full or has_cache or not names <= _OF_SPANS or len(names) < len(joined):
        given = {"mask_function": mask_function, "attention_mask": attention_mask, "kv_length": kv_length, **others}
        return import_module("transformers.masking_utils").sdpa_mask(**given)
    held = {name: value for _, values in joined for name, value in values.items()}
    documents = held.get("packed_sequence_mask")
    if (chunk := held.get("chunk_size")) is not None:
        padding = held["left_padding"]
        places = held.get("position_ids", torch.arange(kv_length, device=padding.device))
        chunks = (places - padding[:, None]) // chunk
        documents = chunks if documents is None else documents * kv_length + chunks
    window = held.get("sliding_window")
    if window is not None and "sliding_window_bidirectional_overlay" in names:  # which has the largest distance
        window += 1
    has_padding = attention_mask is not None and not bool(attention_mask.all())
    ignored = ~cast(Tensor, attention_mask) if has_padding else None
    shape = (others["batch_size"], 1, others["q_length"], kv_length)
    return MaskSpan("causal_mask_function" in names, window, documents, ignored, shape)


def _joined(mask: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the functions that a mask joins: the name of the function of transformers that made each, "" for others;
    and the values it holds."""
    if not isinstance(mask, FunctionType) or not mask.__module__.endswith("masking_utils"):
        yield "", {}
        return
    cells = [cell.cell_contents for cell in mask.__closure__ or ()]
    held = dict(zip(mask.__code__.co_freevars, cells, strict=True))
    yield mask.__qualname__.partition(".")[0], held
    for each in (*held.get("mask_functions", ()), *filter(callable, held.values())):
        yield from _joined(each)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Return the attention of a layer, [batch, length, heads, head dim], as transformers' `AttentionInterface` asks."""
    where = f"{type(module).__name__} on a mesh with cp"
    _check_scores(keywords, where)
    causal = keywords.get("is_causal")
    span = MaskSpan(bool(getattr(module, "is_causal", True) if causal is None else causal))
    bias = keywords.get("position_bias")
    if isinstance(attention_mask, MaskSpan):
        _check_order(module, attention_mask, causal=span.causal)
        span = attention_mask
    elif attention_mask is not None:  # the order, documents and windows are in the mask
        span = MaskSpan(causal=False)
    if isinstance(attention_mask, Tensor):
        if bias is not None and attention_mask.dtype == torch.bool:
            bias = bias.masked_fill(~attention_mask, -torch.inf)
        else:
            bias = attention_mask if bias is None else bias + attention_mask
    ctx = notes_of(module).get("context")
    if ctx is None:
        raise ConfigError(
            "an attention across ranks of a model that was not prepared",
            expected="a model that prepare has prepared, with its modules",
            got=f"{type(module).__name__} of another model, with the config of one",
            where=where,
            fix="Prepare the model, or make it with a config of its own.",
        )
    of_mask: dict[str, Any] = {"causal": span.causal, "documents": span.documents, "window": span.window}
    of_mask |= {"key_padding_mask": span.ignored, "attn_mask": bias}
    of_mask["mask_mod"] = getattr(attention_mask, "mask_mod", None)  # of a BlockMask
    of_scores: dict[str, Any] = {"softcap": keywords.get("softcap"), "sinks": keywords.get("s_aux")}
    # plain tensors have all positions, so a module that is called alone with own ones would compute something else
    ranks = position_ranks(query, key, value)
    if ranks is not None:
        ranks.note_callers()
    with ALL_POSITIONS.begun(ctx) if ranks is None else nullcontext():
        out = context_attention(ctx, query, key, value, scale=scaling, dropout_p=dropout, **of_mask, **of_scores)
    return out.transpose(1, 2).contiguous(), None


def _check_order(module: nn.Module, span: MaskSpan, *, causal: bool) -> None:
    """Raise `ConfigError` for an attention of another order than the mask that its model made."""
    if span.causal == causal:
        return
    words = {True: "causal", False: "not causal"}
    raise ConfigError(
        "an attention and the mask of its model say different orders: transformers takes one or the other by the "
        "padding of a batch",
        expected="one order",
        got=f"is_causal={causal} of {type(module).__name__}, and a mask that is {words[span.causal]}",
        where=FORWARD,
        fix=f"{_PASS_MASK} Or make the model with use_bidirectional_attention=False in the config of its text model, "
        "for a causal order, or with is_causal=False, for none.",
    )


def _check_scores(keywords: Mapping[str, Any], where: str) -> None:
    """Raise `ConfigError` for keywords that mean other scores or masks."""
    if other := [name for name in _OTHER_SCORES if keywords.get(name) is not None]:
        raise ConfigError(
            "this attention does not cross ranks",
            expected="softmax over keys of a document, causal or full, with a window, a soft cap, sinks or T5's bias",
            got=", ".join(other),
            where=where,
            fix="Leave cp out of the mesh.",
        )


_BY_TOKENS = "create_position_ids_from_input_ids"


def kept_for_padding(stack: nn.Module) -> int | None:
    """Return the last position that a model keeps for padding, in its table as RoBERTa does or by the first of its own
    `position_ids` as YOSO does; None for none."""
    for module in stack.modules():
        if hasattr(module, _BY_TOKENS):
            padding = getattr(module, "padding_idx", None)
            return padding if isinstance(padding, int) else None
    numbers = [getattr(module, "position_ids", None) for module in stack.modules()]
    firsts = [int(each.min()) for each in numbers if isinstance(each, Tensor) and each.numel() and not each.is_meta]
    return next((first - 1 for first in firsts if first > 0), None)


def check_first(ctx: DistContext, position_ids: Any, padding: int | None) -> None:
    """Raise `ConfigError` for positions that a model keeps for padding. A collective, and it syncs, for a model that
    keeps some."""
    if padding is None or not isinstance(position_ids, Tensor):
        return
    first = int(whole_positions(ctx, position_ids)[:, 0].min())
    if first <= padding:
        raise ConfigError(
            "positions that this model keeps for padding",
            expected=f"positions from {padding + 1} on, as the model numbers them itself",
            got=f"positions from {first} on",
            where=FORWARD,
            fix=f"Pass position_ids=part['position_ids'] + {padding + 1}.",
        )
