# SPDX-License-Identifier: Apache-2.0
"""Payloads of all ranks, for all: in the first message where it has room, in a second of known size elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec
import torch

from accel.comm._answers import Answers
from accel.comm._bytes import as_bytes, as_tensor
from accel.comm._call import Call
from accel.comm._handle import Comm
from accel.comm._message import blank, fill, inline_bytes, start
from accel.comm._torch import all_gather_flat, gather_bytes

T = TypeVar("T")

# Up to this size, payloads of different sizes are filled up to one, with the size in front. That saves a message.
_FILLED_BYTES = 1024
_LENGTH_BYTES = 8


def exchange(comm: Comm, call: Call, payload: torch.Tensor, *, dst: int | None = None) -> list[torch.Tensor]:
    """All-gather byte payloads. A collective.

    Args:
        comm: an open handle.
        call: the expected call of all ranks.
        payload: bytes, shape [length], dtype uint8, on the CPU; lengths may differ between ranks.
        dst: the receiving rank; None for all. `call` must compare it.

    Returns:
        The payloads by rank, uint8 on the CPU; empty on ranks other than `dst`.

    Raises:
        CollectiveMismatch: ranks made different calls; on every rank.
        AccelError: another rank failed; the same error on every rank.
    """
    if comm.size == 1:
        comm.check_open()
        return [payload]
    answers = _meet(comm, call, payload)()
    if answers.most > inline_bytes(comm):
        return _second(comm, answers, payload, dst)
    if dst not in (None, comm.rank):
        return []
    if comm.is_large:
        return [payload.new_empty(0) for _ in answers.sizes]
    rows = answers.inline if comm.share is None else answers.inline.clone()  # callers may change their payloads
    return [row[:size] for row, size in zip(rows, answers.sizes, strict=True)]


def exchange_values(comm: Comm, call: Call, value: T, kind: type[T], *, dst: int | None = None) -> list[T]:
    """All-gather values as JSON. A collective; see `exchange`.

    Args:
        comm: an open handle.
        call: the expected call of all ranks.
        value: this rank's, of a type that msgspec encodes.
        kind: type of the values, checked on arrival.
        dst: the receiving rank; None for all. `call` must compare it unless it is the same in all such calls.
    """
    return _start_values(comm, call, value, kind, dst)()


def start_values(comm: Comm, call: Call, value: T, kind: type[T]) -> Callable[[], list[T]]:
    """Begin `exchange_values`; return a function that waits for the values. A collective.

    Args:
        comm, call, value, kind: as of `exchange_values`.
    """
    return _start_values(comm, call, value, kind, None)


def _start_values(comm: Comm, call: Call, value: T, kind: type[T], dst: int | None) -> Callable[[], list[T]]:
    if comm.size == 1:
        comm.check_open()
        return lambda: [value]
    mine = as_tensor(msgspec.json.encode(value))
    arrive = _meet(comm, call, mine)

    def wait() -> list[T]:
        answers = arrive()
        parts: Iterable[bytes] = ()
        if answers.most > inline_bytes(comm):
            parts = map(as_bytes, _second(comm, answers, mine, dst))
        elif dst in (None, comm.rank):
            parts = map(answers.payload, range(comm.size))
        return [msgspec.json.decode(part, type=kind) for part in parts]

    return wait


def _meet(comm: Comm, call: Call, payload: torch.Tensor) -> Callable[[], Answers]:
    """Send as much of a payload as fits in the first message; return a function that waits for all messages."""
    message = blank(comm)
    if room := inline_bytes(comm):
        fill(message, as_bytes(payload[:room]))
    return start(comm, call, message, payload.numel())


def _second(comm: Comm, answers: Answers, payload: torch.Tensor, dst: int | None) -> list[torch.Tensor]:
    """Gather payloads that the first message has no room for."""
    if answers.sizes:
        return _gathered(comm, payload, answers.sizes, dst)
    length = torch.tensor([payload.numel()], dtype=torch.int64, device="cpu")
    if answers.most > _FILLED_BYTES:
        sizes = [int(size) for size in all_gather_flat(comm, length.to(comm.control))]
        return _gathered(comm, payload, sizes, dst)
    row = payload.new_zeros(_LENGTH_BYTES + answers.most)
    row[:_LENGTH_BYTES] = length.view(torch.uint8)
    row[_LENGTH_BYTES : _LENGTH_BYTES + payload.numel()] = payload
    rows = _gathered(comm, row, [row.numel()] * comm.size, dst)
    sizes = [int(row[:_LENGTH_BYTES].clone().view(torch.int64)) for row in rows]
    return [row[_LENGTH_BYTES : _LENGTH_BYTES + size] for row, size in zip(rows, sizes, strict=True)]


def _gathered(comm: Comm, payload: torch.Tensor, sizes: list[int], dst: int | None) -> list[torch.Tensor]:
    gathered = gather_bytes(comm, payload, sizes, dst)
    return list(torch.split(gathered, sizes)) if gathered is not None else []
