# SPDX-License-Identifier: Apache-2.0
"""`reduce`: the tensors of all ranks, combined element by element."""

from __future__ import annotations

from typing import Literal, TypeVar, get_args

import torch

from accel import tree as trees
from accel.collectives._pack import describe, pack, tensor_leaves, unpack
from accel.comm import INLINE_BYTES, Call, all_reduce_flat, call_site, exchange, fail
from accel.context import DistContext
from accel.errors import ConfigError, TreeError, check_choice

T = TypeVar("T")
Reduction = Literal["sum", "mean", "max", "min", "product"]

_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
           torch.float64, torch.complex64, torch.complex128)  # fmt: skip


def reduce(ctx: DistContext, tree: T, op: Reduction = "sum") -> T:
    """Return the tree with each tensor replaced by its combination over all ranks. A collective.

    Args:
        ctx: the context.
        tree: nested containers; each tensor has the same shape and dtype on every rank; and None.
        op: "sum", "mean", "max", "min" or "product"; a mean of integers is refused, and so are arithmetic on bool and
            anything but sum and mean of complex numbers.

    Returns:
        The same containers with new tensors of the same shape, dtype and device.

    Raises:
        CollectiveMismatch: ranks differ in operation, structure, dtype or shape; on every rank.
        ConfigError: an unknown operation.
        TreeError: an operation that a tensor's dtype cannot carry out, or a tensor that cannot be sent; by its path, on
            every rank.
    """
    try:
        check_choice(op, get_args(Reduction), "unknown operation", where="reduce(op=)")
        found = tensor_leaves(tree, ctx.device)
        for path, leaf in found:
            _check_dtype(path, leaf, op)
    except (ConfigError, TreeError) as error:
        fail(ctx.comm, Call("reduce", site=call_site()), error)
    leaves = [leaf.detach() for _, leaf in found]
    if ctx.world_size == 1:
        ctx.comm.check_open()
        return trees.replace_tensors(tree, [leaf.clone() for leaf in leaves])
    detail = [f"{path}: {describe(leaf, ragged=False)}" for path, leaf in found]
    call = Call("reduce", "\n".join([op, *detail, trees.structure(tree)]), call_site())
    return trees.replace_tensors(tree, _reduce(ctx, call, leaves, op))


def _reduce(ctx: DistContext, call: Call, leaves: list[torch.Tensor], op: Reduction) -> list[torch.Tensor]:
    """Combine what is small in the checked message, in rank order; what is large by all-reduce, one per dtype."""
    size = sum(leaf.nbytes + 16 for leaf in leaves)
    small = size <= INLINE_BYTES and all(leaf.device.type == "cpu" for leaf in leaves)
    payload = pack(leaves, torch.device("cpu")) if small else torch.empty(0, dtype=torch.uint8)
    messages = exchange(ctx.comm, call, payload)
    if small:
        dtypes, shapes = [leaf.dtype for leaf in leaves], [leaf.shape for leaf in leaves]
        ranks = [unpack(message, dtypes, shapes) for message in messages]
        return [_combine(torch.stack(parts), op) for parts in zip(*ranks, strict=True)]
    result: list[torch.Tensor | None] = [None] * len(leaves)
    kinds = {(leaf.dtype, leaf.device) for leaf in leaves}
    for dtype, device in sorted(kinds, key=str):
        chosen = [i for i, leaf in enumerate(leaves) if (leaf.dtype, leaf.device) == (dtype, device)]
        flat = torch.cat([leaves[i].reshape(-1) for i in chosen])
        wire = flat.to(torch.uint8) if dtype == torch.bool else flat
        wire = wire.to(ctx.comm.control) if device.type == "cpu" else wire
        total = all_reduce_flat(ctx.comm, wire, "sum" if op == "mean" else op).to(device, dtype)
        total = total.div_(ctx.world_size) if op == "mean" else total
        at = 0
        for i in chosen:
            result[i] = total[at : at + leaves[i].numel()].view(leaves[i].shape)
            at += leaves[i].numel()
    return [leaf for leaf in result if leaf is not None]


def _combine(stacked: torch.Tensor, op: Reduction) -> torch.Tensor:
    if op == "sum":
        return stacked.sum(0, dtype=stacked.dtype)
    if op == "mean":
        return stacked.mean(0)
    if op == "product":
        return stacked.prod(0, dtype=stacked.dtype)
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def _check_dtype(path: str, leaf: torch.Tensor, op: Reduction) -> None:
    integer = not (leaf.is_floating_point() or leaf.is_complex())
    refused = {
        "a mean of integers is not an integer": op == "mean" and integer,
        "bool cannot be added or multiplied": leaf.dtype == torch.bool and op in ("sum", "product"),
        "complex numbers have no order": leaf.is_complex() and op in ("max", "min"),
        "backends cannot multiply complex numbers": leaf.is_complex() and op == "product",
        "backends cannot combine this dtype": leaf.dtype not in _DTYPES,
    }
    for problem, holds in refused.items():
        if holds:
            raise TreeError(problem, got=f"{op} of {leaf.dtype}", where=path, fix="Convert the tensor first.")
