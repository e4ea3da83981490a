# SPDX-License-Identifier: Apache-2.0
"""Attention by a ring: keys and values travel between ranks while blocks of them are computed (Liu et al. 2023, ring
attention), and those that a window needs come straight from their ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from accel.comm import gathered, start_shift
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
from accel.parallel.axes.context._split import near_keys, near_steps, near_tiles, pieces, ring_block

_TILE = 256  # queries at least of a block under a window


class _Ring(NamedTuple):
    """Facts that all blocks of one attention share.

    Attributes:
        group: ranks that share the sequence.
        terms: of the attention.
        documents: numbers of the documents of each rank's positions, [ranks, batch, own]; None without.
        ignored: keys of each rank that no query sees, [ranks, batch, own keys]; None without.
        device: of the tensors.
    """

    group: dist.ProcessGroup
    terms: Terms
    documents: Tensor | None
    ignored: Tensor | None
    device: torch.device


class _Block(NamedTuple):
    """Rows of the own queries, rows of the keys that are here, and the block's mask."""

    rows: slice
    columns: slice
    masked: Masked


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, terms: Terms) -> Tensor:
    """Return the attention of this rank's queries to all keys, as `attend`. A collective, as its backward.

    Beside its own keys and values a rank holds those of two ranks at most; the next ones travel while a block is
    computed. Under a window a rank receives the keys alone that its queries see.
    """
    everywhere = [
        None if each is None else torch.stack(gathered(each, 1, group).chunk(group.size(), 1))
        for each in (terms.documents, terms.ignored)
    ]
    ring = _Ring(group, terms._replace(sinks=None), everywhere[0], everywhere[1], q.device)
    return cast(Any, _RingAttention).apply(q, k, v, terms.sinks, ring)


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
        if grad.stride(-1) != 1:  # as of an expanded one; the kernels take all other layouts
            grad = grad.contiguous()
        grads = _backward(grad, q, k, v, Attended(out, lse, tuple(seeds)), ctx.kernel, ctx.ring)
        return *grads, _sinks_gradient(grad, out, lse, sinks), None


def _forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: _Ring) -> tuple[Attended, Kernel]:
    """Return the attention to all keys, and the kernel that computed it."""
    wide = accumulation_dtype(q)
    kernel: Kernel | None = None
    total: Attended | None = None
    if ring.terms.window is not None:
        nothing = q.new_full(q.shape[:3], -torch.inf, dtype=wide)
        total = Attended(q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wide), nothing)
    for source, held in _arrivals([k, v], q.shape[2], ring):
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
    home = _Passed(ring) if ring.terms.window is None else _Straight(ring, k.shape[2] // 2)
    for source, held in _arrivals([k, v], q.shape[2], ring):
        home.begin(held)
        for rows, columns, masked in _blocks(ring, source, q.shape[2], k.shape[2]):
            part = Attended(attended.out[:, :, rows], attended.lse[:, :, rows].contiguous(), attended.seeds)
            here = [each[:, :, columns] for each in held]
            facts = part, masked, ring.terms.scale
            grads = _block_gradients(kernel, grad[:, :, rows], q[:, :, rows], here, *facts)
            grad_q[:, :, rows] += grads[0]
            home.add(columns, grads[1:])
            del grads
        home.send(source)
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


def _arrivals(own: list[Tensor], queries: int, ring: _Ring) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield ranks with their keys and values, the own ones first; the next ones travel meanwhile. A collective."""
    rank = ring.group.rank()
    size = ring.group.size()
    window = ring.terms.window
    if window is None:
        yield from _all_around(own, ring.group)
        return
    wait: Callable[[], list[Tensor]] = lambda: own  # noqa: E731 - nothing to wait for
    steps = [0, *near_steps(size, queries // 2, window)]
    for at, step in enumerate(steps):
        held = wait()
        if at + 1 < len(steps):
            wait = _start_near(own, steps[at + 1], ring)
        yield (rank - step) % size, held


def _all_around(own: list[Tensor], group: dist.ProcessGroup) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield the keys and values of all ranks; those that arrive are sent on without a copy."""
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


def _near_keys(ring: _Ring, to: int, source: int, length: int) -> tuple[range, range]:
    assert ring.terms.window is not None
    return near_keys(to, source, ring.group.size(), length, ring.terms.window, causal=ring.terms.causal)


def _start_near(own: list[Tensor], step: int, ring: _Ring) -> Callable[[], list[Tensor]]:
    """Send the keys and values that the rank `step` later sees; return a function that waits for those that come."""
    rank = ring.group.rank()
    size = ring.group.size()
    length = own[0].shape[2] // 2
    sent = _near_keys(ring, (rank + step) % size, rank, length)
    coming = sum(map(len, _near_keys(ring, rank, (rank - step) % size, length)))
    shapes = [(*each.shape[:2], coming, each.shape[3]) for each in own]
    return start_shift([_taken(each, sent) for each in own], step, ring.group, arriving=shapes)


def _taken(x: Tensor, runs: tuple[range, range]) -> Tensor:
    """Return rows of each half of positions."""
    half = x.shape[2] // 2
    return torch.cat([x[:, :, at * half + run.start : at * half + run.stop] for at, run in enumerate(runs)], 2)


class _Passed:
    """Gradients of a rank's keys that follow them, one step behind: each rank adds its share and sends them on.

    A rank's keys are one block.
    """

    def __init__(self, ring: _Ring) -> None:
        self.group = ring.group
        self.held: Sequence[Tensor] = ()
        self.sums = torch.empty(0)
        self.wait: Callable[[], list[Tensor]] | None = None

    def begin(self, held: Sequence[Tensor]) -> None:
        """Take shares of a rank's keys and values from now on."""
        self.held = held

    def add(self, columns: slice, shares: Sequence[Tensor]) -> None:
        """Add shares of rows of keys and values."""
        if self.wait is None:  # the own keys, all of them
            self.sums = _joined(shares)
            return
        (self.sums,) = self.wait()
        for total, share in zip(_unflattened(self.sums, self.held), shares, strict=True):
            total[:, :, columns] += share

    def send(self, source: int) -> None:
        """Send the sums for the keys of a rank on."""
        _ = source
        self.wait = start_shift([self.sums], 1, self.group)

    def received(self) -> list[Tensor]:
        """Return the gradients of the own keys and values."""
        assert self.wait is not None
        return _unflattened(self.wait()[0], self.held)


class _Straight:
    """Gradients of the keys that a rank received, which return to their rank at once."""

    def __init__(self, ring: _Ring, length: int) -> None:
        self.ring = ring
        self.length = length
        self.shares: list[Tensor] = []
        self.sums: list[Tensor] = []
        self.wait: Callable[[], None] = lambda: None

    def begin(self, held: Sequence[Tensor]) -> None:
        """Take shares of a rank's keys and values from now on."""
        self.shares = [torch.zeros_like(each, dtype=accumulation_dtype(each)) for each in held]

    def add(self, columns: slice, shares: Sequence[Tensor]) -> None:
        """Add shares of rows of keys and values."""
        for total, share in zip(self.shares, shares, strict=True):
            total[:, :, columns] += share

    def send(self, source: int) -> None:
        """Send the sums for the keys of a rank to it."""
        shares = self.shares
        rank = self.ring.group.rank()
        size = self.ring.group.size()
        if source == rank:
            self.sums = shares
            return
        step = (rank - source) % size
        runs = _near_keys(self.ring, (rank + step) % size, rank, self.length)
        shapes = [(*each.shape[:2], sum(map(len, runs)), each.shape[3]) for each in shares]
        self.wait()
        arrived = start_shift(shares, -step, self.ring.group, arriving=shapes)
        self.wait = lambda: self._add(arrived(), runs)

    def received(self) -> list[Tensor]:
        """Return the gradients of the own keys and values."""
        self.wait()
        return self.sums

    def _add(self, parts: list[Tensor], runs: tuple[range, range]) -> None:
        """Add shares of the rows of each half that another rank's queries saw."""
        for total, part in zip(self.sums, parts, strict=True):
            begin = 0
            for half, run in enumerate(runs):
                first = half * self.length + run.start
                total[:, :, first : first + len(run)] += part[:, :, begin : begin + len(run)]
                begin += len(run)


def _blocks(ring: _Ring, source: int, queries: int, keys: int) -> Iterator[_Block]:
    """Yield the blocks of this rank's queries and a rank's keys that arrived."""
    if ring.terms.window is not None:
        yield from _near_blocks(ring, source, queries // 2, ring.terms.window)
        return
    block = ring_block(ring.group.rank(), source, ring.group.size(), causal=ring.terms.causal)
    rows = slice(*(at * queries // 2 for at in block.queries))
    columns = slice(*(at * keys // 2 for at in block.keys))
    masks = _packed(ring, source, rows, columns)
    if masks and block.causal:
        masks.append(near_mask(queries, keys, 0, None, causal=True, device=masks[0].device))
    yield _Block(rows, columns, Masked(block.causal and not masks, all_of(masks), ring.terms.softcap))


def _near_blocks(ring: _Ring, source: int, length: int, window: int) -> Iterator[_Block]:
    """Yield blocks within the window, of tiles of queries about as long as it; `length` is that of a piece.

    All have a mask, so that one kernel fits.
    """
    rank = ring.group.rank()
    size = ring.group.size()
    held = (range(length), range(length)) if source == rank else _near_keys(ring, rank, source, length)
    shifts = -held[0].start, len(held[0]) - held[1].start
    for (half, own), (of_keys, piece) in product(enumerate(pieces(rank, size)), enumerate(pieces(source, size))):
        ahead = own - piece
        tiles = near_tiles(ahead, length, window, max(window, _TILE), causal=ring.terms.causal)
        for rows, columns in tiles:
            own_rows = _slice(rows, half * length)
            masks = _packed(ring, source, own_rows, _slice(columns, of_keys * length))
            first = ahead * length + rows.start - columns.start
            facts: Any = {"causal": ring.terms.causal, "device": ring.device}
            masks.append(near_mask(len(rows), len(columns), first, window, **facts))
            masked = Masked(causal=False, mask=all_of(masks), softcap=ring.terms.softcap)
            yield _Block(own_rows, _slice(columns, shifts[of_keys]), masked)


def _slice(run: range, by: int) -> slice:
    return slice(run.start + by, run.stop + by)


def _packed(ring: _Ring, source: int, rows: slice, columns: slice) -> list[Tensor]:
    """Return the masks of documents and of keys to ignore, for own rows and a rank's columns."""
    rank = ring.group.rank()
    documents = ring.documents
    pair = None if documents is None else (documents[rank, :, rows], documents[source, :, columns])
    return packed_masks(pair, None if ring.ignored is None else ring.ignored[source, :, columns])
