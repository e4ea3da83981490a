# SPDX-License-Identifier: Apache-2.0
"""Collectives on flat tensors, always on an explicit group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from accel.comm._handle import Comm
from accel.errors import PeerError

ReduceOp = Literal["sum", "max", "min", "product"]


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
    kinds = {
        "sum": dist.ReduceOp.SUM,
        "max": dist.ReduceOp.MAX,
        "min": dist.ReduceOp.MIN,
        "product": dist.ReduceOp.PRODUCT,
    }
    group = comm.group
    _run("all_reduce", lambda: cast(Any, dist).all_reduce(mine, op=kinds[op], group=group))
    return mine


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


def _all_gather() -> Callable[..., Any]:
    # torch 2.13 renamed the function and warns about the old name
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return cast("Callable[..., Any]", getattr(dist, name))


def _run(name: str, call: Callable[[], object]) -> None:
    try:
        call()
    except RuntimeError as error:
        raise PeerError(
            f"{name} did not complete: {error}",
            expected="every rank in this call",
            fix="Another rank has left or hangs; look for its error first.",
        ) from error
