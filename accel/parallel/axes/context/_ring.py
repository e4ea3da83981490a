# SPDX-License-Identifier: Apache-2.0
"""Attention by a ring: keys and values are sent between ranks while blocks of them are computed (Liu et al. 2023, ring
attention)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.compiler import is_dynamo_compiling

from accel.comm import gathered, group_named, start_shift
from accel.parallel.axes.context._kernels import (
    KERNELS,
    Attended,
    Kernel,
    Masked,
    Terms,
    accumulation_dtype,
    all_of,
    hidden_score,
    kernel_of,
    near_mask,
    packed_masks,
    repeated,
)
from accel.parallel.axes.context._split import ring_block


class _Ring(NamedTuple):
    """Facts that all blocks of one attention share."""

    documents: Tensor | None  # numbers of the documents of all positions, by rank, [batch, length]; None without
    ignored: Tensor | None  # the same of the keys that no query sees, [batch, keys]; None without
    causal: bool
    scale: float
    softcap: float | None
    kernel: Kernel
    group: dist.ProcessGroup  # ranks that share the sequence

    def named(self) -> tuple[Tensor | None, Tensor | None, bool, float, float | None, str, str]:
        """Return the facts as arguments of an operator, which takes names of the kernel and the group."""
        return *self[:5], self.kernel.name, self.group.group_name


def _ring(documents: Tensor | None, ignored: Tensor | None, *facts: Any) -> _Ring:
    """Return the facts for what `named` returned on this rank."""
    causal, scale, softcap, kernel, group = facts
    return _Ring(documents, ignored, causal, scale, softcap, KERNELS[kernel], group_named(group))


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, terms: Terms) -> Tensor:
    """Return the attention of this rank's queries to all keys, as `attend`. A collective, as its backward.

    In addition to its keys and values, a rank holds the keys and values of two ranks at most; the next ones are sent
    while a block is computed. Attention has no window.
    """
    documents, ignored = (
        None if each is None else gathered(each, 1, group) for each in (terms.documents, terms.ignored)
    )
    mask = documents if ignored is None else ignored
    kernel = kernel_of(q, k, v, Masked(terms.causal and mask is None, mask, terms.softcap))
    ring = _Ring(documents, ignored, terms.causal, terms.scale, terms.softcap, kernel, group)
    return cast(Any, _RingAttention).apply(q, k, v, terms.sinks, ring)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: _Ring) -> Tensor:
        if is_dynamo_compiling():
            out, lse, *seeds = _forward_in_graph(q, k, v, sinks, *ring.named())
            attended = Attended(out.transpose(1, 2), lse, tuple(seeds))
        else:
            attended = _forward(q, k, v, sinks, ring)
        ctx.save_for_backward(q, k, v, attended.out, attended.lse, sinks, *attended.seeds)
        ctx.ring = ring
        return attended.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - decorated
        q, k, v, out, lse, sinks, *seeds = ctx.saved_tensors
        grad = grad_outputs[0]
        if is_dynamo_compiling():
            grad_q, flat = _backward_in_graph(grad, q, k, v, out, lse, seeds, *ctx.ring.named())
        else:
            grad_q, flat = _backward(grad, q, k, v, Attended(out, lse, tuple(seeds)), ctx.ring)
        grad_k, grad_v = _unflattened(flat, [k, v])
        grads = grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)
        return *grads, _sinks_gradient(grad, out, lse, sinks), None


# Of the operators in graphs: `_Ring.named`.
_FACTS = "Tensor? documents, Tensor? ignored, bool causal, float scale, float? softcap, str kernel, str group"
_operator = cast(Any, partial(torch.library.custom_op, mutates_args=()))


@_operator("accel::ring_attention", schema=f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {_FACTS}) -> Tensor[]")
def _forward_in_graph(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *facts: Any) -> list[Tensor]:
    """Return the output, [batch, queries, heads, head dim], the log-sum-exp and the seeds.

    A ring is one node of a graph: ranks, which have other blocks, have alike graphs, and messages keep their order.
    """
    out, lse, seeds = _forward(q, k, v, sinks, _ring(*facts))
    return [out.transpose(1, 2).contiguous(), lse, *seeds]


@_forward_in_graph.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, _sinks: object, *facts: Any) -> list[Tensor]:
    kernel = KERNELS[facts[-2]]
    k, v = (repeated(each, q.shape[1]) for each in (k, v))
    seeds = kernel.forward(q, k, v, Masked(causal=False), 1.0).seeds
    batch, heads, length = q.shape[:3]
    lse = q.new_empty(batch, heads, length, dtype=accumulation_dtype(q))
    return [q.new_empty(batch, length, heads, v.shape[-1]), lse, *seeds]


@_operator(
    "accel::ring_attention_backward",
    schema=f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor[] seeds, {_FACTS}) -> Tensor[]",
)
def _backward_in_graph(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> list[Tensor]:
    """Return the gradients of the queries, and of keys and values side by side."""
    out, lse, seeds, *facts = others
    grad_q, flat = _backward(grad, q, k, v, Attended(out, lse, tuple(seeds)), _ring(*facts))
    return [grad_q.contiguous(), flat]


@_backward_in_graph.register_fake
def _(_grad: object, q: Tensor, k: Tensor, v: Tensor, *_others: object) -> list[Tensor]:
    wide = accumulation_dtype(q)
    return [q.new_empty(q.shape, dtype=wide), k.new_empty(k.numel() + v.numel(), dtype=wide)]


def _forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: _Ring) -> Attended:
    """Return the attention to all keys."""
    wide = accumulation_dtype(q)
    total: Attended | None = None
    for source, held in _arrivals([k, v], ring.group):
        rows, columns, masked = _block(ring, source, q.shape[2], k.shape[2])
        queries = q[:, :, rows]
        keys, values = (repeated(each[:, :, columns], q.shape[1]) for each in held)
        block = ring.kernel.forward(queries, keys, values, masked, ring.scale)
        if total is None:  # the own keys: a block of all queries
            # copies, as others may keep what a kernel returns: checkpoint_activations(keep=)
            lse = block.lse.to(wide, copy=True, memory_format=torch.contiguous_format)
            total = Attended(block.out.to(wide, copy=True), lse, block.seeds)
        else:
            _merge_(total.out[:, :, rows], total.lse[:, :, rows], block)
    assert total is not None
    if sinks is not None:
        _add_sinks_(total, sinks)
    elif ring.ignored is not None:
        _clear_blind_rows_(total, hidden_score(q.dtype) / 2)
    return total._replace(out=total.out.to(q.dtype))


def _merge_(out: Tensor, lse: Tensor, block: Attended) -> None:
    """Add a block to the output and the log-sum-exp over the keys before it. Mutates both."""
    more = block.lse.to(lse.dtype)
    both = torch.logaddexp(lse, more)
    _ = out.mul_((lse - both).exp()[..., None]).add_(block.out.to(out.dtype) * (more - both).exp()[..., None])
    _ = lse.copy_(both)


def _clear_blind_rows_(total: Attended, least: float) -> None:
    """Give queries that see no key the output 0 and no gradient, as torch does. Mutates the tensors."""
    blind = total.lse < least
    _ = total.out.masked_fill_(blind[..., None], 0)
    _ = total.lse.masked_fill_(blind, torch.inf)


def _add_sinks_(total: Attended, sinks: Tensor) -> None:
    """Give sinks their weight, which has no value. Mutates the tensors."""
    both = torch.logaddexp(total.lse, sinks.to(total.lse.dtype).view(1, -1, 1))
    _ = total.out.mul_((total.lse - both).exp()[..., None])
    _ = total.lse.copy_(both)


def _sinks_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    if sinks is None:
        return None
    chances = (sinks.to(lse.dtype).view(1, -1, 1) - lse).exp()
    return -(chances * (grad * out).sum(-1, dtype=lse.dtype)).sum((0, 2)).to(sinks.dtype)


def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, ring: _Ring) -> tuple[Tensor, Tensor]:
    """Return the gradients of the queries, and of keys and values side by side."""
    if grad.stride(-1) != 1:  # such as an expanded one; the kernels take all other layouts
        grad = grad.contiguous()
    grad_q = torch.zeros_like(q, dtype=accumulation_dtype(q))
    sums: Tensor | None = None  # gradients of the keys that are here, which follow them one step behind
    arriving: Callable[[], list[Tensor]] | None = None
    for source, held in _arrivals([k, v], ring.group):
        rows, columns, masked = _block(ring, source, q.shape[2], k.shape[2])
        part = Attended(attended.out[:, :, rows], attended.lse[:, :, rows].contiguous(), attended.seeds)
        here = [each[:, :, columns] for each in held]
        own, *shares = _block_gradients(ring, grad[:, :, rows], q[:, :, rows], here, part, masked)
        grad_q[:, :, rows] += own
        if arriving is None:  # the own keys, all of them
            sums = _joined(shares)
        else:
            (sums,) = arriving()
            for total, share in zip(_unflattened(sums, held), shares, strict=True):
                total[:, :, columns] += share
        del own, shares
        arriving = start_shift([sums], 1, ring.group)
    assert arriving is not None
    return grad_q, arriving()[0]


def _block_gradients(
    ring: _Ring, grad: Tensor, q: Tensor, held: list[Tensor], part: Attended, masked: Masked
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block's share of the gradients of its queries, and of its keys and values before heads are repeated."""
    keys, values = (repeated(each, q.shape[1]) for each in held)
    grads = ring.kernel.backward(grad, q, keys, values, part, masked, ring.scale)
    key_heads = held[0].shape[1]
    return grads[0], _summed_heads(grads[1], key_heads), _summed_heads(grads[2], key_heads)


def _summed_heads(x: Tensor, heads: int) -> Tensor:
    """Return the sums over neighbouring heads that share one: the gradient of `repeated`."""
    if x.shape[1] == heads:
        return x.to(accumulation_dtype(x))
    return x.reshape(x.shape[0], heads, -1, *x.shape[2:]).sum(2, dtype=accumulation_dtype(x))


def _arrivals(own: list[Tensor], group: dist.ProcessGroup) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield ranks with their keys and values, the own ones first; those that arrive are sent on without a copy, while
    a block is computed. A collective."""
    rank = group.rank()
    size = group.size()
    held = own
    flat = _joined(own)
    for step in range(size - 1):
        arriving = start_shift([flat], 1, group)
        yield (rank - step) % size, held
        (flat,) = arriving()
        held = _unflattened(flat, own)
        del arriving  # it has what was sent
    yield (rank + 1) % size, held


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of tensors side by side, in one copy of each."""
    flat = tensors[0].new_empty(sum(each.numel() for each in tensors))
    for part, each in zip(_unflattened(flat, tensors), tensors, strict=True):
        _ = part.copy_(each)
    return flat


def _unflattened(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the shapes of other tensors on the elements that `_joined` put side by side."""
    parts = torch.split(flat, [each.numel() for each in like])
    return [part.view(each.shape) for part, each in zip(parts, like, strict=True)]


def _block(ring: _Ring, source: int, queries: int, keys: int) -> tuple[slice, slice, Masked]:
    """Return the block of this rank's queries and the keys of another: rows of both, and its mask."""
    rank = ring.group.rank()
    block = ring_block(rank, source, ring.group.size(), causal=ring.causal)
    rows = slice(*(at * queries // 2 for at in block.queries))
    columns = slice(*(at * keys // 2 for at in block.keys))
    documents, ignored = (
        None if each is None else each[:, source * keys :][:, columns] for each in (ring.documents, ring.ignored)
    )
    pair = None
    if ring.documents is not None and documents is not None:
        pair = ring.documents[:, rank * queries :][:, rows], documents
    masks = packed_masks(pair, ignored)
    if masks and block.causal:
        masks.append(near_mask(queries, keys, 0, None, causal=True, device=masks[0].device))
    return rows, columns, Masked(block.causal and not masks, all_of(masks), ring.softcap)
