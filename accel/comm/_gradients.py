# SPDX-License-Identifier: Apache-2.0
"""Collectives that gradients pass through: functions of a tensor and a group, the parts of parallel layers.

Each is linear, so its gradient is another one of them: the gradient of a sum over ranks is a copy to each of them, that
of an all-gather is a reduce-scatter. Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, calls the first two f and g.
None makes a checked message: ranks of a model run the same layers. Groups have more than one rank; a rank's part or
summand has one shape on all ranks; the group's size divides a dimension that is divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, overrides

from accel.comm._torch import ALL_GATHER, REDUCE_SCATTER

_dist = cast(Any, dist)
_overrides = cast(Any, overrides)
_gather_into = getattr(_dist, ALL_GATHER)
_scatter_into = getattr(_dist, REDUCE_SCATTER)


class Passage(NamedTuple):
    """A collective that gradients pass through."""

    kind: str  # name of its function below
    dim: int = 0  # the dimension that ranks divide
    to: tuple[int, ...] = ()  # number of rows for each rank, where they are exchanged
    back: tuple[int, ...] = ()  # number of rows from each rank, where they are exchanged


def group_named(name: str) -> dist.ProcessGroup:
    """Return this rank's group with a `group_name`, by which operators in a graph of torch.compile know it."""
    return _dist.distributed_c10d._resolve_process_group(name)


def _like_passed(x: Tensor, kind: str, dim: int, to: Sequence[int], back: Sequence[int], size: int) -> Tensor:
    """A tensor of the shape and strides that a collective gives, without communication."""
    if kind == "summed":
        return x.new_empty(x.shape)
    first = x.movedim(dim, 0).contiguous()
    parts = first.shape[0] // size if kind in ("own_part", "scattered") else first.shape[0] * size
    out = _room(first, sum(back) if kind == "exchanged" else parts, dim)
    return out.contiguous() if kind == "own_part" else out


def _room(first: Tensor, length: int, dim: int) -> Tensor:
    """Return an empty tensor with the dimensions of `first`, a contiguous tensor, the first one at `dim` and of this
    length. In memory it stays the first. It is no view, which code behind could not change in place."""
    shape, strides = [*first.shape[1:]], [*first.stride()[1:]]
    at = dim % first.dim()
    shape.insert(at, length)
    strides.insert(at, math.prod(first.shape[1:]))  # that of one row means nothing
    return first.new_empty_strided(shape, strides)


def _without_values(x: Tensor, by: Passage, size: int) -> Tensor:
    return _same(x) if by.kind == "copied" else _like_passed(x, by.kind, by.dim, by.to, by.back, size)


def mark_recording(mode: Any) -> None:
    """Let collectives on the fake tensors of a mode send nothing, as a recorded forward needs."""
    mode.accel_records = True


def records(x: Tensor) -> bool:
    """Whether a tensor is one of a recorded forward. Fake ranks, which count messages, have other fake tensors."""
    return getattr(getattr(x, "fake_mode", None), "accel_records", False)


def passed(x: Tensor, by: Passage, group: dist.ProcessGroup) -> Tensor:
    """Return the result of a collective on a tensor; gradients flow back. A collective, or its backward is one.

    A class of tensors with `takes_collectives` computes it by its `__torch_function__`.
    """
    if getattr(type(x), "takes_collectives", False) and _overrides.has_torch_function_unary(x):
        return _overrides.handle_torch_function(passed, (x,), x, by, group)
    if records(x):
        size = group.size()
        return _through(x, lambda own: _without_values(own, by, size), lambda grad: grad)
    forward, backward = _PASSAGES[by.kind]
    return _through(x, lambda own: forward(own, by, group), lambda grad: backward(grad, by, group))


def copied(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a tensor that is alike on all ranks, for each to use in its own way. The backward sums, a collective."""
    return passed(x, Passage("copied"), group)


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the ranks' summands, for layers alike on all ranks. A collective; the backward makes none."""
    return passed(x, Passage("summed"), group)


def gathered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the ranks' parts, for layers alike on all ranks. A collective; the backward keeps the own part."""
    return passed(x, Passage("gathered", dim), group)


def gathered_summed(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the ranks' parts, for each rank to use in its own way. A collective, as its backward."""
    return passed(x, Passage("gathered_summed", dim), group)


def scattered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of the sum of the ranks' summands. A collective, as its backward."""
    return passed(x, Passage("scattered", dim), group)


def own_part(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of a tensor that is alike on all ranks. The backward is a collective."""
    return passed(x, Passage("own_part", dim), group)


def exchanged(x: Tensor, to: Sequence[int], back: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send `to[i]` rows to rank i; return the `back[i]` rows of each, by rank. A collective, as its backward."""
    return passed(x, Passage("exchanged", 0, tuple(to), tuple(back)), group)


def own_gradient(x: Tensor) -> Tensor:
    """Return a tensor that gets a gradient in separate memory. No communication."""
    return _through(x, _same, torch.clone)


def start_shift(
    tensors: Sequence[Tensor],
    by: int,
    group: dist.ProcessGroup,
    *,
    arriving: Sequence[Sequence[int]] | None = None,
) -> Callable[[], list[Tensor]]:
    """Send tensors to the rank `by` later, cyclically; return a function that waits for the ones from `by` earlier.

    A collective of one message. Tensors have one dtype and stay unchanged until the wait; a contiguous one alone is
    sent without a copy. `arriving` are the shapes that come, None for the tensors' shapes. Nothing is sent where there
    is no element.
    """
    size = group.size()
    shapes = [each.shape for each in tensors] if arriving is None else [torch.Size(each) for each in arriving]
    rows = [each.reshape(-1) for each in tensors]
    flat = rows[0] if len(rows) == 1 and rows[0].is_contiguous() else torch.cat(rows)
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
    """Begin to reduce-scatter summands [size, ...]; return a function that waits for this rank's sum. A collective."""
    summands = x.contiguous()
    out = summands.new_empty(summands.shape[1:])
    work = _scatter_into(out, summands.flatten(0, 1), group=group, async_op=True)
    return lambda: _waited(work, out, summands)


class _Linear(torch.autograd.Function):
    """A linear function, with the function of its gradient. That of a gradient of the gradient is the first again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor], transposed: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.function, ctx.transposed = function, transposed
        return function(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return ctx.transposed(grad), None, None
        return _through(grad, ctx.transposed, ctx.function), None, None


def _waited(work: Any, out: Tensor, *_kept: Tensor) -> Tensor:
    """The output of a message after its end, up to which its inputs are kept."""
    work.wait()
    return out


def _through(x: Tensor, function: Callable[[Tensor], Tensor], transposed: Callable[[Tensor], Tensor]) -> Tensor:
    return cast(Any, _Linear).apply(x, function, transposed)


def _same(x: Tensor, *_: object) -> Tensor:
    return x.view_as(x)


def _reduced(x: Tensor, _by: Passage, group: dist.ProcessGroup) -> Tensor:
    # a copy: the tensor belongs to the caller, or to autograd
    total = x.clone(memory_format=torch.contiguous_format)
    _dist.all_reduce(total, group=group)
    return total


def _gathered(x: Tensor, by: Passage, group: dist.ProcessGroup) -> Tensor:
    first = x.movedim(by.dim, 0).contiguous()
    out = _room(first, group.size() * first.shape[0], by.dim)
    _gather_into(out.movedim(by.dim, 0), first, group=group)
    return out


def _scattered(x: Tensor, by: Passage, group: dist.ProcessGroup) -> Tensor:
    first = x.movedim(by.dim, 0).contiguous()
    out = _room(first, first.shape[0] // group.size(), by.dim)
    _scatter_into(out.movedim(by.dim, 0), first, group=group)
    return out


def _own(x: Tensor, by: Passage, group: dist.ProcessGroup) -> Tensor:
    # contiguous, as a view would keep the whole tensor in memory
    return x.chunk(group.size(), by.dim)[group.rank()].contiguous()


def _exchanged(x: Tensor, by: Passage, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty((sum(by.back), *x.shape[1:]))
    _dist.all_to_all_single(out, x.contiguous(), list(by.back), list(by.to), group=group)
    return out


_Function = Callable[[Tensor, Passage, dist.ProcessGroup], Tensor]
_PASSAGES: Mapping[str, tuple[_Function, _Function]] = {  # forward and backward
    "copied": (_same, _reduced),
    "summed": (_reduced, _same),
    "gathered": (_gathered, _own),
    "gathered_summed": (_gathered, _scattered),
    "scattered": (_scattered, _gathered),
    "own_part": (_own, _gathered),
    "exchanged": (_exchanged, lambda x, by, group: _exchanged(x, by._replace(to=by.back, back=by.to), group)),
}
