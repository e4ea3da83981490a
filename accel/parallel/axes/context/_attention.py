# SPDX-License-Identifier: Apache-2.0
"""`context_attention`: attention over a sequence that ranks share, by an all-gather, by heads or by a ring."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.utils.checkpoint import (
    checkpoint,  # pyright: ignore[reportUnknownVariableType] - dynamo knows the name
)

from accel.comm import exchanged, gathered, gathered_summed, peer_error, records
from accel.context import DistContext, context_first, group_of
from accel.devices import as_autocast
from accel.errors._checks import check_choice
from accel.parallel.axes.context._checks import check_cut, check_fit, check_method, check_terms
from accel.parallel.axes.context._kernels import Seen, Terms, attend, repeated
from accel.parallel.axes.context._ring import ring_attention
from accel.parallel.axes.context._split import (
    ALL_POSITIONS,
    near_keys,
    note_attention,
    places,
    planned_method,
    position_axis,
    rank_order,
    seen_keys,
    sorted_positions,
)
from accel.parallel.parts import PartTensor, leave
from accel.parallel.parts._attention import own_draws
from accel.topology import ContextMethod

if TYPE_CHECKING:
    from accel.parallel.axes.context._positions import PositionRanks

_TILE = 256  # queries at least of a run under a window


def gather_attention(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, terms: Terms) -> Tensor:
    """Return the attention of this rank's queries to all keys, as `attend`. A collective, as its backward.

    Keys and values are sent in one message, before heads are repeated.
    """
    # positions first, as they are sent
    both = gathered_summed(torch.cat((k.movedim(2, 0), v.movedim(2, 0)), -1), 0, group).movedim(0, 2)
    dims = [k.shape[-1], v.shape[-1]]
    if not terms.causal and terms.window is None and not terms.given:
        keys, values = torch.split(both, dims, -1)
        everywhere, ignored = (
            None if each is None else gathered(each, 1, group) for each in (terms.documents, terms.ignored)
        )
        pair = None if terms.documents is None or everywhere is None else (terms.documents, everywhere)
        return attend(q, keys, values, terms, Seen(pair, ignored))
    keys, values = torch.split(sorted_positions(both, 2, group.size()), dims, -1)
    del both  # no block needs it
    return _in_runs(q, keys, values, group, terms, keys.shape[2], [range(keys.shape[2])], attend)


def near_attention(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, terms: Terms) -> Tensor:
    """Return the attention of this rank's queries to the keys inside the window, as `attend`. A collective, as its
    backward.

    A rank only holds the keys that its queries see, and one message brings them. Blocks are computed again in the
    backward, so that no mask is kept.
    """
    rank = group.rank()
    size = group.size()
    length = k.shape[2] * size

    def runs_of(to: int, source: int) -> list[range]:
        assert terms.window is not None
        return near_keys(to, source, size, length, terms.window, causal=terms.causal)

    sent = [runs_of(to, rank) for to in range(size)]
    coming = [runs_of(rank, source) for source in range(size)]
    halves = torch.cat((k.movedim(2, 0), v.movedim(2, 0)), -1).chunk(2)
    begins = [each.start for each in places(length, rank, size)]
    rows = [
        half[run.start - begin : run.stop - begin]
        for runs in sent
        for half, begin, run in zip(halves, begins, runs, strict=True)
    ]
    to, back = ([sum(map(len, runs)) for runs in each] for each in (sent, coming))
    arrived = [run for runs in coming for run in runs]
    parts = torch.split(exchanged(torch.cat(rows), to, back, group), [len(run) for run in arrived])
    order = sorted(range(len(arrived)), key=lambda at: arrived[at].start)
    both = torch.cat([parts[at] for at in order]).movedim(0, 2)
    keys, values = torch.split(both, [k.shape[3], v.shape[3]], -1)
    return _in_runs(q, keys, values, group, terms, length, [arrived[at] for at in order], _attend_again)


def _attend_again(q: Tensor, k: Tensor, v: Tensor, terms: Terms, seen: Seen) -> Tensor:
    """Return what `attend` returns, which runs again in the backward."""
    return checkpoint(attend, q, k, v, terms, seen, use_reentrant=False, preserve_rng_state=False)  # pyright: ignore[reportUnknownVariableType]


def _in_runs(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    group: dist.ProcessGroup,
    terms: Terms,
    length: int,
    held: Sequence[range],
    attend: Callable[[Tensor, Tensor, Tensor, Terms, Seen], Tensor],
) -> Tensor:
    """Return attention by runs of the own queries, each with the keys that it sees. Under a window, runs are about as
    long as it.

    `length`: number of all keys; `held` are the places of the keys that are here, as runs in their order.
    """
    size = group.size()
    documents, ignored = (_of_all(each, group) for each in (terms.documents, terms.ignored))
    runs: list[range] = []
    for piece in places(q.shape[2] * size, group.rank(), size):
        step = max(1, len(piece) if terms.window is None else max(terms.window, _TILE))
        runs += [piece[at : at + step] for at in range(0, max(1, len(piece)), step)]
    outputs: list[Tensor] = []
    begin = 0
    # one split: the gradient of each slice would have the memory of all queries
    for queries, run in zip(torch.split(q, [len(run) for run in runs], 2), runs, strict=True):
        seen = seen_keys(run, length, terms.window, causal=terms.causal)
        before = sum(len(range(each.start, min(each.stop, seen.start))) for each in held)
        columns = slice(before, before + len(seen))
        whole = slice(seen.start, seen.stop)
        pair = None if documents is None else (documents[:, run.start : run.stop], documents[:, whole])
        mask = terms.mask
        if mask is not None:
            rows = slice(begin, begin + len(run))
            mask = mask[..., rows, whole] if mask.shape[-2] > 1 else mask[..., whole]
        facts = Seen(pair, None if ignored is None else ignored[:, whole], mask, run.start - seen.start, seen.start)
        outputs.append(attend(queries, keys[:, :, columns], values[:, :, columns], terms, facts))
        begin += len(run)
    return torch.cat(outputs, 2)


def _of_all(own: Tensor | None, group: dist.ProcessGroup) -> Tensor | None:
    """Return the numbers of all positions in their order, [batch, length]; None for none. A collective."""
    return None if own is None else sorted_positions(gathered(own, 1, group), 1, group.size())


def whole_positions(ctx: DistContext, own: Tensor, dim: int = 1) -> Tensor:
    """Return the positions of all ranks along cp in their order. A collective, as its backward."""
    if ALL_POSITIONS.holds(ctx) or isinstance(own, PartTensor):
        return leave(own)
    group = group_of(ctx, "cp")
    assert group is not None
    return sorted_positions(gathered_summed(own.contiguous(), dim, group), dim, group.size())


def heads_attention(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, terms: Terms) -> Tensor:
    """Return the attention of this rank's queries to all keys, as `attend`. A collective, as its backward.

    Queries, keys and values are sent in one all-to-all, the output in another. The number of ranks must divide the
    number of heads.
    """
    size = group.size()
    # fewer key heads than ranks are repeated, until each rank has one
    times = size // math.gcd(k.shape[1], size)
    k = repeated(k, k.shape[1] * times)
    v = repeated(v, v.shape[1] * times)
    q, k, v = _heads_for_positions((q, k, v), group)
    everywhere = _of_all(terms.documents, group)
    pair = None if everywhere is None else (everywhere, everywhere)
    ignored = _of_all(terms.ignored, group)
    if terms.sinks is not None:
        terms = terms._replace(sinks=terms.sinks.chunk(size)[group.rank()])
    out = attend(q, k, v, terms, Seen(pair, ignored))
    return _positions_for_heads(out, group)


def _heads_for_positions(tensors: tuple[Tensor, ...], group: dist.ProcessGroup) -> list[Tensor]:
    """Give away heads of the own positions for all positions of some heads, in their order. A collective."""
    size = group.size()
    own = [torch.unflatten(each, 1, (size, -1)).movedim(1, 0) for each in tensors]
    shapes = [each.shape for each in own]
    received = exchanged(torch.cat([each.reshape(size, -1) for each in own], 1), [1] * size, [1] * size, group)
    columns = torch.split(received, [math.prod(shape[1:]) for shape in shapes], 1)
    by_rank = [column.view(shape).movedim(0, 2).flatten(2, 3) for column, shape in zip(columns, shapes, strict=True)]
    return [sorted_positions(each, 2, size) for each in by_rank]


def _positions_for_heads(out: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Give away other ranks' positions of the own heads for all heads of the own positions. A collective."""
    size = group.size()
    cut = out.chunk(2 * size, 2)
    stacked = torch.stack([cut[at] for at in rank_order(size)])
    received = exchanged(stacked.view(size, -1), [1] * size, [1] * size, group)
    by_rank = received.view(size, 2, *stacked.shape[1:])
    return by_rank.movedim((0, 1), (1, 3)).flatten(3, 4).flatten(1, 2)


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
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    score_mod: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Return scaled dot-product attention of this rank's positions to the positions of all ranks along the axis cp.

    The positions are those that `split_sequence` gives a rank. Without that axis it is torch's
    `scaled_dot_product_attention`. A collective of the ranks along cp, as its backward.

    Args:
        ctx: the context.
        q: queries of the own positions, shape [batch, heads, own, head dim].
        k, v: keys and values of the own positions, [batch, key heads, own, head dim]; the number of key heads divides
            the number of heads (GQA). With `causal=False` they may be of another sequence, cut as well
            (cross-attention). On one rank there may be more, as from a cache; the last query then sees all.
        causal: whether a position only sees itself and earlier ones.
        documents: numbers of the documents packed into the sequence, integers of shape [batch, own]; a position sees
            its own document alone. None for one document.
        scale: factor of the scores before the softmax; None for 1 / sqrt(head dim).
        method: "gather" collects the keys and values of all ranks, and uses every kernel that torch has; "ring" passes
            them round, so that a rank holds two ranks' at most, and computes meanwhile; "heads" gives each rank the
            whole sequence for some of the heads (Ulysses), and the number of heads must be a multiple of cp. None for
            the `context` in the plan of the prepared model, "gather" without one.
        window: a position sees those at a smaller distance than this, its own included; None for all.
        softcap: largest size of a score s, as softcap * tanh(s / softcap); None for none.
        sinks: a score of each head that takes weight and has no value, shape [heads]; None for none. Soft caps and
            sinks are computed without a fused kernel.
        key_padding_mask: True for keys to ignore, torch.bool of shape [batch, own], as in `nn.MultiheadAttention`;
            None for none.
        attn_mask: mask of the own queries and all keys in the order of the sequence, a shape that expands to
            [batch, heads, own, length], as in torch's attention: boolean, True where a query sees a key, or scores to
            add. Only with "gather"; None for none.
        score_mod, mask_mod: functions as in torch's `flex_attention`, of (score,) batch, head, query and key, applied
            together with `causal` and the rest. Queries and keys are places in the sequence, and all arguments are
            tensors that broadcast to [batch, heads, own, length]. A score_mod has no fused kernel. Only with
            "gather"; None for none.
        dropout_p: probability to drop a weight after the softmax, as in torch's attention; 0 for an evaluation. A rank
            draws for its queries, with "heads" for its heads, so that one process drops other weights. Not with "ring".

    Returns:
        Shape [batch, heads, own, head dim of v].

    Raises:
        ConfigError: shapes, dtypes or devices that do not fit together, an unknown method, heads that cp does not
            divide, or a mask that the method does not have.
        PeerError: another rank was lost.
        ContextClosedError: the context is closed.

    Examples:
        >>> q = k = v = torch.randn(1, 4, 6, 8)
        >>> accel.parallel.context_attention(ctx, q, k, v).shape
        torch.Size([1, 4, 6, 8])
    """
    of_all = {"causal": causal, "documents": documents, "scale": scale, "window": window}
    of_keys = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask, "mask_mod": mask_mod}
    of_scores = {"softcap": softcap, "sinks": sinks, "score_mod": score_mod, "dropout_p": dropout_p}
    given: dict[str, Any] = {**of_all, **of_keys, **of_scores}
    if torch.overrides.has_torch_function((q, k, v)):
        return torch.overrides.handle_torch_function(context_attention, (q, k, v), ctx, q, k, v, method=method, **given)
    q, k, v = map(as_autocast, (q, k, v))
    size = position_axis(ctx).size
    terms = _terms(q, k.shape[2] * size, **given)
    check_fit(q, k, v, size, causal=causal)
    check_terms(q, k, terms._replace(window=window), size)
    if method is not None:
        check_choice(method, get_args(ContextMethod), "unknown method of context parallelism", where="method=")
    if size == 1:
        pair = None if documents is None else (documents, documents)
        return attend(q, k, v, terms, Seen(pair, key_padding_mask, terms.mask))
    check_cut(ctx, q.shape[2])
    chosen = method or planned_method(ctx) or "gather"
    check_method(q, terms, chosen, size)
    function = near_attention if chosen == "ring" and terms.window is not None else _METHODS[chosen]
    return _across(ctx, function, q, k, v, terms)


def _terms(
    q: Tensor,
    length: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    **others: Any,
) -> Terms:
    """Return the terms of an attention to `length` keys, from arguments of `context_attention`."""
    factor = float(q.shape[-1] ** -0.5) if scale is None else scale
    near = None if window is None or window >= length else window
    mask = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.ndim)]
    return Terms(scale=factor, ignored=key_padding_mask, mask=mask, window=near, **others)


def attention_of_all(
    ranks: PositionRanks, q: Tensor, k: Tensor, v: Tensor, method: ContextMethod | None = None, **given: Any
) -> Tensor:
    """Return attention of this rank's queries to the keys of all ranks. `given`: arguments of `context_attention`."""
    ranks.compare(*q.shape)
    return ranks.met(context_attention(ranks.ctx, q, k, v, method=method, **given))


def _across(ctx: DistContext, function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Tensor:
    """Run a method."""
    note_attention(ctx)
    if is_dynamo_compiling():
        return function(q, k, v, group_of(ctx, "cp"), terms)
    if records(q):
        return q @ (k.sum() + v.sum()).expand(*q.shape[:2], q.shape[-1], v.shape[-1])
    try:
        with own_draws("cp", ctx.axis("cp").rank, q.device) if terms.dropout_p else nullcontext():
            return function(q, k, v, group_of(ctx, "cp"), terms)
    except RuntimeError as error:
        if (lost := peer_error(error, "context_attention")) is not None:
            raise lost from error
        raise
