# SPDX-License-Identifier: Apache-2.0
"""Attention by a ring: keys and values are sent between ranks while blocks of them are computed (Liu et al. 2023, ring
attention). Those that a window needs come straight from their ranks, in one message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from accel.comm import exchanged, gathered, start_shift
from accel.parallel.axes.context._kernels import (
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
from accel.parallel.axes.context._split import near_keys, places, ring_block, seen_keys, sorted_positions

_TILE = 256  # queries at least of a block under a window


class _Ring(NamedTuple):
    """Facts that all blocks of one attention share."""

    group: dist.ProcessGroup  # ranks that share the sequence
    terms: Terms  # of the attention
    # Numbers of the documents of all positions, by rank, [batch, length]; None without. Under a window they are in the
    # order of the sequence.
    documents: Tensor | None
    ignored: Tensor | None  # the same of the keys that no query sees, [batch, keys]; None without
    # Under a window, places of the keys that are here, as runs in their order; None if keys are sent.
    near: Sequence[range] | None
    device: torch.device  # of the tensors


class _Block(NamedTuple):
    """Rows of the own queries, rows of the keys that are here, and the block's mask."""

    rows: slice
    columns: slice
    masked: Masked


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, terms: Terms) -> Tensor:
    """Return the attention of this rank's queries to all keys, as `attend`. A collective, as its backward.

    In addition to its keys and values, a rank holds the keys and values of two ranks at most; the next ones are sent
    while a block is computed. With a window, it only holds the keys that its queries see, and one message brings them.
    """
    documents, ignored = (
        None if each is None else gathered(each, 1, group) for each in (terms.documents, terms.ignored)
    )
    near = None
    if terms.window is not None:
        k, v, near = _near(k, v, group, terms)
        documents, ignored = (
            None if each is None else sorted_positions(each, 1, group.size()) for each in (documents, ignored)
        )
    ring = _Ring(group, terms._replace(sinks=None), documents, ignored, near, q.device)
    return cast(Any, _RingAttention).apply(q, k, v, terms.sinks, ring)


def _near(k: Tensor, v: Tensor, group: dist.ProcessGroup, terms: Terms) -> tuple[Tensor, Tensor, list[range]]:
    """Return the keys and values that this rank's queries see, in the order of the sequence, and the runs of their
    places. A collective, as its backward."""
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
    return both[..., : k.shape[3]], both[..., k.shape[3] :], [arrived[at] for at in order]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: _Ring) -> Tensor:
        attended, kernel = _forward(q, k, v, sinks, ring)
        ctx.save_for_backward(q, k, v, attended.out, attended.lse, sinks, *attended.seeds)
        ctx.kernel = kernel
        ctx.ring = ring
        return attended.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - decorated
        q, k, v, out, lse, sinks, *seeds = ctx.saved_tensors
        grad = grad_outputs[0]
        if grad.stride(-1) != 1:  # such as an expanded one; the kernels take all other layouts
            grad = grad.contiguous()
        grads = _backward(grad, q, k, v, Attended(out, lse, tuple(seeds)), ctx.kernel, ctx.ring)
        return *grads, _sinks_gradient(grad, out, lse, sinks), None


def _forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: _Ring) -> tuple[Attended, Kernel]:
    """Return the attention to all keys, and the kernel that computed it."""
    wide = accumulation_dtype(q)
    kernel: Kernel | None = None
    total: Attended | None = None
    if ring.near is not None:
        nothing = q.new_full(q.shape[:3], -torch.inf, dtype=wide)
        total = Attended(q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wide), nothing)
    for source, held in _arrivals([k, v], ring):
        for rows, columns, masked in _blocks(ring, source, q.shape[2], k.shape[2]):
            queries = q[:, :, rows]
            keys = repeated(held[0][:, :, columns], q.shape[1])
            values = repeated(held[1][:, :, columns], q.shape[1])
            kernel = kernel or kernel_of(queries, keys, values, masked)
            block = kernel.forward(queries, keys, values, masked, ring.terms.scale)
            if total is None:  # the own keys: a block of all queries
                # copies, as others may keep what a kernel returns: checkpoint_activations(keep=)
                lse = block.lse.to(wide, copy=True, memory_format=torch.contiguous_format)
                total = Attended(block.out.to(wide, copy=True), lse, block.seeds)
            else:
                _merge_(total.out[:, :, rows], total.lse[:, :, rows], block)
    assert total is not None
    assert kernel is not None
    if sinks is not None:
        _add_sinks_(total, sinks)
    elif ring.ignored is not None:
        _clear_blind_rows_(total, hidden_score(q.dtype) / 2)
    return Attended(total.out.to(q.dtype), total.lse, total.seeds), kernel


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


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, kernel: Kernel, ring: _Ring
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    wide = accumulation_dtype(q)
    grad_q = torch.zeros_like(q, dtype=wide)
    home = _Passed(ring)
    for source, held in _arrivals([k, v], ring):
        home.begin(held)
        for rows, columns, masked in _blocks(ring, source, q.shape[2], k.shape[2]):
            part = Attended(attended.out[:, :, rows], attended.lse[:, :, rows].contiguous(), attended.seeds)
            here = [each[:, :, columns] for each in held]
            facts = part, masked, ring.terms.scale
            grads = _block_gradients(kernel, grad[:, :, rows], q[:, :, rows], here, *facts)
            grad_q[:, :, rows] += grads[0]
            home.add(columns, grads[1:])
            del grads
        home.send()
    grad_k, grad_v = home.received()
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
    if x.shape[1] == heads:
        return x.to(accumulation_dtype(x))
    return x.reshape(x.shape[0], heads, -1, *x.shape[2:]).sum(2, dtype=accumulation_dtype(x))


def _arrivals(own: list[Tensor], ring: _Ring) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield ranks with their keys and values, the own ones first; those that arrive are sent on without a copy, while
    a block is computed. Those of a window are here. A collective."""
    rank = ring.group.rank()
    if ring.near is not None:
        yield rank, own
        return
    size = ring.group.size()
    held = own
    flat = _joined(own)
    for step in range(size - 1):
        arriving = start_shift([flat], 1, ring.group)
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


class _Passed:
    """Gradients of a rank's keys that follow them, one step behind: each rank adds its share and sends them on.

    With a window, keys are not passed on, and a rank adds up the gradients of the keys that are here.
    """

    def __init__(self, ring: _Ring) -> None:
        self.group = ring.group
        self.travels = ring.near is None
        self.held: Sequence[Tensor] = ()
        self.sums: Tensor | None = None
        self.wait: Callable[[], list[Tensor]] | None = None

    def begin(self, held: Sequence[Tensor]) -> None:
        """Take shares of a rank's keys and values from now on."""
        self.held = held

    def add(self, columns: slice, shares: Sequence[Tensor]) -> None:
        """Add shares of rows of keys and values."""
        if self.wait is not None:
            (self.sums,) = self.wait()
            self.wait = None
        elif self.sums is None and self.travels:  # the own keys, all of them
            self.sums = _joined(shares)
            return
        elif self.sums is None:
            count = sum(each.numel() for each in self.held)
            self.sums = shares[0].new_zeros(count)
        for total, share in zip(_unflattened(self.sums, self.held), shares, strict=True):
            total[:, :, columns] += share

    def send(self) -> None:
        """Send the sums for the keys of a rank on."""
        if self.travels:
            assert self.sums is not None
            self.wait = start_shift([self.sums], 1, self.group)

    def received(self) -> list[Tensor]:
        """Return the gradients of the own keys and values."""
        sums = self.sums if self.wait is None else self.wait()[0]
        assert sums is not None
        return _unflattened(sums, self.held)


def _blocks(ring: _Ring, source: int, queries: int, keys: int) -> Iterator[_Block]:
    """Yield the blocks of this rank's queries and the keys of another that are here."""
    if ring.near is not None:
        yield from _near_blocks(ring, ring.near, queries)
        return
    rank = ring.group.rank()
    size = ring.group.size()
    block = ring_block(rank, source, size, causal=ring.terms.causal)
    rows = range(*(at * queries // 2 for at in block.queries))
    columns = range(*(at * keys // 2 for at in block.keys))
    masks = _packed(ring, _slice(rows, rank * queries), _slice(columns, source * keys))
    if masks and block.causal:
        masks.append(near_mask(queries, keys, 0, None, causal=True, device=masks[0].device))
    masked = Masked(block.causal and not masks, all_of(masks), ring.terms.softcap)
    yield _Block(_slice(rows), _slice(columns), masked)


def _near_blocks(ring: _Ring, near: Sequence[range], queries: int) -> Iterator[_Block]:
    """Yield blocks within the window, of tiles of queries about as long as it. All have a mask: one kernel fits."""
    window, causal = ring.terms.window, ring.terms.causal
    assert window is not None
    tile = max(window, _TILE)
    size = ring.group.size()
    for half, piece in enumerate(places(queries * size, ring.group.rank(), size)):
        for begin in range(0, len(piece), tile):
            rows = piece[begin : begin + tile]
            columns = seen_keys(rows, queries * size, window, causal=causal)
            before = sum(len(range(run.start, min(run.stop, columns.start))) for run in near)
            masks = _packed(ring, _slice(rows), _slice(columns))
            first = rows.start - columns.start
            masks.append(near_mask(len(rows), len(columns), first, window, causal=causal, device=ring.device))
            masked = Masked(causal=False, mask=all_of(masks), softcap=ring.terms.softcap)
            own = half * len(piece) - piece.start
            yield _Block(_slice(rows, own), _slice(columns, before - columns.start), masked)


def _slice(run: range, by: int = 0) -> slice:
    return slice(run.start + by, run.stop + by)


def _packed(ring: _Ring, rows: slice, columns: slice) -> list[Tensor]:
    """Return the masks of documents and of keys to ignore, for places of queries and of keys."""
    documents, ignored = ring.documents, ring.ignored
    pair = None if documents is None else (documents[:, rows], documents[:, columns])
    return packed_masks(pair, None if ignored is None else ignored[:, columns])
