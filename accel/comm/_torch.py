# SPDX-License-Identifier: Apache-2.0
"""Collectives on flat tensors, always on an explicit group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from accel.comm._absent import absence
from accel.comm._call import public_call
from accel.comm._handle import Comm
from accel.errors import AccelError, PeerError

ReduceOp = Literal["sum", "max", "min", "product"]

# gloo's all-gather copies everything twice, through memory of its own. A broadcast from each rank copies nothing and
# allows different lengths, but starts more slowly, which costs more below this size.
_BROADCAST_BYTES = 128 * 1024

# On the CPU all-gather goes round a ring, step by step. All-to-all sends to every rank at once, but needs a copy for
# each, which is faster up to this many bytes received.
_AT_ONCE_BYTES = 128 * 1024

# Dtypes of XLA's all-reduce on TPUs, https://github.com/pytorch/xla/issues/1952 and 2609
_XLA_REDUCES = (torch.float32, torch.bfloat16, torch.float16)

_TAG = 0xACCE1  # keeps these messages apart from the user's own sends

# torch 2.13 renamed the function and warns about the old name
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"

_LOST = (
    "gloo/",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL error",
    "NCCL communicator",
)


def all_gather_flat(comm: Comm, mine: torch.Tensor) -> torch.Tensor:
    """Gather 1-d tensors of equal length into one of shape [size, length]. A collective.

    Args:
        comm: an open handle of more than one rank.
        mine: this rank's tensor, shape [length], contiguous.
    """
    out = mine.new_empty(comm.size * mine.numel())
    start_all_gather(comm, out, mine)()
    return out.view(comm.size, -1)


def start_all_gather(comm: Comm, out: torch.Tensor, mine: torch.Tensor) -> Callable[[], None]:
    """Begin to gather 1-d tensors of equal length into `out`; return a function that waits. A collective.

    Args:
        comm: an open handle of more than one rank.
        out: shape [size * length], contiguous; overwritten.
        mine: shape [length], contiguous; unchanged until the wait.
    """
    group = comm.carrier(mine)
    if mine.device.type == "cpu" and out.nbytes <= _AT_ONCE_BYTES:
        copies = torch.cat([mine] * comm.size)
        return _start(comm, lambda: [cast(Any, dist).all_to_all_single(out, copies, group=group, async_op=True)])
    return _start(comm, lambda: [getattr(dist, _ALL_GATHER)(out, mine, group=group, async_op=True)])


def gather_bytes(comm: Comm, mine: torch.Tensor, sizes: Sequence[int], dst: int | None = None) -> torch.Tensor | None:
    """Gather the bytes of all ranks, one after another, without a copy of large ones. A collective.

    Args:
        comm: an open handle of more than one rank.
        mine: this rank's bytes, uint8, shape [sizes[comm.rank]], contiguous.
        sizes: bytes of each rank, the same list on all ranks.
        dst: the receiving rank; None for all.

    Returns:
        All ranks' bytes, uint8, shape [sum of sizes]; None on ranks other than `dst`.
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
    filled = [rank for rank, size in enumerate(sizes) if size]
    if len(set(sizes)) == 1 and (few or mine.device.type != "cpu"):
        start_all_gather(comm, out, mine)()
    elif few and len(filled) > 2:
        padded = mine.new_zeros(max(sizes))
        padded[: mine.numel()] = mine
        rows = all_gather_flat(comm, padded)
        torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)], out=out)
    else:
        parts = torch.split(out, list(sizes))
        _ = parts[comm.rank].copy_(mine)
        _start(comm, lambda: [_broadcast(comm, parts[rank], rank) for rank in filled])()
    return out


def all_reduce_flat(comm: Comm, mine: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Reduce a tensor over all ranks in place and return it. A collective.

    Args:
        comm: an open handle of more than one rank.
        mine: this rank's tensor, of one shape and dtype on every rank; overwritten.
        op: the reduction.
    """
    if mine.device.type == "xla" and mine.dtype not in _XLA_REDUCES:
        return mine.copy_(all_reduce_flat(comm, mine.to(comm.control), op))
    start_all_reduce(comm, mine, op)()
    return mine


def start_all_reduce(comm: Comm, mine: torch.Tensor, op: ReduceOp) -> Callable[[], None]:
    """Begin `all_reduce_flat`; return a function that waits for its end. A collective.

    Args:
        comm, mine, op: as of `all_reduce_flat`; `mine` stays unchanged until the wait.
    """
    group = comm.carrier(mine)
    kinds = {
        "sum": dist.ReduceOp.SUM,
        "max": dist.ReduceOp.MAX,
        "min": dist.ReduceOp.MIN,
        "product": dist.ReduceOp.PRODUCT,
    }
    return _start(comm, lambda: [cast(Any, dist).all_reduce(mine, op=kinds[op], group=group, async_op=True)])


def broadcast_flat(comm: Comm, tensor: torch.Tensor, *, source: int) -> None:
    """Broadcast a tensor from one rank, in place. A collective.

    Args:
        comm: an open handle of more than one rank.
        tensor: of one shape and dtype on every rank; overwritten on all but `source`.
        source: the sending rank.
    """
    plain = tensor.contiguous()
    if _goes_by_control(comm, plain):
        plain = plain.to(comm.control)
    _start(comm, lambda: [_broadcast(comm, plain, source)])()
    if plain is not tensor:
        _ = tensor.copy_(plain)


def send_flat(comm: Comm, tensors: Mapping[int, Sequence[torch.Tensor]]) -> None:
    """Send 1-d tensors to ranks that call `receive_flat`; return when all have received theirs.

    Args:
        comm: an open handle of more than one rank.
        tensors: contiguous, by receiving rank.
    """
    pairs = [(rank, tensor.to(comm.control)) for rank, several in tensors.items() for tensor in several]
    works = _guarded(lambda: [(rank, _send(comm, tensor, rank)) for rank, tensor in pairs], tensors)
    for rank, work in works:
        _guarded(work.wait, [rank])


def receive_flat(comm: Comm, tensors: Sequence[torch.Tensor], *, source: int) -> None:
    """Receive 1-d tensors from another rank; sends and receives match by order.

    Args:
        comm: an open handle of more than one rank.
        tensors: contiguous, of the lengths and dtypes sent; overwritten.
        source: the sending rank.
    """
    buffers = [tensor.to(comm.control) for tensor in tensors]
    works = _guarded(lambda: [_receive(comm, buffer, source) for buffer in buffers], [source])
    for tensor, buffer, work in zip(tensors, buffers, works, strict=True):
        _guarded(work.wait, [source])
        if buffer is not tensor:
            _ = tensor.copy_(buffer)


def peer_error(error: BaseException, name: str) -> PeerError | None:
    """Convert the error of a lost connection to a `PeerError`; return None for any other error.

    Args:
        error: raised by a forward or backward in which torch runs collectives.
        name: the call, for the message.
    """
    text = str(error)
    if isinstance(error, PeerError) or not (isinstance(error, dist.DistError) or any(sign in text for sign in _LOST)):
        return None
    return PeerError(
        f"{name} did not complete: {error}",
        expected="every rank in this call",
        fix="Another rank has left or hangs; look for its error first.",
    )


def _goes_by_control(comm: Comm, tensor: torch.Tensor) -> bool:
    """Whether a tensor travels by the control device. XLA sends only what is the same graph on all ranks."""
    return tensor.device.type == "xla" or tensor.device.type == "cpu" != comm.control.type


def _gather_to(comm: Comm, mine: torch.Tensor, sizes: Sequence[int], dst: int) -> torch.Tensor | None:
    if comm.rank != dst:
        _start(comm, lambda: [_send(comm, mine, dst)] if mine.numel() else [])()
        return None
    out = mine.new_empty(sum(sizes))
    parts = torch.split(out, list(sizes))
    _ = parts[dst].copy_(mine)
    _start(comm, lambda: _receive_all(comm, parts))()
    return out


def _send(comm: Comm, tensor: torch.Tensor, dst: int) -> Any:
    return cast(Any, dist).isend(tensor, group=comm.carrier(tensor), group_dst=dst, tag=_TAG)


def _receive(comm: Comm, tensor: torch.Tensor, source: int) -> Any:
    return cast(Any, dist).irecv(tensor, group=comm.carrier(tensor), group_src=source, tag=_TAG)


def _receive_all(comm: Comm, parts: Sequence[torch.Tensor]) -> list[Any]:
    sources = [rank for rank, part in enumerate(parts) if rank != comm.rank and part.numel()]
    return [_receive(comm, parts[rank], rank) for rank in sources]


def _broadcast(comm: Comm, tensor: torch.Tensor, source: int) -> Any:
    return cast(Any, dist).broadcast(tensor, group=comm.carrier(tensor), group_src=source, async_op=True)


def _guarded(action: Callable[[], Any], others: Iterable[int]) -> Any:
    """Run a transfer between this rank and others; a lost connection becomes a `PeerError`."""
    try:
        return action()
    except AccelError:  # from a simulated group
        raise
    except RuntimeError as error:
        raise PeerError(
            f"rank {', '.join(map(str, others))} has left or hangs",
            expected="its part in a transfer",
            got=str(error).splitlines()[0],
            where=public_call(),
            fix="See what it did last: its error, its other branch, or what it waits for.",
        ) from error


def _start(comm: Comm, begin: Callable[[], list[Any]]) -> Callable[[], None]:
    """Begin transfers of all ranks; return a function that waits for their end."""
    number = comm.next_number()
    began = time.monotonic()
    works: list[Any] = []

    def run(action: Callable[[], object]) -> None:
        try:
            _ = action()
        except AccelError:  # from a simulated group
            raise
        except RuntimeError as error:
            if comm.alarm is not None and comm.alarm.rung():
                raise peer_error(error, public_call()) or error from error
            raise absence(comm.roll, comm.rank, comm.size, number, time.monotonic() - began, error) from error

    def wait() -> None:
        for work in works:
            work.wait()

    run(lambda: works.extend(begin()))
    return lambda: run(wait)
