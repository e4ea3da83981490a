# SPDX-License-Identifier: Apache-2.0
"""Context parallelism by a ring: keys and values go round, and each rank computes a block of attention at a time.

Liu et al. 2023, "Ring Attention with Blockwise Transformers", arXiv:2310.01889.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from accel.comm import gathered, start_shift
from accel.parallel.context._kernels import Attended, Kernel, Masked, accumulation_dtype, kernel_of
from accel.parallel.context._sdpa import document_mask, repeated
from accel.parallel.context._zigzag import Halves, ring_block


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


class _Step(NamedTuple):
    """One block: rows of the own queries, rows of the keys that are here, and its mask."""

    rows: slice
    columns: slice
    masked: Masked


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, *, causal: bool, scale: float, documents: Tensor | None
) -> Tensor:
    """Return the attention of this rank's queries to all keys. A collective, as its backward.

    No rank ever holds more than two ranks' keys and values. The next ones travel while a block is computed; the
    backward passes them round again, with their gradients.

    Args:
        q, k, v, causal, scale: as of `attend`, of this rank's positions.
        group: ranks that share the sequence.
        documents: numbers of the documents of this rank's positions, [batch, own]; None without.
    """
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
    """Return the gradients of queries, keys and values.

    The gradients of a rank's keys follow them, one step behind: each rank adds its share and sends them on.
    """
    size = ring.group.size()
    grad = grad.contiguous()
    grad_q = torch.zeros_like(q, dtype=accumulation_dtype(q))
    held = [k, v]
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


def _step(ring: _Ring, source: int, own: int) -> _Step:
    """Return the block of this rank's queries and a rank's keys, in rows of this length."""
    rank = ring.group.rank()
    block = ring_block(rank, source, ring.group.size(), causal=ring.causal)
    rows = _rows(block.queries, own)
    columns = _rows(block.keys, own)
    masked = Masked(block.causal)
    if ring.documents is not None:
        documents = ring.documents[rank, :, rows], ring.documents[source, :, columns]
        masked = Masked(causal=False, mask=document_mask(*documents, causal=block.causal))
    return _Step(rows, columns, masked)


def _rows(halves: Halves, own: int) -> slice:
    return slice(halves[0] * own // 2, halves[1] * own // 2)
