# SPDX-License-Identifier: Apache-2.0
"""Collectives on flat, contiguous tensors, always on an explicit group of more than one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from accel.comm._group import Comm
from accel.comm._rounds import start_gather, start_receive, start_reduction, start_send, start_transfer

ReduceOp = Literal["sum", "max", "min", "product"]

# gloo's all-gather copies everything twice, through separate memory. A broadcast from each rank copies nothing and
# allows different lengths, but starts more slowly, which costs more below this size.
_BROADCAST_BYTES = 128 * 1024

# On the CPU all-gather goes round a ring, step by step. All-to-all sends to every rank at once, but needs a copy for
# each, which is faster up to this many bytes received.
_AT_ONCE_BYTES = 128 * 1024

# Dtypes of XLA's all-reduce on TPUs, https://github.com/pytorch/xla/issues/1952 and 2609
_XLA_REDUCES = (torch.float32, torch.bfloat16, torch.float16)

# Rounds of messages between pairs take fewer steps than a ring among many ranks. A gather's rounds send as many bytes,
# but do not overlap; a reduction's rounds send log2(W) times as many.
_IN_ROUNDS_BYTES = 1024 * 1024
_REDUCED_IN_ROUNDS_BYTES = 64 * 1024

PAIRWISE: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}

# torch 2.13 renamed both functions and warns about the old names
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def all_gather_flat(comm: Comm, mine: torch.Tensor) -> torch.Tensor:
    """Gather 1-d tensors of equal length into one of shape [size, length]. A collective."""
    out = mine.new_empty(comm.size * mine.numel())
    start_all_gather(comm, out, mine)()
    return out.view(comm.size, -1)


def start_all_gather(comm: Comm, out: torch.Tensor, mine: torch.Tensor) -> Callable[[], None]:
    """Begin to gather 1-d tensors of equal length into `out`; return a function that waits. A collective.

    `mine` stays unchanged until the wait.
    """
    group = comm.carrier(mine)
    if comm.is_large and mine.device.type == "cpu" and out.nbytes <= _IN_ROUNDS_BYTES:
        return start_gather(comm, out, mine)
    if mine.device.type == "cpu" and out.nbytes <= _AT_ONCE_BYTES:
        copies = torch.cat([mine] * comm.size)
        return start_transfer(
            comm, lambda: [cast(Any, dist).all_to_all_single(out, copies, group=group, async_op=True)]
        )
    return start_transfer(comm, lambda: [getattr(dist, ALL_GATHER)(out, mine, group=group, async_op=True)])


def gather_bytes(comm: Comm, mine: torch.Tensor, sizes: Sequence[int], dst: int | None = None) -> torch.Tensor | None:
    """Gather the bytes of all ranks, one after another; None on ranks other than `dst`. A collective.

    Large payloads are not copied. `sizes` is the same list on all ranks.
    """
    if _goes_by_control(comm, mine):
        gathered = gather_bytes(comm, mine.to(comm.control), sizes, dst)
        return gathered.to(mine.device) if gathered is not None else None
    if dst is not None:
        return _gather_to(comm, mine, sizes, dst)
    out = mine.new_empty(sum(sizes))
    if not out.numel():
        return out
    few = max(sizes) < _BROADCAST_BYTES
    if len(set(sizes)) == 1 and (few or mine.device.type != "cpu"):
        start_all_gather(comm, out, mine)()
        return out
    filled = [rank for rank, size in enumerate(sizes) if size]
    if few and len(filled) > 2:
        # one all-gather of equal rows starts faster than a broadcast from each rank
        padded = mine.new_zeros(max(sizes))
        padded[: mine.numel()] = mine
        rows = all_gather_flat(comm, padded)
        torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)], out=out)
    else:
        parts = torch.split(out, list(sizes))
        _ = parts[comm.rank].copy_(mine)
        # views of `out`: each broadcast writes to its final place
        start_transfer(comm, lambda: [_broadcast(comm, parts[rank], rank) for rank in filled])()
    return out


def all_reduce_flat(comm: Comm, mine: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Reduce a tensor of one shape and dtype over all ranks in place and return it. A collective."""
    if mine.device.type == "xla" and mine.dtype not in _XLA_REDUCES:
        return mine.copy_(all_reduce_flat(comm, mine.to(comm.control), op))
    if comm.is_large and mine.device.type == "cpu" and mine.nbytes <= _REDUCED_IN_ROUNDS_BYTES:
        # a copy, so that a lost peer leaves `mine` as it was
        return mine.copy_(start_reduction(comm, mine.clone(), partial(_combine, op=op))())
    start_all_reduce(comm, mine, op)()
    return mine


def start_all_reduce(comm: Comm, mine: torch.Tensor, op: ReduceOp) -> Callable[[], None]:
    """Begin `all_reduce_flat`; return a function that waits. A collective; `mine` stays unchanged until the wait."""
    group = comm.carrier(mine)
    kind = getattr(dist.ReduceOp, op.upper())
    return start_transfer(comm, lambda: [cast(Any, dist).all_reduce(mine, op=kind, group=group, async_op=True)])


def broadcast_flat(comm: Comm, tensor: torch.Tensor, *, source: int) -> None:
    """Broadcast a tensor of one shape and dtype from one rank, in place. A collective."""
    plain = tensor.contiguous()
    if _goes_by_control(comm, plain):
        plain = plain.to(comm.control)
    start_transfer(comm, lambda: [_broadcast(comm, plain, source)])()
    if plain is not tensor:
        _ = tensor.copy_(plain)


def _combine(lower: torch.Tensor, upper: torch.Tensor, op: ReduceOp) -> None:
    _ = PAIRWISE[op](lower, upper, out=lower)


def _goes_by_control(comm: Comm, tensor: torch.Tensor) -> bool:
    """Whether a tensor is sent by the control device. XLA sends only what is the same graph on all ranks."""
    return tensor.device.type == "xla" or tensor.device.type == "cpu" != comm.control.type


def _gather_to(comm: Comm, mine: torch.Tensor, sizes: Sequence[int], dst: int) -> torch.Tensor | None:
    same = len(set(sizes)) == 1
    if comm.is_large and same and mine.device.type == "cpu" and sum(sizes) <= _IN_ROUNDS_BYTES:
        whole = mine.new_empty(sum(sizes))
        start_gather(comm, whole, mine, dst=dst)()
        return whole if comm.rank == dst else None
    if comm.rank != dst:
        start_transfer(comm, lambda: [start_send(comm, mine, dst)] if mine.numel() else [])()
        return None
    out = mine.new_empty(sum(sizes))
    parts = torch.split(out, list(sizes))
    _ = parts[dst].copy_(mine)
    sources = [rank for rank, part in enumerate(parts) if rank != dst and part.numel()]
    start_transfer(comm, lambda: [start_receive(comm, parts[rank], rank) for rank in sources])()
    return out


def _broadcast(comm: Comm, tensor: torch.Tensor, source: int) -> Any:
    return cast(Any, dist).broadcast(tensor, group=comm.carrier(tensor), group_src=source, async_op=True)


def fills(operator: Any, args: Sequence[Any]) -> bool:
    """Return whether an operator of torch's c10d writes to its first argument here; its schema does not say so."""
    schema = operator._schema
    names = [each.name for each in schema.arguments]
    if names[0].startswith("output"):
        return True
    if "root_rank" in names:
        group = dist.ProcessGroup.unbox(args[names.index("process_group")])
        is_root = group.rank() == args[names.index("root_rank")]
        return is_root == schema.name.startswith("c10d::reduce")
    return schema.name.endswith("_") and names[0].startswith("tensors")
