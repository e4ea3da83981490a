# SPDX-License-Identifier: Apache-2.0
"""`reduce`: the tensors of all ranks, combined element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar, get_args

import torch

from accel import tree as trees
from accel.collectives._packing import Packing, plan_buckets, plan_packing, sections, split, to_bytes, write
from accel.collectives._tree_tensors import TreeTensors, make_call, read_tensors
from accel.comm import (
    HEADER_BYTES,
    Call,
    ReduceOp,
    all_reduce_flat,
    blank,
    check_tag,
    inline_bytes,
    reduced_bytes,
    shared_failure,
    start,
)
from accel.context import DistContext, context_first
from accel.errors import TreeError, check_choice

T = TypeVar("T")
Reduction = Literal["sum", "mean", "max", "min", "product"]

_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
           torch.float64, torch.complex64, torch.complex128)  # fmt: skip

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # while ranks' values are added
_PAIRWISE: dict[Reduction, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


@context_first
def reduce(ctx: DistContext, tree: T, op: Reduction = "sum", *, tag: str | None = None) -> T:
    """Reduce each tensor of a tree over all ranks. A collective.

    All ranks get the same bits. The rounding of floating-point sums depends on the size of the tree: small ones are
    added in rank order, among more than 64 ranks in pairs of neighbours, and large ones in the backend's order.

    Args:
        ctx: the context.
        tree: nested containers of None and of tensors, with the same shapes and dtypes on every rank.
        op: "sum", "mean", "max", "min" or "product"; a mean of integers is refused, and so are arithmetic on bool and
            anything but sum and mean of complex numbers.
        tag: name of the call, compared between ranks. It tells apart calls of one kind and shape, whose order could
            differ between ranks by mistake, as in a loop over keys.

    Returns:
        The same containers with new tensors of the same shape, dtype and device, which belong to no autograd graph.

    Raises:
        CollectiveMismatch: ranks differ in operation, `tag`, structure, dtype or shape; on every rank.
        ConfigError: an unknown operation, or a tag that is no text; on every rank.
        TreeError: an operation that a tensor's dtype cannot carry out, or a tensor that cannot be sent; by its path, on
            every rank.
    """
    with shared_failure(ctx.comm, Call("reduce")):
        check_tag(tag, "reduce")
        check_choice(op, get_args(Reduction), "unknown operation", where="reduce(op=)")
        leaves = read_tensors(ctx, tree)
        if any(_refusal(dtype, op) for dtype in set(leaves.dtypes)):
            _refuse(ctx, tree, op)
    if ctx.world_size == 1:
        ctx.comm.check_open()
        reduced = [leaf.detach().clone() for leaf in leaves.tensors]
    else:
        reduced = _reduce(ctx, leaves, make_call(ctx, "reduce", tree, leaves, f"op={op}", tag=tag), op)
    return trees.replace_tensors(tree, reduced, ctx.containers)


def _reduce(ctx: DistContext, leaves: TreeTensors, call: Call, op: Reduction) -> list[torch.Tensor]:
    """Reduce small tensors in the checked message, in rank order; the rest by all-reduce, one for each dtype."""
    counts = tuple([leaf.numel() for leaf in leaves.tensors])
    reduced: dict[int, torch.Tensor] = {}
    whole = plan_packing(leaves.dtypes, counts)
    if ctx.comm.is_large and leaves.on_cpu:
        wide = plan_packing(tuple([_WIDER.get(dtype, dtype) for dtype in leaves.dtypes]), counts)
        if wide.nbytes <= reduced_bytes(ctx.comm):
            reduced = _reduce_on_the_way(ctx, leaves, call, op, wide)
            return [reduced[i].view(shape) for i, shape in enumerate(leaves.shapes)]
    if whole.nbytes <= inline_bytes(ctx.comm) and leaves.on_cpu:
        message = blank(ctx.comm)
        write(whole, leaves.tensors, message, HEADER_BYTES)
        answers = start(ctx.comm, call, message, whole.nbytes)()
        for group in whole.groups:
            elements = answers.elements(group.dtype, group.start, sum(group.counts))
            reduced.update(split(group, _combine(elements, op), give=True))
    else:
        wait = start(ctx.comm, call)
        buckets = plan_buckets(leaves.dtypes, counts, leaves.device_types)
        packings = [plan_packing(leaves.dtypes, counts, chosen) for chosen in buckets]
        buffers = [to_bytes(packing, leaves.tensors) for packing in packings]  # while the first message travels
        _ = wait()
        for packing, buffer in zip(packings, buffers, strict=True):
            for group, elements in sections(packing, buffer):
                reduced.update(split(group, _all_reduce(ctx, elements, op), give=True))
    return [reduced[i].view(shape) if len(shape) != 1 else reduced[i] for i, shape in enumerate(leaves.shapes)]


def _reduce_on_the_way(
    ctx: DistContext, leaves: TreeTensors, call: Call, op: Reduction, packing: Packing
) -> dict[int, torch.Tensor]:
    """Reduce small tensors of a large group, in the checked message.

    Args:
        ctx, leaves, call, op: as of `_reduce`.
        packing: layout of the tensors, those of 16 bits as float32.
    """
    message = blank(ctx.comm)
    mine = [leaf.to(_WIDER.get(leaf.dtype, leaf.dtype)) for leaf in leaves.tensors]
    write(packing, mine, message, HEADER_BYTES)

    def combine(lower: torch.Tensor, upper: torch.Tensor) -> None:
        others = sections(packing, upper)
        for (_, elements), (_, more) in zip(sections(packing, lower), others, strict=True):
            _ = _PAIRWISE[op](elements, more, out=elements)

    answers = start(ctx.comm, call, message, packing.nbytes, combine=combine)()
    assert answers.reduced is not None  # in a large group
    reduced: dict[int, torch.Tensor] = {}
    for group, elements in sections(packing, answers.reduced):
        total = elements / ctx.world_size if op == "mean" else elements
        reduced.update(split(group, total))
    return {i: each.to(leaves.dtypes[i]) for i, each in reduced.items()}


def _all_reduce(ctx: DistContext, flat: torch.Tensor, op: Reduction) -> torch.Tensor:
    """Reduce a flat tensor over all ranks; it may be overwritten."""
    wire_op: ReduceOp = "sum" if op == "mean" else op
    wire = flat.view(torch.uint8) if flat.dtype == torch.bool else flat
    if op == "mean" and flat.dtype in (torch.float16, torch.bfloat16):
        wire = wire.div_(ctx.world_size)  # before the sum, which could be too large for them
    if flat.device.type == "cpu" != ctx.comm.control.type:
        wire = wire.to(ctx.comm.control)
    total = all_reduce_flat(ctx.comm, wire, wire_op).to(flat.device).view(flat.dtype)
    return total.div_(ctx.world_size) if op == "mean" and wire.dtype.itemsize > 2 else total


def _combine(ranks: torch.Tensor, op: Reduction) -> torch.Tensor:
    """Reduce along the first dimension."""
    if op == "sum":
        return ranks.sum(0, dtype=ranks.dtype)
    if op == "mean":
        return ranks.mean(0)
    if op == "product":
        return ranks.prod(0, dtype=ranks.dtype)
    return ranks.amax(0) if op == "max" else ranks.amin(0)


def _refuse(ctx: DistContext, tree: object, op: Reduction) -> None:
    for path, leaf in trees.tensors(tree, ctx.containers):
        if problem := _refusal(leaf.dtype, op):
            raise TreeError(problem, got=f"{op} of {leaf.dtype}", where=path, fix="Convert the tensor first.")


def _refusal(dtype: torch.dtype, op: Reduction) -> str:
    """Return the reason why a dtype cannot be reduced by an operation; "" if it can."""
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        return "a mean of integers is not an integer"
    if dtype == torch.bool and op in ("sum", "product"):
        return "bool cannot be added or multiplied"
    if dtype.is_complex and op in ("max", "min"):
        return "complex numbers have no order"
    if dtype.is_complex and op == "product":
        return "backends cannot multiply complex numbers"
    return "" if dtype in _DTYPES else "backends cannot combine this dtype"
