# SPDX-License-Identifier: Apache-2.0
"""Collectives on flat tensors, always on an explicit group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from accel.comm._handle import Comm
from accel.errors import PeerError

ReduceOp = Literal["sum", "max", "min", "product"]

_LOST = (
    "gloo/",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL error",
    "NCCL communicator",
)


def all_gather_flat(comm: Comm, mine: torch.Tensor) -> torch.Tensor:
    """Gather equally long 1-d tensors into one of shape [size, length]. A collective.

    Args:
        comm: an open handle of more than one rank.
        mine: this rank's tensor, shape [length], contiguous.
    """
    out = mine.new_empty(comm.size * mine.numel())
    group = comm.group
    _run("all_gather", lambda: _all_gather()(out, mine, group=group))
    return out.view(comm.size, -1)


def all_reduce_flat(comm: Comm, mine: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Reduce a tensor over all ranks, in place, and return it. A collective.

    Args:
        comm: an open handle of more than one rank.
        mine: this rank's tensor, the same shape and dtype on every rank; overwritten.
        op: how to combine.
    """
    group = comm.group
    _run("all_reduce", lambda: cast(Any, dist).all_reduce(mine, op=_reduce_op(op), group=group))
    return mine


def start_all_reduce(comm: Comm, mine: torch.Tensor, op: ReduceOp) -> Callable[[], None]:
    """Begin `all_reduce_flat`, and return what waits for its end. A collective.

    Args:
        comm, mine, op: as there. `mine` is not to be touched until the wait.
    """
    group = comm.group
    works: list[Any] = []
    _run(
        "all_reduce",
        lambda: works.append(cast(Any, dist).all_reduce(mine, op=_reduce_op(op), group=group, async_op=True)),
    )
    return lambda: _run("all_reduce", works[0].wait)


def peer_error(error: BaseException, name: str) -> PeerError | None:
    """Make a `PeerError` of an error that says that another rank was lost; None for any other error.

    Args:
        error: what a backward or forward raised whose collectives torch runs by itself.
        name: the call, for the message.
    """
    text = str(error)
    lost = isinstance(error, dist.DistError) or any(sign in text for sign in _LOST)
    return _lost(name, error) if lost and not isinstance(error, PeerError) else None


def broadcast_flat(comm: Comm, tensor: torch.Tensor, *, source: int) -> None:
    """Overwrite a tensor by that of one rank. A collective.

    Args:
        comm: an open handle of more than one rank.
        tensor: the same shape and dtype on every rank; overwritten on all but `source`.
        source: whose tensor all get.
    """
    group = comm.group
    plain = tensor.contiguous()
    _run("broadcast", lambda: cast(Any, dist).broadcast(plain, group=group, group_src=source))
    if plain is not tensor:
        _ = tensor.copy_(plain)


def send_flat(comm: Comm, tensors: Mapping[int, torch.Tensor]) -> None:
    """Send 1-d tensors to other ranks, each of which calls `receive_flat`; return when all have been taken over.

    Args:
        comm: an open handle of more than one rank.
        tensors: by receiving rank, contiguous.
    """
    group = comm.group

    def send(rank: int, tensor: torch.Tensor) -> Any:
        return cast(Any, dist).isend(tensor.to(comm.control), group=group, group_dst=rank)

    _run("send", lambda: [work.wait() for work in [send(rank, tensor) for rank, tensor in tensors.items()]])


def receive_flat(comm: Comm, tensor: torch.Tensor, *, source: int) -> None:
    """Overwrite a 1-d tensor by what another rank sends with `send_flat`.

    Args:
        comm: an open handle of more than one rank.
        tensor: of the length and dtype that is sent, contiguous; overwritten.
        source: the sending rank.
    """
    group = comm.group
    buffer = tensor.to(comm.control)
    _run("receive", lambda: cast(Any, dist).irecv(buffer, group=group, group_src=source).wait())
    if buffer is not tensor:
        _ = tensor.copy_(buffer)


def _all_gather() -> Callable[..., Any]:
    # torch 2.13 renamed the function and warns about the old name
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return cast("Callable[..., Any]", getattr(dist, name))


def _run(name: str, call: Callable[[], object]) -> None:
    try:
        call()
    except RuntimeError as error:
        raise _lost(name, error) from error


def _lost(name: str, error: BaseException) -> PeerError:
    return PeerError(
        f"{name} did not complete: {error}",
        expected="every rank in this call",
        fix="Another rank has left or hangs; look for its error first.",
    )


def _reduce_op(op: ReduceOp) -> Any:
    kinds = {
        "sum": dist.ReduceOp.SUM,
        "max": dist.ReduceOp.MAX,
        "min": dist.ReduceOp.MIN,
        "product": dist.ReduceOp.PRODUCT,
    }
    return kinds[op]
