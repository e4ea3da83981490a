# SPDX-License-Identifier: Apache-2.0
"""Messages between pairs of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from accel.comm._handle import Comm
from accel.comm._pending import guarded

_TAG = 0xACCE1  # keeps these messages apart from the user's own sends


def send_flat(comm: Comm, tensors: Mapping[int, Sequence[torch.Tensor]]) -> None:
    """Send 1-d tensors to ranks that call `receive_flat`; return when all have received theirs.

    Args:
        comm: an open handle of more than one rank.
        tensors: contiguous, by receiving rank.
    """
    pairs = [(rank, tensor.to(comm.control)) for rank, several in tensors.items() for tensor in several]
    works = guarded(lambda: [(rank, start_send(comm, tensor, rank)) for rank, tensor in pairs], tensors)
    for rank, work in works:
        guarded(work.wait, [rank])


def receive_flat(comm: Comm, tensors: Sequence[torch.Tensor], *, source: int) -> None:
    """Receive 1-d tensors from another rank; sends and receives match by order.

    Args:
        comm: an open handle of more than one rank.
        tensors: contiguous, of the lengths and dtypes sent; overwritten.
        source: the sending rank.
    """
    buffers = [tensor.to(comm.control) for tensor in tensors]
    works = guarded(lambda: [start_receive(comm, buffer, source) for buffer in buffers], [source])
    for tensor, buffer, work in zip(tensors, buffers, works, strict=True):
        guarded(work.wait, [source])
        if buffer is not tensor:
            _ = tensor.copy_(buffer)


def start_send(comm: Comm, tensor: torch.Tensor, dst: int) -> Any:
    """Begin to send a contiguous tensor, unchanged until its end; return torch's handle."""
    return cast(Any, dist).isend(tensor, group=comm.carrier(tensor), group_dst=dst, tag=_TAG)


def start_receive(comm: Comm, tensor: torch.Tensor, source: int) -> Any:
    """Begin to overwrite a contiguous tensor with what a rank sends; return torch's handle."""
    return cast(Any, dist).irecv(tensor, group=comm.carrier(tensor), group_src=source, tag=_TAG)
