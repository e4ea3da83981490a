# SPDX-License-Identifier: Apache-2.0
"""Attention on this rank alone, by torch's `scaled_dot_product_attention`."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

Documents = tuple[Tensor, Tensor]


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, documents: Documents | None = None
) -> Tensor:
    """Return the attention of queries to keys. No communication.

    Args:
        q: queries, shape [batch, heads, queries, head dim].
        k, v: keys and values, [batch, key heads, keys, head dim]; the number of key heads divides that of the heads.
        causal: whether the last query sees all keys, the one before it all but the last, and so on.
        scale: factor of the products before the softmax.
        documents: numbers of the documents of queries [batch, queries] and keys [batch, keys]. A query sees keys of its
            own document.
    """
    k = repeated(k, q.shape[1])
    v = repeated(v, q.shape[1])
    if documents is not None:
        mask = document_mask(*documents, causal=causal)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    if not causal or q.shape[2] == k.shape[2]:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=_lower_right(q, k), scale=scale)


def _lower_right(q: Tensor, k: Tensor) -> Tensor:
    """Return torch's sign for the mask of the last queries, which needs no memory; the mask where torch has no sign.

    That is in the forward of blocks that keep the outputs of some operators, by `checkpoint_activations(keep=)`.
    """
    from torch.nn.attention import bias  # its import loads torch.compile and writes to the environment

    queries, keys = q.shape[2], k.shape[2]
    try:
        return cast(Any, bias).causal_lower_right(queries, keys)
    except RuntimeError:
        return torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)


def document_mask(of_queries: Tensor, of_keys: Tensor, *, causal: bool) -> Tensor:
    """Return the mask of packed documents, True where a query sees a key; shape [batch, 1, queries, keys].

    Args:
        of_queries, of_keys: numbers of the documents, [batch, queries] and [batch, keys].
        causal: as of `attend`.
    """
    same = (of_queries[:, :, None] == of_keys[:, None, :])[:, None]
    if not causal:
        return same
    queries, keys = same.shape[-2:]
    return same & torch.ones(queries, keys, dtype=torch.bool, device=same.device).tril(keys - queries)


def repeated(x: Tensor, heads: int) -> Tensor:
    """Return keys or values with as many heads as the queries have; neighbouring heads share one (GQA)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)
