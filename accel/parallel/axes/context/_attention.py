# SPDX-License-Identifier: Apache-2.0
"""`context_attention`: attention over a sequence that ranks share, by an all-gather, by heads or by a ring."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from accel.comm import exchanged, gathered, gathered_summed, peer_error, start_shift
from accel.context import DistContext, context_first, group_of
from accel.errors import ConfigError
from accel.errors._checks import check_choice
from accel.parallel._private import untraced
from accel.parallel.axes.context._kernels import (
    PLAIN,
    Attended,
    Kernel,
    Masked,
    Scoring,
    accumulation_dtype,
    attend,
    document_mask,
    kernel_of,
    repeated,
)
from accel.parallel.axes.context._split import (
    Halves,
    natural_order,
    note_attention,
    pieces,
    planned_method,
    rank_order,
    ring_block,
)
from accel.topology import ContextMethod


def gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup,
    *,
    causal: bool,
    scale: float,
    documents: Tensor | None,
    scoring: Scoring = PLAIN,
) -> Tensor:
    """Return the attention of this rank's queries to all keys, as `attend`. A collective, as its backward.

    Keys and values travel in one message, before heads are repeated.
    """
    both = gathered_summed(torch.cat((k, v), -1), 2, group)
    all_documents = None if documents is None else gathered(documents, 1, group)
    window = scoring.window
    if not causal and window is None:
        keys, values = torch.split(both, [k.shape[-1], v.shape[-1]], -1)
        pair = None if documents is None or all_documents is None else (documents, all_documents)
        return attend(q, keys, values, causal=False, scale=scale, documents=pair, scoring=scoring)
    both = sorted_positions(both, 2, group.size())
    all_documents = None if all_documents is None else sorted_positions(all_documents, 1, group.size())
    keys, values = torch.split(both, [k.shape[-1], v.shape[-1]], -1)
    own = q.shape[2] // 2
    halves: list[Tensor] = []
    for at, piece in enumerate(pieces(group.rank(), group.size())):
        begin = piece * own
        end = begin + own
        # causal: keys up to the piece's end; with an early and a late piece each, no rank has more work than another
        first = 0 if window is None else max(0, begin - window + 1)
        last = end if causal or window is None else min(keys.shape[2], end + window - 1)
        rows = slice(at * own, (at + 1) * own)
        columns = slice(first, last)
        pair = None
        if documents is not None and all_documents is not None:
            pair = documents[:, rows], all_documents[:, columns]
        here = q[:, :, rows], keys[:, :, columns], values[:, :, columns]
        facts: Any = {"scale": scale, "documents": pair, "scoring": scoring, "offset": begin - first}
        halves.append(attend(*here, causal=causal, **facts))
    return torch.cat(halves, 2)


def sorted_positions(x: Tensor, dim: int, size: int) -> Tensor:
    """Return parts, each of two pieces along `dim`, that are concatenated by rank in the order of the sequence."""
    parts = x.chunk(2 * size, dim)
    return torch.cat([parts[at] for at in natural_order(size)], dim)


def heads_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup,
    *,
    causal: bool,
    scale: float,
    documents: Tensor | None,
    scoring: Scoring = PLAIN,
) -> Tensor:
    """Return the attention of this rank's queries to all keys, as `attend`. A collective, as its backward.

    Queries, keys and values travel in one all-to-all, the output in another; the ranks' number divides the heads'.
    """
    size = group.size()
    # fewer key heads than ranks are repeated, until each rank has one
    times = size // math.gcd(k.shape[1], size)
    k = repeated(k, k.shape[1] * times)
    v = repeated(v, v.shape[1] * times)
    whole = [sorted_positions(each, 2, size) for each in _heads_for_positions((q, k, v), group)]
    pair = None
    if documents is not None:
        everywhere = sorted_positions(gathered(documents, 1, group), 1, size)
        pair = everywhere, everywhere
    if scoring.sinks is not None:
        scoring = scoring._replace(sinks=scoring.sinks.chunk(size)[group.rank()])
    out = attend(*whole, causal=causal, scale=scale, documents=pair, scoring=scoring)
    return _positions_for_heads(out, group)


def _heads_for_positions(tensors: tuple[Tensor, ...], group: dist.ProcessGroup) -> list[Tensor]:
    """Give away heads of the own positions for all positions of some heads, parts by rank. A collective."""
    size = group.size()
    parts = [torch.stack(each.chunk(size, 1)) for each in tensors]
    flat = torch.cat([each.reshape(size, -1) for each in parts], 1)
    received = exchanged(flat, [1] * size, [1] * size, group)
    columns = torch.split(received, [each[0].numel() for each in parts], 1)
    by_rank = [column.reshape(each.shape) for column, each in zip(columns, parts, strict=True)]
    return [torch.cat(list(each), 2) for each in by_rank]


def _positions_for_heads(out: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Give away other ranks' positions of the own heads for all heads of the own positions. A collective."""
    size = group.size()
    cut = out.chunk(2 * size, 2)
    parts = torch.cat([cut[at] for at in rank_order(size)], 2).chunk(size, 2)
    stacked = torch.stack(parts)
    received = exchanged(stacked.reshape(size, -1), [1] * size, [1] * size, group)
    return torch.cat(list(received.view_as(stacked)), 1)


class _Ring(NamedTuple):
    """Facts that all blocks of one attention share.

    Attributes:
        group: ranks that share the sequence.
        causal, scale: as of `attend`.
        documents: numbers of the documents of each rank's positions, [ranks, batch, own]; None without.
    """

    group: dist.ProcessGroup
    causal: bool
    scale: float
    documents: Tensor | None


class _RingStep(NamedTuple):
    """One block: rows of the own queries, rows of the keys that are here, and its mask."""

    rows: slice
    columns: slice
    masked: Masked


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup,
    *,
    causal: bool,
    scale: float,
    documents: Tensor | None,
    scoring: Scoring = PLAIN,
) -> Tensor:
    """Return the attention of this rank's queries to all keys, as `attend`. A collective, as its backward.

    No rank ever holds more than two ranks' keys and values; the next ones travel while a block is computed.
    """
    _ = scoring  # plain: checked by `context_attention`
    everywhere = None
    if documents is not None:
        everywhere = torch.stack(gathered(documents, 1, group).chunk(group.size(), 1))
    return cast(Any, _RingAttention).apply(q, k, v, _Ring(group, causal, scale, everywhere))


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _Ring) -> Tensor:
        attended, kernel = _forward(q, k, v, ring)
        ctx.save_for_backward(q, k, v, attended.out, attended.lse, *attended.seeds)
        ctx.kernel = kernel
        ctx.ring = ring
        return attended.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - decorated
        q, k, v, out, lse, *seeds = ctx.saved_tensors
        grads = _backward(grad_outputs[0], q, k, v, Attended(out, lse, tuple(seeds)), ctx.kernel, ctx.ring)
        return *grads, None


def _forward(q: Tensor, k: Tensor, v: Tensor, ring: _Ring) -> tuple[Attended, Kernel]:
    """Return the attention to all keys, and the kernel that computed it."""
    size = ring.group.size()
    wide = accumulation_dtype(q)
    held = [k, v]
    kernel: Kernel | None = None
    total: Attended | None = None
    for step in range(size):
        arriving = start_shift(held, 1, ring.group) if step < size - 1 else None
        rows, columns, masked = _step(ring, (ring.group.rank() - step) % size, q.shape[2])
        queries = q[:, :, rows]
        keys = repeated(held[0][:, :, columns], q.shape[1])
        values = repeated(held[1][:, :, columns], q.shape[1])
        kernel = kernel or kernel_of(queries, keys, values, masked)
        block = kernel.forward(queries, keys, values, masked, ring.scale)
        if total is None:  # the own keys: every query sees one of them
            # copies, as others may keep what a kernel returns: checkpoint_activations(keep=)
            lse = block.lse.to(wide, copy=True, memory_format=torch.contiguous_format)
            total = Attended(block.out.to(wide, copy=True), lse, block.seeds)
        else:
            _merge_(total.out[:, :, rows], total.lse[:, :, rows], block)
        held = held if arriving is None else arriving()
    assert total is not None
    assert kernel is not None
    return Attended(total.out.to(q.dtype), total.lse, total.seeds), kernel


def _merge_(out: Tensor, lse: Tensor, block: Attended) -> None:
    """Add a block to the output and the log-sum-exp over the keys before it. Mutates both."""
    more = block.lse.to(lse.dtype)
    both = torch.logaddexp(lse, more)
    _ = out.mul_((lse - both).exp()[..., None]).add_(block.out.to(out.dtype) * (more - both).exp()[..., None])
    _ = lse.copy_(both)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, kernel: Kernel, ring: _Ring
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    size = ring.group.size()
    grad = grad.contiguous()
    grad_q = torch.zeros_like(q, dtype=accumulation_dtype(q))
    held = [k, v]
    # gradients of a rank's keys follow them, one step behind: each rank adds its share and sends them on
    returning: Callable[[], list[Tensor]] | None = None
    for step in range(size):
        arriving = start_shift(held, 1, ring.group) if step < size - 1 else None
        own = _step(ring, (ring.group.rank() - step) % size, q.shape[2])
        part = Attended(attended.out[:, :, own.rows], attended.lse[:, :, own.rows].contiguous(), attended.seeds)
        queries = q[:, :, own.rows]
        columns = [each[:, :, own.columns] for each in held]
        grads = _block_gradients(kernel, grad[:, :, own.rows], queries, columns, part, own.masked, ring.scale)
        grad_q[:, :, own.rows] += grads[0]
        sums = [torch.zeros_like(each, dtype=grad_q.dtype) for each in held] if returning is None else returning()
        for each, share in zip(sums, grads[1:], strict=True):
            each[:, :, own.columns] += share
        returning = start_shift(sums, 1, ring.group)
        held = held if arriving is None else arriving()
    assert returning is not None
    grad_k, grad_v = returning()
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _block_gradients(
    kernel: Kernel, grad: Tensor, q: Tensor, held: list[Tensor], part: Attended, masked: Masked, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block's share of the gradients of its queries, and of its keys and values before heads are repeated."""
    keys, values = (repeated(each, q.shape[1]) for each in held)
    grads = kernel.backward(grad, q, keys, values, part, masked, scale)
    key_heads = held[0].shape[1]
    return grads[0], _summed_heads(grads[1], key_heads), _summed_heads(grads[2], key_heads)


def _summed_heads(x: Tensor, heads: int) -> Tensor:
    """Return the sums over neighbouring heads that share one: the gradient of `repeated`."""
    return x.reshape(x.shape[0], heads, -1, *x.shape[2:]).sum(2, dtype=accumulation_dtype(x))


def _step(ring: _Ring, source: int, own: int) -> _RingStep:
    """Return the block of this rank's queries and a rank's keys, in rows of this length."""
    rank = ring.group.rank()
    block = ring_block(rank, source, ring.group.size(), causal=ring.causal)
    rows = _rows(block.queries, own)
    columns = _rows(block.keys, own)
    masked = Masked(block.causal)
    if ring.documents is not None:
        documents = ring.documents[rank, :, rows], ring.documents[source, :, columns]
        masked = Masked(causal=False, mask=document_mask(*documents, causal=block.causal))
    return _RingStep(rows, columns, masked)


def _rows(halves: Halves, own: int) -> slice:
    return slice(halves[0] * own // 2, halves[1] * own // 2)


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
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
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
            whole sequence for some of the heads (Ulysses), whose number must be a multiple of cp. None for the
            `context` of the plan of the model that `prepare` has prepared, "gather" without one.
        window: a position sees those at a smaller distance than this, its own included; None for all.
        softcap: largest size of a score s, as softcap * tanh(s / softcap); None for none.
        sinks: a score of each head that takes weight and has no value, shape [heads]; None for none. With "ring" there
            is neither of these three; soft caps and sinks are computed without a fused kernel.

    Returns:
        Shape [batch, heads, own, head dim of v].

    Raises:
        ConfigError: shapes, dtypes or devices that do not fit together, an unknown method, heads that cp does not
            divide, or a window, soft cap or sinks that the method or the order does not have.
        PeerError: another rank was lost.
        ContextClosedError: the context is closed.

    Examples:
        >>> q = k = v = torch.randn(1, 4, 6, 8)
        >>> accel.parallel.context_attention(ctx, q, k, v).shape
        torch.Size([1, 4, 6, 8])
    """
    q, k, v = _as_autocast(q, k, v)
    size = ctx.axis("cp").size
    _check(q, k, v, documents, size)
    scoring = Scoring(window, softcap, sinks)
    _check_scoring(q, scoring)
    factor = float(q.shape[-1] ** -0.5) if scale is None else scale
    if method is not None:
        check_choice(method, get_args(ContextMethod), "unknown method of context parallelism", where="method=")
    if size == 1:
        pair = None if documents is None else (documents, documents)
        return attend(q, k, v, causal=causal, scale=factor, documents=pair, scoring=scoring)
    chosen = planned_method(ctx) if method is None else method
    if chosen == "heads":
        _check_heads(q, size)
    if chosen == "ring" and scoring != PLAIN:
        raise ConfigError(
            "the ring has plain scores and no window",
            expected='method "gather" or "heads"',
            got=", ".join(name for name, each in scoring._asdict().items() if each is not None),
            where="context_attention, method='ring'",
            fix='Take Plan(context="gather").',
        )
    facts = {"causal": causal, "scale": factor, "documents": documents, "scoring": scoring}
    return _across(ctx, _METHODS[chosen], q, k, v, **facts)


@untraced
def _across(ctx: DistContext, function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, **facts: Any) -> Tensor:
    """Run a method. torch.compile breaks its graph here, and compiles the code before and after."""
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
            fix="Cut the sequence by accel.parallel.split_sequence.",
        )
    if documents is not None and (documents.shape != (q.shape[0], q.shape[2]) or documents.is_floating_point()):
        raise ConfigError(
            "not the documents of these positions",
            expected=f"integers of shape {[q.shape[0], q.shape[2]]}",
            got=f"{documents.dtype} of shape {list(documents.shape)}",
            where="context_attention, documents=",
            fix="Cut them with the rest of the batch, by accel.parallel.split_sequence.",
        )


def _check_scoring(q: Tensor, scoring: Scoring) -> None:
    """Raise `ConfigError` for a window, soft cap or sinks that fit no query."""
    where = "context_attention"
    window, softcap, sinks = scoring
    if window is not None and (type(window) is not int or window < 1):
        raise ConfigError("not a window", expected="1 position or more", got=repr(window), where=f"{where}, window=")
    if softcap is not None and not softcap > 0:
        raise ConfigError("not a soft cap", expected="above 0", got=repr(softcap), where=f"{where}, softcap=")
    if sinks is not None and sinks.shape != (q.shape[1],):
        got = str(list(sinks.shape))
        raise ConfigError("not the sinks of the heads", expected=f"[{q.shape[1]}]", got=got, where=f"{where}, sinks=")


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
