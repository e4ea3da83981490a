# SPDX-License-Identifier: Apache-2.0
"""Attention on a single rank: by torch, or over one block of keys with what merges blocks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from accel.parallel._private import subclasses_are_on, with_subclasses
from accel.parallel.parts import plain_of

_aten = cast(Any, torch.ops.aten)
_LSE_ROWS = 32  # the memory-efficient kernel pads its sums to a multiple of these
_HEAD_ALIGNMENT = 8  # of the head dim, in the flash kernel


class Masked(NamedTuple):
    """Mask of a block."""

    causal: bool  # whether query i sees keys 0 to i
    # True where a key is seen, in a shape that expands to [batch, heads, queries, keys]; with it `causal` is False.
    mask: Tensor | None = None
    softcap: float | None = None  # largest size of a score, which tanh approaches; None for none


class Attended(NamedTuple):
    """Output of attention over some keys."""

    out: Tensor  # weighted values, [batch, heads, queries, head dim]
    lse: Tensor  # log-sum-exp of the scores, [batch, heads, queries]
    seeds: tuple[Tensor, ...] = ()  # random state of the kernel's dropout, which is 0; its backward takes it back


class Kernel(NamedTuple):
    """A way to compute a block and its gradients."""

    name: str
    # Takes (q, k, v, masked, scale). Returns the block's attention.
    forward: Callable[[Tensor, Tensor, Tensor, Masked, float], Attended]
    # Takes (gradient, q, k, v, attended, masked, scale). Returns the gradients of q, k and v. The attention is that
    # over all blocks, so the gradients are this block's share.
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Attended, Masked, float], tuple[Tensor, Tensor, Tensor]]


def kernel_of(q: Tensor, k: Tensor, v: Tensor, masked: Masked) -> Kernel:
    """Return the kernel for all blocks of an attention, by the queries, keys and mask of one; if that has a mask of its
    own, all have. Keys and values may have fewer heads than the queries."""
    if masked.softcap is not None:
        return WRITTEN_OUT
    if q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
        return _CPU
    if q.device.type != "cuda" or masked.mask is not None:
        return WRITTEN_OUT
    k, v = (each[:, :1].expand(-1, q.shape[1], -1, -1) for each in (k, v))
    cuda = cast(Any, torch.backends.cuda)
    asked = cuda.SDPAParams(q, k, v, None, 0.0, masked.causal, False)
    aligned = q.shape[-1] % _HEAD_ALIGNMENT == 0 and q.shape[-1] == v.shape[-1]
    if aligned and cuda.can_use_flash_attention(asked):
        return _FLASH
    return _EFFICIENT if aligned and cuda.can_use_efficient_attention(asked) else WRITTEN_OUT


def _scores(q: Tensor, k: Tensor, masked: Masked, scale: float) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).to(accumulation_dtype(q)) * scale
    if masked.softcap is not None:
        scores = torch.tanh(scores / masked.softcap) * masked.softcap
    mask = masked.mask
    if masked.causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores if mask is None else scores.masked_fill(~mask, hidden_score(scores.dtype))


def _written_out_forward(q: Tensor, k: Tensor, v: Tensor, masked: Masked, scale: float) -> Attended:
    scores = _scores(q, k, masked, scale)
    lse = scores.logsumexp(-1)
    return Attended((scores - lse[..., None]).exp().to(v.dtype) @ v, lse)


def _written_out_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, masked: Masked, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    lse = attended.lse
    scores = _scores(q, k, masked, scale)
    chances = (scores - lse[..., None]).exp()
    shared = (grad * attended.out).to(lse.dtype).sum(-1, keepdim=True)
    of_scores = chances * ((grad @ v.transpose(-1, -2)).to(lse.dtype) - shared) * scale
    if masked.softcap is not None:  # the slope of tanh; a key that is not seen has no chance
        of_scores = of_scores * (1 - (scores / masked.softcap).clamp(-1, 1).square())
    of_scores = of_scores.to(q.dtype)
    return of_scores @ k, of_scores.transpose(-1, -2) @ q, chances.to(grad.dtype).transpose(-1, -2) @ grad


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, masked: Masked, scale: float) -> Attended:
    bias = _bias(masked.mask, q.dtype)
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, masked.causal, attn_mask=bias, scale=scale
    )
    return Attended(out, lse)


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, masked: Masked, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    bias = _bias(masked.mask, q.dtype)
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, attended.out, attended.lse, 0.0, masked.causal, attn_mask=bias, scale=scale
    )


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, masked: Masked, scale: float) -> Attended:
    out, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, masked.causal, scale=scale
    )
    return Attended(out, lse, (seed, offset))


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, masked: Masked, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, seeds = attended
    lengths = q.shape[2], k.shape[2]
    return _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, *lengths, 0.0, masked.causal, *seeds, scale=scale
    )


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, masked: Masked, scale: float) -> Attended:
    out, lse, seed, offset = _aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, masked.causal, scale=scale
    )
    return Attended(out, lse[..., : q.shape[2]], (seed, offset))


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, masked: Masked, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, seeds = attended
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % _LSE_ROWS), value=float("inf"))
    wanted = [True, True, True, False]
    grads = _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, padded, *seeds, 0.0, wanted, masked.causal, scale=scale
    )
    return grads[0], grads[1], grads[2]


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, hidden_score(dtype))


def hidden_score(dtype: torch.dtype) -> float:
    """Return the score of a key that is not seen: finite, so that a row that sees no key of a block is no NaN."""
    return -30_000.0 if dtype == torch.float16 else -1e30


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which blocks are merged and gradients are summed."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


WRITTEN_OUT = Kernel("written out", _written_out_forward, _written_out_backward)
_CPU = Kernel("cpu", _cpu_forward, _cpu_backward)
_FLASH = Kernel("flash", _flash_forward, _flash_backward)
_EFFICIENT = Kernel("efficient", _efficient_forward, _efficient_backward)
KERNELS = {each.name: each for each in (WRITTEN_OUT, _CPU, _FLASH, _EFFICIENT)}


ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Terms(NamedTuple):
    """The mask and the scores of an attention over a sequence that ranks share."""

    causal: bool  # whether a position only sees itself and earlier ones
    scale: float  # factor of the scores before the softmax
    # Numbers of the documents of the own positions, [batch, own]; None for one document.
    documents: Tensor | None = None
    ignored: Tensor | None = None  # True for own keys that no query sees, [batch, own keys]; None for none
    # Mask of the own queries and all keys in the order of the sequence, as torch's `attn_mask`; None for none.
    mask: Tensor | None = None
    # Positions at a smaller distance are seen, of a causal attention the earlier ones; None for all positions.
    window: int | None = None
    softcap: float | None = None  # largest size of a score, which tanh approaches; None for none
    # A score of each head that takes weight and has no value (Xiao et al. 2023, attention sinks), [heads]; or None.
    sinks: Tensor | None = None
    dropout_p: float = 0.0  # probability to drop a weight
    # Function like the one of torch's `flex_attention`, at the places in the sequence; None for none.
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None  # likewise; None for none

    @property
    def given(self) -> list[str]:
        """Names of the arguments that need the places of queries and keys."""
        pairs = (("attn_mask", self.mask), ("score_mod", self.score_mod), ("mask_mod", self.mask_mod))
        return [name for name, each in pairs if each is not None]


class Seen(NamedTuple):
    """Parts of `Terms` for some queries and some keys."""

    # Numbers of the documents of the queries and of the keys, [batch, queries] and [batch, keys].
    documents: tuple[Tensor, Tensor] | None = None
    ignored: Tensor | None = None  # of the keys, [batch, keys]
    mask: Tensor | None = None  # of the queries and the keys
    first: int | None = None  # position of the first query among the keys; None where the last ones are of one position
    begin: int = 0  # place of the first key in the sequence


def attend(q: Tensor, k: Tensor, v: Tensor, terms: Terms, seen: Seen) -> Tensor:
    """Return the attention of queries [batch, heads, queries, head dim] to keys of fewer or as many heads.

    Causal: the last query sees all keys, the one before it all but the last. Documents: a query only sees the keys of
    its document.
    """
    k = repeated(k, q.shape[1])
    v = repeated(v, q.shape[1])
    is_plain = terms.softcap is None and terms.sinks is None and terms.score_mod is None
    mask = _mask_of(q, k, terms, seen, is_hint=is_plain)
    bias = None if seen.mask is None or seen.mask.dtype == torch.bool else seen.mask.to(q.dtype)
    if not is_plain:
        return _scored(q, k, v, mask, bias, terms, seen)
    attention = functional.scaled_dot_product_attention
    if bias is not None and mask is not None:
        bias = bias.masked_fill(~mask, -torch.inf)
    if bias is not None or mask is not None:
        return attention(q, k, v, mask if bias is None else bias, terms.dropout_p, scale=terms.scale)
    if not terms.causal or q.shape[2] == k.shape[2]:
        return attention(q, k, v, dropout_p=terms.dropout_p, is_causal=terms.causal, scale=terms.scale)
    return last_queries(q, k, v, terms.dropout_p, terms.scale)


def allow_in_graphs() -> None:
    """Let graphs of torch.compile contain `last_queries`, unless nobody has imported the compiler."""
    if "torch._dynamo" in sys.modules:
        _ = cast(Any, torch.compiler).allow_in_graph(last_queries)


def last_queries(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, scale: float) -> Tensor:
    """Return the causal attention of the last of several positions. Rules of parts call it with subclasses off, where
    torch would read the memory of its sign, which has no values."""
    if not subclasses_are_on():
        q, k, v = (plain_of(each) for each in (q, k, v))
        with with_subclasses():
            return last_queries(q, k, v, dropout_p, scale)
    return functional.scaled_dot_product_attention(q, k, v, _lower_right(q, k), dropout_p, scale=scale)


def _mask_of(q: Tensor, k: Tensor, terms: Terms, seen: Seen, *, is_hint: bool) -> Tensor | None:
    """Return the mask that a block needs, True where a key is seen; None for none. With `is_hint` the causal order
    alone is left to the kernel."""
    queries, keys = q.shape[2], k.shape[2]
    first = keys - queries if seen.first is None else seen.first
    window = terms.window if terms.window is not None and terms.window < max(keys, first + queries) else None
    masks = packed_masks(seen.documents, seen.ignored)
    if seen.mask is not None and seen.mask.dtype == torch.bool:
        masks.append(seen.mask)
    if terms.mask_mod is not None:
        masks.append(terms.mask_mod(*_places(q, k, seen)))
    if window is not None or (terms.causal and (masks or seen.mask is not None or not is_hint)):
        masks.append(near_mask(queries, keys, first, window, causal=terms.causal, device=q.device))
    return all_of(masks)


def packed_masks(documents: tuple[Tensor, Tensor] | None, ignored: Tensor | None) -> list[Tensor]:
    """Return the masks, each broadcastable to [batch, heads, queries, keys], of documents and of keys to ignore."""
    masks: list[Tensor] = []
    if documents is not None:
        masks.append((documents[0][:, :, None] == documents[1][:, None, :])[:, None])
    if ignored is not None:
        masks.append(~ignored[:, None, None, :])
    return masks


def all_of(masks: list[Tensor]) -> Tensor | None:
    """Return the mask that is True where all are; None for no mask."""
    return reduce(torch.logical_and, masks) if masks else None


def _places(q: Tensor, k: Tensor, seen: Seen) -> list[Tensor]:
    """Return numbers of samples and heads, and places of queries and keys, that broadcast to a block's scores."""
    first = seen.begin + (k.shape[2] - q.shape[2] if seen.first is None else seen.first)
    begins = 0, 0, first, seen.begin
    sizes = (*q.shape[:3], k.shape[2])
    runs = [torch.arange(begin, begin + size, device=q.device) for begin, size in zip(begins, sizes, strict=True)]
    return [run.view([-1 if dim == at else 1 for dim in range(4)]) for at, run in enumerate(runs)]


def _scored(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, terms: Terms, seen: Seen
) -> Tensor:
    """Return attention with a soft cap, sinks or a `score_mod`, which torch's kernels do not have, written out."""
    scores = (q @ k.transpose(-1, -2)).to(accumulation_dtype(q)) * terms.scale
    if terms.softcap is not None:
        scores = torch.tanh(scores / terms.softcap) * terms.softcap
    if bias is not None:
        scores = scores + bias
    if terms.score_mod is not None:
        scores = terms.score_mod(scores, *_places(q, k, seen))
        hidden = scores.isneginf()
        mask = ~hidden if mask is None else mask & ~hidden
    if mask is not None:
        scores = scores.masked_fill(~mask, hidden_score(scores.dtype))
    if terms.sinks is not None:
        sinks = terms.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    chances = scores.softmax(-1)[..., : k.shape[2]]
    if mask is not None:  # for a query that sees no key
        chances = chances.masked_fill(~mask, 0)
    return functional.dropout(chances, terms.dropout_p).to(v.dtype) @ v


def near_mask(queries: int, keys: int, first: int, window: int | None, *, causal: bool, device: torch.device) -> Tensor:
    """Return the mask of queries from the position `first` on, True within the window; [queries, keys]."""
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(first if causal else keys)
    return seen if window is None else seen.tril(first + window - 1).triu(first - window + 1)


def _lower_right(q: Tensor, k: Tensor) -> Tensor:
    """Return torch's sign for the mask of the last queries, which needs no memory; the mask where torch has no sign."""
    from torch.nn.attention import bias  # its import loads torch.compile and writes to the environment

    queries, keys = q.shape[2], k.shape[2]
    if not is_dynamo_compiling():  # which traces no sign, if it was imported after `allow_in_graphs`
        with contextlib.suppress(RuntimeError):  # in blocks that keep the outputs of some operators
            return cast(Any, bias).causal_lower_right(queries, keys)
    return torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)


def repeated(x: Tensor, heads: int) -> Tensor:
    """Return keys or values with as many heads as the queries have; neighbouring heads share one (GQA)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)
