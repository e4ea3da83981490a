# SPDX-License-Identifier: Apache-2.0
"""Collectives that gradients pass through: functions of a tensor and a group, the parts of parallel layers.

Each is linear, so its gradient is another one of them: the gradient of a sum over ranks is a copy to each of them, that
of an all-gather is a reduce-scatter. Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, calls the first two f and g.
None makes a checked message: ranks of a model run the same layers. Groups have more than one rank; a rank's part or
summand has one shape on all ranks; the group's size divides a dimension that is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

_dist = cast(Any, dist)
# torch 2.13 renamed both and warns about the old names
_gather_into = getattr(dist, "all_gather_single", None) or _dist.all_gather_into_tensor
_scatter_into = getattr(dist, "reduce_scatter_single", None) or _dist.reduce_scatter_tensor


def copied(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a tensor that is alike on all ranks, for each to use in its own way. The backward sums, a collective."""
    return _through(x, _same, lambda grad: _reduced(grad, group))


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the ranks' summands, for layers alike on all ranks. A collective; the backward makes none."""
    return _through(x, lambda own: _reduced(own, group), _same)


def gathered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the ranks' parts, for layers that are alike on all ranks. A collective; the backward keeps the
    gradient of the own part, without one."""
    return _through(x, lambda own: _gathered(own, dim, group), lambda grad: _own(grad, dim, group))


def gathered_summed(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the ranks' parts, for each rank to use in its own way. A collective, as its backward."""
    return _through(x, lambda own: _gathered(own, dim, group), lambda grad: _scattered(grad, dim, group))


def scattered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of the sum of the ranks' summands. A collective, as its backward."""
    return _through(x, lambda own: _scattered(own, dim, group), lambda grad: _gathered(grad, dim, group))


def own_part(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of a tensor that is alike on all ranks. The backward is a collective."""
    return _through(x, lambda whole: _own(whole, dim, group), lambda grad: _gathered(grad, dim, group))


def exchanged(x: Tensor, to: Sequence[int], back: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send `to[i]` rows of a tensor to rank i; return the `back[i]` rows of each, by rank. A collective, as its
    backward."""
    return _through(x, lambda rows: _exchanged(rows, to, back, group), lambda grad: _exchanged(grad, back, to, group))


def start_shift(
    tensors: Sequence[Tensor],
    by: int,
    group: dist.ProcessGroup,
    *,
    arriving: Sequence[Sequence[int]] | None = None,
) -> Callable[[], list[Tensor]]:
    """Send tensors to the rank `by` later, cyclically; return a function that waits for those of the rank `by` earlier.

    A collective of one message. Tensors have one dtype and stay unchanged until the wait. `arriving` are the shapes
    that come, None for those of the tensors. Where there is no element to send or to receive, no message travels.
    """
    size = group.size()
    shapes = [each.shape for each in tensors] if arriving is None else [torch.Size(each) for each in arriving]
    flat = torch.cat([each.reshape(-1) for each in tensors])
    received = flat.new_empty(sum(each.numel() for each in shapes))
    operations: list[dist.P2POp] = []
    if flat.numel():
        to = (group.rank() + by) % size
        operations.append(dist.P2POp(dist.isend, flat, group=group, group_peer=to))
    if received.numel():
        source = (group.rank() - by) % size
        operations.append(dist.P2POp(dist.irecv, received, group=group, group_peer=source))
    # both at once: a ring in which all ranks send first would never end on NCCL
    works = dist.batch_isend_irecv(operations) if operations else []

    def wait() -> list[Tensor]:
        for work in works:
            _ = work.wait()
        parts = torch.split(received, [each.numel() for each in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    return wait


def start_sum(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begin to sum a contiguous tensor over ranks, in place; return a function that waits for the sum. A collective."""
    work = _dist.all_reduce(x, group=group, async_op=True)
    return lambda: _waited(work, x)


def start_gather(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begin to gather tensors of one shape; return a function that waits for them, [size, *x.shape]. A collective."""
    mine = x.contiguous()
    out = mine.new_empty((group.size(), *mine.shape))
    work = _gather_into(out.flatten(0, 1), mine, group=group, async_op=True)
    return lambda: _waited(work, out, mine)


def start_scatter(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begin to sum summands [size, ...] for each rank; return a function that waits for this rank's sum. A
    collective."""
    summands = x.contiguous()
    out = summands.new_empty(summands.shape[1:])
    work = _scatter_into(out, summands.flatten(0, 1), group=group, async_op=True)
    return lambda: _waited(work, out, summands)


class _Linear(torch.autograd.Function):
    """A linear function, with the function of its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor], transposed: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.transposed = transposed
        return function(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - decorated
        return ctx.transposed(*grad_outputs), None, None


def _waited(work: Any, out: Tensor, *_kept: Tensor) -> Tensor:
    """The output of a message after its end, up to which its inputs are kept."""
    work.wait()
    return out


def _through(x: Tensor, function: Callable[[Tensor], Tensor], transposed: Callable[[Tensor], Tensor]) -> Tensor:
    return cast(Any, _Linear).apply(x, function, transposed)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _reduced(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # a copy: the tensor belongs to the caller, or to autograd
    total = x.clone(memory_format=torch.contiguous_format)
    _dist.all_reduce(total, group=group)
    return total


def _gathered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    first = x.movedim(dim, 0).contiguous()
    out = first.new_empty((group.size() * first.shape[0], *first.shape[1:]))
    _gather_into(out, first, group=group)
    return out.movedim(0, dim)


def _scattered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    first = x.movedim(dim, 0).contiguous()
    out = first.new_empty((first.shape[0] // group.size(), *first.shape[1:]))
    _scatter_into(out, first, group=group)
    return out.movedim(0, dim)


def _own(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    # contiguous, as a view would keep the whole tensor in memory
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


def _exchanged(x: Tensor, to: Sequence[int], back: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty((sum(back), *x.shape[1:]))
    _dist.all_to_all_single(out, x.contiguous(), list(back), list(to), group=group)
    return out
