# SPDX-License-Identifier: Apache-2.0
"""`context_attention`: attention over a sequence whose positions ranks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from accel.comm import peer_error
from accel.context import DistContext, context_first, group_of
from accel.errors import ConfigError, check_choice
from accel.parallel._private import untraced
from accel.parallel.context._gather import gather_attention
from accel.parallel.context._heads import heads_attention
from accel.parallel.context._notes import note_attention, planned_method
from accel.parallel.context._ring import ring_attention
from accel.parallel.context._sdpa import attend
from accel.topology import ContextMethod

_METHODS: Mapping[str, Callable[..., Tensor]] = {
    "gather": gather_attention,
    "ring": ring_attention,
    "heads": heads_attention,
}


@context_first
def context_attention(
    ctx: DistContext,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    documents: Tensor | None = None,
    scale: float | None = None,
    method: ContextMethod | None = None,
) -> Tensor:
    """Return scaled dot-product attention of this rank's positions to those of all ranks along the mesh's axis cp.

    The positions are those that `split_sequence` gives a rank. Without that axis it is torch's
    `scaled_dot_product_attention`. A collective of the ranks along cp, as its backward.

    Args:
        ctx: the context.
        q: queries of the own positions, shape [batch, heads, own, head dim].
        k, v: keys and values of the own positions, [batch, key heads, own, head dim]; the number of key heads divides
            that of the heads (GQA). On one rank there may be more, as from a cache; the last query then sees all.
        causal: whether a position sees itself and earlier ones alone.
        documents: numbers of the documents packed into the sequence, integers of shape [batch, own]; a position sees
            its own document alone. None for one document.
        scale: factor of the products before the softmax; None for 1 / sqrt(head dim).
        method: "gather" collects the keys and values of all ranks, and uses every kernel that torch has; "ring" passes
            them round, so that a rank holds two ranks' at most, and computes meanwhile; "heads" gives each rank the
            whole sequence for some of the heads (Ulysses), of which there must be a multiple of cp. None for the
            `context` of the plan of the model that `prepare` has prepared, "gather" without one.

    Returns:
        Shape [batch, heads, own, head dim of v].

    Raises:
        ConfigError: shapes, dtypes or devices that do not fit together, an unknown method, or heads that cp does not
            divide.
        PeerError: another rank was lost.
        ContextClosedError: the context is closed.

    Example:
        >>> q = k = v = torch.randn(1, 4, 6, 8)
        >>> accel.context_attention(ctx, q, k, v).shape
        torch.Size([1, 4, 6, 8])
    """
    q, k, v = _as_autocast(q, k, v)
    size = ctx.axis("cp").size
    _check(q, k, v, documents, size)
    factor = float(q.shape[-1] ** -0.5) if scale is None else scale
    if method is not None:
        check_choice(method, get_args(ContextMethod), "unknown method of context parallelism", where="method=")
    if size == 1:
        pair = None if documents is None else (documents, documents)
        return attend(q, k, v, causal=causal, scale=factor, documents=pair)
    chosen = planned_method(ctx) if method is None else method
    if chosen == "heads":
        _check_heads(q, size)
    return _across(ctx, _METHODS[chosen], q, k, v, causal=causal, scale=factor, documents=documents)


@untraced
def _across(ctx: DistContext, function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, **facts: Any) -> Tensor:
    """Run a method. torch.compile breaks its graph here, and compiles what lies before and after."""
    note_attention(ctx)
    try:
        return function(q, k, v, group_of(ctx, "cp"), **facts)
    except RuntimeError as error:
        if (lost := peer_error(error, "context_attention")) is not None:
            raise lost from error
        raise


def _as_autocast(*tensors: Tensor) -> list[Tensor]:
    """Return tensors in the dtype in which autocast would run attention, before they travel."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device_type)
    return [each if each.dtype == torch.float64 else each.to(dtype) for each in tensors]


def _check(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, size: int) -> None:
    """Raise `ConfigError` for tensors that do not fit together. No communication."""
    fit = q.ndim == k.ndim == v.ndim == 4 and q.shape[0] == k.shape[0] and k.shape[:3] == v.shape[:3]
    if not fit or q.shape[3] != k.shape[3] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise _misfit("[batch, heads, own, head dim], with key heads that divide the heads", q, k, v)
    if q.shape[2] != k.shape[2] and (size > 1 or documents is not None):
        raise ConfigError(
            "queries and keys of other positions",
            expected="as many keys as queries, of the same positions",
            got=f"{q.shape[2]} queries and {k.shape[2]} keys",
            where="context_attention",
            fix="Leave caches of keys out: use_cache=False. Generation takes a mesh without cp.",
        )
    if len({(each.dtype, each.device) for each in (q, k, v)}) > 1:
        got = ", ".join(f"{each.dtype} on {each.device}" for each in (q, k, v))
        raise ConfigError("q, k and v differ", expected="one dtype and device", got=got, where="context_attention")
    if size > 1 and q.shape[2] % 2:
        raise ConfigError(
            "positions that no rank of cp has",
            expected="an even number, as split_sequence gives",
            got=str(q.shape[2]),
            where="context_attention",
            fix="Cut the sequence by accel.split_sequence.",
        )
    if documents is not None and (documents.shape != (q.shape[0], q.shape[2]) or documents.is_floating_point()):
        raise ConfigError(
            "not the documents of these positions",
            expected=f"integers of shape {[q.shape[0], q.shape[2]]}",
            got=f"{documents.dtype} of shape {list(documents.shape)}",
            where="context_attention, documents=",
            fix="Cut them with the rest of the batch, by accel.split_sequence.",
        )


def _check_heads(q: Tensor, size: int) -> None:
    if q.shape[1] % size:
        raise ConfigError(
            "heads that the ranks along cp cannot share",
            expected=f"a multiple of {size}",
            got=f"{q.shape[1]} heads",
            where="context_attention, method='heads'",
            fix="Take the method 'gather' or 'ring', or a smaller cp.",
        )


def _misfit(expected: str, *tensors: Any) -> ConfigError:
    got = ", ".join(str(list(each.shape)) for each in tensors)
    return ConfigError("q, k and v do not fit together", expected=expected, got=got, where="context_attention")
