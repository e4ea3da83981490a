# SPDX-License-Identifier: Apache-2.0
"""Models of transformers with attention across ranks, at the positions of the sequence, by their interface of attention
functions."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from accel.context import DistContext
from accel.errors import ConfigError, MissingExtraError
from accel.mixins import Mixin, add_mixin
from accel.parallel._modules import forward_names, source_of, written_class
from accel.parallel.axes.context._attention import context_attention, whole_positions
from accel.parallel.axes.context._checks import (
    SAMPLES,
    check_inputs,
    check_numbered,
    check_packed,
    check_pair_inputs,
    counts_by_mask,
    has_relative_bias,
    is_attention,
    mask_refused,
    needs_all_positions,
    numbers_positions,
    scales_by_position,
    stacks_of,
    text_decoder,
)
from accel.parallel.axes.context._kernels import Masks, MaskSpan
from accel.parallel.axes.context._split import own_positions, places, position_axis
from accel.topology import ContextMethod
from accel.tree import map_tensors

NAME = "accel_context"  # of the attention, and of the keyword that carries the context to it
# keywords of attentions that mean other scores or masks, and reach the function where a model has them
_OTHER_SCORES = ("head_mask", "cu_seq_lens_q", "block_mask")
_PASS_MASK = "Pass attention_mask=, of shape [batch, 1, own, length]: the own queries and all keys."
_FORWARD = threading.local()  # `masks` of the current forward


class ContextCall(NamedTuple):
    """Facts that a forward passes to its attentions."""

    ctx: DistContext
    method: ContextMethod  # the method of `context_attention`
    masks: Masks  # those that this forward has made
    # Positions of the own tokens in their documents, [batch or 1, own]; None where the model has none.
    positions: Tensor | None = None
    # Numbers of the documents of the own positions, [batch or 1, own]; None for one document.
    documents: Tensor | None = None
    ignored: Tensor | None = None  # True for own tokens that no query sees, [batch, own]; None for none
    crossed: Tensor | None = None  # the same of the encoder's tokens, for the cross-attention of a decoder
    # Whether attentions without a causal order are a decoder's cross-attention to its encoder's tokens.
    is_decoder: bool = False


def use_context_attention(ctx: DistContext, model: Any, method: ContextMethod) -> None:
    """Let a model of transformers attend across the ranks along cp, or raise `MissingExtraError`. Mutates it, and
    transformers' lists of attentions and of masks."""
    interface = getattr(import_module("transformers"), "AttentionInterface", None)
    if interface is None:
        raise MissingExtraError(
            "context parallelism needs transformers' AttentionInterface, which this version does not have",
            expected="transformers 5 or newer",
            where="prepare_model",
            fix="Run `pip install accel-torch[transformers]`.",
        )
    interface.register(NAME, _attention)
    import_module("transformers").AttentionMaskInterface.register(NAME, _mask)
    text = text_decoder(model)
    (model if text is None else text).set_attn_implementation(NAME)
    stacks = stacks_of(model)
    if len(stacks) > 1:
        _ = model.register_forward_pre_hook(check_pair_inputs, with_kwargs=True)
    for stack in stacks:
        images = None if text is None or ctx.axis("pp").size > 1 else _Images(ctx)  # a record has no values of tokens
        _ = stack.register_forward_pre_hook(_HandOn(ctx, method, stack, images), with_kwargs=True)
        if text is not None and images is not None:
            _ = text.register_forward_pre_hook(images, with_kwargs=True)
        has_positions = "position_ids" in forward_names(stack)
        for module in stack.modules():
            if _drops_keywords(module):
                add_mixin([module], KeepsContext)
            if not has_positions and numbers_positions(module):
                _ = module.register_forward_pre_hook(partial(_numbered, ctx), with_kwargs=True)
            if has_relative_bias(module):
                module.compute_bias = partial(_relative_bias, ctx, module)
            if needs_all_positions(module):
                _ = module.register_forward_pre_hook(partial(_with_all_positions, ctx), with_kwargs=True)
                _ = module.register_forward_hook(partial(_of_own_positions, ctx), prepend=True)
            if scales_by_position(module):
                _ = module.register_forward_pre_hook(partial(_with_places, ctx), with_kwargs=True)


def _drops_keywords(module: nn.Module) -> bool:
    """Return whether a block takes keywords that it does not pass to its attention, as StableLM's does."""
    if not any(map(is_attention, module.children())):
        return False
    forward = inspect.unwrap(cast(Any, written_class(module)).forward)
    kinds = {each.kind: name for name, each in inspect.signature(forward).parameters.items()}
    name = kinds.get(inspect.Parameter.VAR_KEYWORD)
    source = source_of(forward)
    return name is not None and source is not None and source.count(f"**{name}") < 2


class KeepsContext(Mixin):
    """A block that keeps the context among its keywords for its modules of attention."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward."""
        for child in filter(is_attention, cast(nn.Module, self).children()):
            vars(child)[NAME] = kwargs.get(NAME)
        return super().forward(*args, **kwargs)


class _HandOn:
    """A hook of a model: adds the context to the keywords of a forward, and refuses what cannot follow a cut."""

    def __init__(self, ctx: DistContext, method: ContextMethod, stack: Any, images: _Images | None) -> None:
        self.ctx = ctx
        self.images = images
        self.method: ContextMethod = method
        self.names = forward_names(stack)
        self.padding = kept_for_padding(stack)
        self.by_tokens = _numbering_of(stack)
        self.by_mask = counts_by_mask(stack)
        orders = [each.is_causal for each in stack.modules() if hasattr(each, "is_causal")]
        self.is_causal = not orders or any(orders)

    def __call__(
        self, module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        known = {**dict(zip(self.names, inputs, strict=False)), **keywords}
        has_positions = "position_ids" in self.names
        check_inputs(known, position_axis(self.ctx).size, takes_samples=self.images is not None)
        changes: dict[str, Any] = {}
        tokens: Tensor | None = known.get("inputs_embeds") if known.get("input_ids") is None else known["input_ids"]
        if has_positions and known.get("position_ids") is None and tokens is not None:
            check_numbered(self.ctx, known, tokens.shape[1], by_mask=self.by_mask)
            changes["position_ids"] = known["position_ids"] = _numbers(self.ctx, tokens, self.by_tokens, self.padding)
        is_decoder = self.is_causal and known.get("encoder_hidden_states") is not None
        _FORWARD.masks = Masks(set(), known.get("attention_mask") is not None)
        call = ContextCall(self.ctx, self.method, _FORWARD.masks, is_decoder=is_decoder)
        if "position_ids" not in changes:  # a model's own numbers may be those of padding, on tokens of padding
            check_first(self.ctx, known.get("position_ids"), self.padding)
        # as in transformers: an order and no mask of the user's, or positions that begin anew are no documents
        if has_positions and self.is_causal and known.get("attention_mask") is None:
            positions = known["position_ids"]
            documents = None if changes else _documents(self.ctx, positions)  # of positions that were passed
            if documents is not None:
                check_packed(module, known)
            call = call._replace(positions=positions, documents=documents)
        for name, field in (("attention_mask", "ignored"), ("encoder_attention_mask", "crossed")):
            mask = known.get(name)
            if isinstance(mask, Tensor) and mask.ndim == 2:
                changes[name] = None
                ignored, places = _ignored(self.ctx, mask)
                call = call._replace(**{field: ignored})
                call = call._replace(positions=places) if field == "ignored" else call
        if self.images is not None and isinstance(known.get("input_ids"), Tensor):
            changes.update(self.images.whole_tokens(known))
        given = [changes.pop(name, value) for name, value in zip(self.names, inputs, strict=False)]
        return tuple(given), {**keywords, **changes, NAME: call}


class _Images:
    """Hooks of a model that puts images among its tokens: it sees all tokens, and its text model the own ones.

    Attributes:
        positions: of the forward that runs.
    """

    def __init__(self, ctx: DistContext) -> None:
        self.ctx = ctx
        self.positions: Tensor | None = None

    def whole_tokens(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tokens of all ranks, for a call with images. A collective."""
        if not any(known.get(name) is not None for name in SAMPLES):
            return {}
        self.positions = known["position_ids"]
        return {"input_ids": whole_positions(self.ctx, known["input_ids"])}

    def __call__(
        self, module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cut the embeddings of all tokens, as a hook of the text model."""
        embeddings, positions = keywords.get("inputs_embeds"), self.positions
        self.positions = None
        if positions is None:
            return inputs, dict(keywords)
        rank, size = position_axis(self.ctx)
        whole = positions.shape[1] * size
        tensors = {name: each for name, each in keywords.items() if isinstance(each, Tensor) and each.ndim > 1}
        others = [name for name, each in tensors.items() if each.shape[1] == whole and name != "inputs_embeds"]
        is_whole = isinstance(embeddings, Tensor) and embeddings.shape[1] == whole
        if inputs or others or not is_whole or keywords.get("position_ids") is not positions:
            raise ConfigError(
                "a model that makes more of its images than embeddings of tokens",
                expected="inputs_embeds of all tokens, and the position_ids that were passed",
                got=", ".join(others) or "other arguments",
                where=f"{type(module).__name__} on a mesh with cp",
                fix="Pass text only. Leave cp out of the mesh.",
            )
        return inputs, {**keywords, "inputs_embeds": own_positions(cast(Tensor, embeddings), rank, size)}


_BY_TOKENS = "create_position_ids_from_input_ids"


def _numbering_of(stack: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return the function by which a model numbers its tokens without those of padding, as RoBERTa does; None for
    none."""
    for module in stack.modules():
        forward = inspect.unwrap(cast(Any, written_class(module)).forward)
        padding = getattr(module, "padding_idx", None)
        if isinstance(padding, int) and _BY_TOKENS in forward.__code__.co_names:
            return partial(getattr(module, _BY_TOKENS, forward.__globals__.get(_BY_TOKENS)), padding_idx=padding)
    return None


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


def _numbered(
    ctx: DistContext, module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a table of positions that counts from 0 the places of the own positions, as its hook."""
    shape = inputs[0].shape if isinstance(inputs[0], Tensor) else inputs[0]
    device = next(module.parameters()).device
    return inputs, {**keywords, "position_ids": _own_places(ctx, shape[1]).to(device)}


def _with_all_positions(
    ctx: DistContext, module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a module the `position_ids`, or else the tokens, of all ranks, as its hook. A collective."""
    known = {**dict(zip(forward_names(module), inputs, strict=False)), **keywords}
    name = "position_ids" if "position_ids" in known else next(iter(known))
    own: Tensor = known[name]
    return (), {**known, name: whole_positions(ctx, own, 1 if own.is_floating_point() else own.dim() - 1)}


def _of_own_positions(ctx: DistContext, _module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> Any:
    """Return the own positions of outputs, [..., length, features], as the hook of such a module."""
    rank, size = position_axis(ctx)
    return map_tensors(lambda whole: own_positions(whole, rank, size, whole.dim() - 2), output)


def _with_places(
    ctx: DistContext, _module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Let an attention scale its queries by their places in the sequence, as its hook: it counts them, and adds the
    length of a cache."""
    hidden: Tensor = inputs[0] if inputs else keywords["hidden_states"]
    own = torch.arange(hidden.shape[1], device=hidden.device)
    more = _own_places(ctx, len(own)).to(own) - own

    def length(*_layer: object) -> Tensor:
        return more

    def update(key: Tensor, value: Tensor, *_layer: object) -> tuple[Tensor, Tensor]:
        return key, value

    cache = SimpleNamespace(get_seq_length=length, update=update)
    return inputs, {**keywords, "past_key_values": cache}


def _numbers(
    ctx: DistContext, tokens: Tensor, by_tokens: Callable[[Tensor], Tensor] | None, padding: int | None
) -> Tensor:
    """Return the positions of own tokens or their embeddings, [batch or 1, own], as a model numbers the tokens of a
    sequence itself. A collective if it does so `by_tokens`.

    `padding`: the last position that it keeps for padding; None for none.
    """
    if by_tokens is not None and not tokens.is_floating_point():
        return own_positions(by_tokens(whole_positions(ctx, tokens)), *position_axis(ctx))
    places = _own_places(ctx, tokens.shape[1])[None].to(tokens.device)
    return places if padding is None else places + padding + 1


def _own_places(ctx: DistContext, own: int) -> Tensor:
    rank, size = position_axis(ctx)
    return own_positions(torch.arange(own * size), rank, size, 0)


def _relative_bias(ctx: DistContext, module: Any, own: int, _own_keys: int, **_device: Any) -> Tensor:
    """Return the bias of own queries and all keys, [1, heads, own, length], in the place of `compute_bias` of an
    attention with a table of relative positions."""
    rank, size = position_axis(ctx)
    runs = places(own * size, rank, size)
    kind = cast(Any, type(module))
    return torch.cat([kind.compute_bias(module, len(run), own * size, past_seen_tokens=run.start) for run in runs], 2)


def _ignored(ctx: DistContext, mask: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return True for the own tokens of padding, None where no rank has any; and the own places, counted from the first
    token. A collective, and it syncs."""
    ignored = mask == 0
    whole = whole_positions(ctx, ignored)
    before = whole.long().cumprod(1).sum(1, keepdim=True)
    places = _own_places(ctx, mask.shape[1]).to(mask.device) - before
    return ignored if bool(whole.any()) else None, places


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
            where="forward of a model on a mesh with cp",
            fix=f"Pass position_ids=part['position_ids'] + {padding + 1}.",
        )


def _documents(ctx: DistContext, position_ids: Tensor) -> Tensor | None:
    """Return the numbers of packed documents, as transformers finds them where positions begin anew; None for one. A
    collective, and it syncs."""
    whole = whole_positions(ctx, position_ids)
    begins = whole[:, 1:] != whole[:, :-1] + 1
    if not bool(begins.any()):
        return None
    numbers = torch.nn.functional.pad(begins.cumsum(1), (1, 0))
    return numbers[:, _own_places(ctx, position_ids.shape[1]).to(numbers.device)]


def _mask(
    *, mask_function: Any, attention_mask: Tensor | None = None, use_vmap: bool = False, **_: Any
) -> MaskSpan | None:
    """Refuse masks of a model's own making, as transformers' `AttentionMaskInterface` asks. Others are made by the
    attention: return distances for those that have some."""
    own = "a mask that joins others, such as a mask of images among tokens"
    masks: Masks | None = getattr(_FORWARD, "masks", None)
    if attention_mask is not None and not (masks and masks.is_given) and not bool(attention_mask.all()):
        own = "a mask of the padding among the tokens, where none was passed (decoder_attention_mask= of a decoder)"
    elif not use_vmap and "or_mask" not in getattr(mask_function, "__qualname__", ""):
        return None if masks is None else masks.note(mask_function)
    raise ConfigError(
        "a mask of the model's own making does not cross ranks",
        expected="a causal order or none, windows, documents and padding",
        got=own,
        where="forward of a model on a mesh with cp",
        fix=_PASS_MASK,
    )


def _check_order(call: ContextCall, module: nn.Module, *, causal: bool) -> None:
    """Raise `ConfigError` for an attention of another order than the mask that its model made."""
    orders = call.masks.orders  # a mask without an order may be of a cross-attention
    if not orders or (causal in orders and (causal or True not in orders)):
        return
    words = {True: "causal", False: "not causal"}
    raise ConfigError(
        "an attention and the mask of its model say different orders: transformers takes one or the other by the "
        "padding of a batch",
        expected="one order",
        got=f"is_causal={causal} of {type(module).__name__}, and a mask that is {words[not causal]}",
        where="forward of a model on a mesh with cp",
        fix=f"{_PASS_MASK} Or make the model with use_bidirectional_attention=False in the config of its text model, "
        "for a causal order, or with is_causal=False, for none.",
    )


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | MaskSpan | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Return the attention of a layer, [batch, own, heads, head dim], as transformers' `AttentionInterface` asks."""
    where = f"{type(module).__name__} on a mesh with cp"
    call = _call_of(module, keywords, where)
    _check_scores(dropout, keywords, where)
    causal = keywords.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    crosses = call.is_decoder and not causal
    span, attention_mask = (
        (attention_mask, None) if isinstance(attention_mask, MaskSpan) else (MaskSpan(), attention_mask)
    )
    bias = keywords.get("position_bias")
    if crosses and not getattr(module, "has_relative_attention_bias", True):
        bias = None  # zeros
    is_complete = attention_mask is not None  # the order, documents and windows are in the mask
    if not crosses and not is_complete:
        _check_order(call, module, causal=causal)
    mask_mod = getattr(attention_mask, "mask_mod", None)  # of a BlockMask
    if attention_mask is not None:
        attention_mask = _with_all_keys(call.ctx, attention_mask, query, key)
        if attention_mask.shape[-1] != key.shape[2] * position_axis(call.ctx).size:
            raise mask_refused(attention_mask)
        if mask_mod is None:
            bias = attention_mask if bias is None else _joined(bias, attention_mask)
    documents = None if crosses or is_complete else _documents_of(call, span.chunk)
    out = context_attention(
        call.ctx,
        query,
        key,
        value,
        causal=causal and not is_complete,
        documents=None if documents is None else documents.expand(query.shape[0], -1),
        scale=scaling,
        method=call.method,
        window=span.window,
        softcap=keywords.get("softcap"),
        sinks=keywords.get("s_aux"),
        key_padding_mask=call.crossed if crosses else call.ignored,
        attn_mask=bias,
        mask_mod=mask_mod,
    )
    return out.transpose(1, 2).contiguous(), None


def _check_scores(dropout: float, keywords: Mapping[str, Any], where: str) -> None:
    """Raise `ConfigError` for dropout, and for keywords that mean other scores or masks."""
    if dropout:
        raise ConfigError(
            "dropout of attention does not cross ranks",
            expected="0",
            got=str(dropout),
            where=where,
            fix="Set attention_dropout=0 in the model's config; elsewhere it is attn_pdrop, or T5's dropout_rate.",
        )
    if other := [name for name in _OTHER_SCORES if keywords.get(name) is not None]:
        raise ConfigError(
            "this attention does not cross ranks",
            expected="softmax over keys of a document, causal or full, with a window, a soft cap, sinks or T5's bias",
            got=", ".join(other),
            where=where,
            fix="Leave cp out of the mesh.",
        )


def _with_all_keys(ctx: DistContext, mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return a mask of this rank's queries and all keys, for a mask that a model made of this rank's keys only (Switch
    Transformers)."""
    if getattr(mask, "ndim", 0) != 4 or mask.shape[2:] != (1, key.shape[2]):
        return mask
    return whole_positions(ctx, mask, dim=3).expand(-1, -1, query.shape[2], -1)


def _call_of(module: nn.Module, keywords: Mapping[str, Any], where: str) -> ContextCall:
    """Return the context that a model has forwarded to its attention, or that a block has kept for it; raise
    `ConfigError` for none."""
    call = keywords.get(NAME) or vars(module).pop(NAME, None)
    if not isinstance(call, ContextCall):
        raise ConfigError(
            "no context came with the call",
            expected="a forward of the model that prepare has prepared, which forwards keywords to its attention",
            got="none",
            where=where,
            fix="Call the prepared model; a model that does not forward keywords needs a mesh without cp.",
        )
    return call


def _documents_of(call: ContextCall, chunk: int | None) -> Tensor | None:
    """Return the documents of a layer: under chunked attention each chunk of one is a document."""
    if chunk is None or call.positions is None:
        return call.documents
    chunks = call.positions // chunk
    whole = call.positions.shape[1] * position_axis(call.ctx).size
    return chunks if call.documents is None else call.documents * whole + chunks


def _joined(bias: Tensor, mask: Tensor) -> Tensor:
    """Return a bias with a mask of either kind."""
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
