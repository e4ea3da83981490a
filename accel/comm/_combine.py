# SPDX-License-Identifier: Apache-2.0
"""Small values over all ranks, in one message: integers reduced, or one rank's bytes broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec
import torch

from accel.comm._bytes import as_bytes, as_tensor
from accel.comm._call import Call
from accel.comm._exchange import exchange
from accel.comm._handle import Comm
from accel.comm._message import blank, fill, inline_bytes, reduced_bytes, start
from accel.comm._torch import all_reduce_flat, broadcast_flat

T = TypeVar("T")


def reduce_ints(comm: Comm, call: Call, numbers: Sequence[int], op: Literal["max", "min"]) -> list[int]:
    """Reduce integers over all ranks, each by itself. A collective.

    Args:
        comm: an open handle.
        call: the expected call of all ranks.
        numbers: of 64 bits, as many on every rank; `call` must compare how many.
        op: the reduction.

    Raises:
        CollectiveMismatch: ranks made different calls; on every rank.
        AccelError: another rank failed; the same error on every rank.
    """
    comm.check_open()
    if comm.size == 1:
        return list(numbers)
    mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if mine.nbytes > max(inline_bytes(comm), reduced_bytes(comm)):
        _ = start(comm, call)()
        return _listed(all_reduce_flat(comm, mine.to(comm.control), op))
    message = blank(comm)
    fill(message, as_bytes(mine.view(torch.uint8)))
    answers = start(comm, call, message, mine.nbytes, combine=_greatest if op == "max" else _least)()
    if answers.reduced is not None:
        return _listed(answers.reduced[: mine.nbytes].view(torch.int64))
    rows = answers.elements(torch.int64, 0, mine.numel())
    return _listed(rows.amax(0) if op == "max" else rows.amin(0))


def broadcast_bytes(comm: Comm, call: Call, payload: torch.Tensor, *, source: int) -> torch.Tensor:
    """Broadcast bytes of one rank. A collective.

    Args:
        comm: an open handle.
        call: the expected call of all ranks, which must compare `source`.
        payload: bytes, shape [length], dtype uint8, on the CPU; empty on other ranks.
        source: the sending rank.

    Returns:
        The payload of `source`, uint8 on the CPU.

    Raises:
        CollectiveMismatch: ranks made different calls; on every rank.
        AccelError: another rank failed; the same error on every rank.
    """
    if not comm.is_large:
        return exchange(comm, call, payload)[source]
    message = blank(comm)
    fill(message, as_bytes(payload[: reduced_bytes(comm)]))
    answers = start(comm, call, message, payload.numel(), combine=_only)()
    if answers.reduced is not None and answers.most <= reduced_bytes(comm):
        return answers.reduced[: answers.most].clone()
    received = payload if comm.rank == source else payload.new_empty(answers.most)
    broadcast_flat(comm, received, source=source)
    return received


def broadcast_value(comm: Comm, call: Call, value: T, kind: type[T], *, source: int = 0) -> T:
    """Broadcast one rank's value as JSON. A collective; see `broadcast_bytes`.

    Args:
        comm: an open handle.
        call: the expected call of all ranks, which must compare `source`.
        value: of a type that msgspec encodes; ignored on other ranks.
        kind: type of the value, checked on arrival.
        source: the sending rank.
    """
    if comm.size == 1:
        comm.check_open()
        return value
    payload = as_tensor(msgspec.json.encode(value) if comm.rank == source else b"")
    return msgspec.json.decode(as_bytes(broadcast_bytes(comm, call, payload, source=source)), type=kind)


def _greatest(lower: torch.Tensor, upper: torch.Tensor) -> None:
    numbers = lower.view(torch.int64)
    _ = torch.maximum(numbers, upper.view(torch.int64), out=numbers)


def _least(lower: torch.Tensor, upper: torch.Tensor) -> None:
    numbers = lower.view(torch.int64)
    _ = torch.minimum(numbers, upper.view(torch.int64), out=numbers)


def _only(lower: torch.Tensor, upper: torch.Tensor) -> None:
    """Combine payloads of which one at most is not zero."""
    _ = torch.bitwise_or(lower, upper, out=lower)


def _listed(numbers: torch.Tensor) -> list[int]:
    return [int(number) for number in numbers]
