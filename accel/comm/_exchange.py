# SPDX-License-Identifier: Apache-2.0
"""All-gather of payloads: in the first message if they fit, in a second of known size if not."""

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
from accel.comm._torch import gather_bytes

T = TypeVar("T")


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
    answers = _meet(comm, call, as_bytes(payload[: inline_bytes(comm)]), payload.numel())()
    sizes = answers.sizes
    if max(sizes) <= inline_bytes(comm):
        if dst not in (None, comm.rank):
            return []
        rows = answers.inline if comm.share is None else answers.inline.clone()  # callers may change their payloads
        return [row[:size] for row, size in zip(rows, sizes, strict=True)]
    gathered = gather_bytes(comm, payload, sizes, dst)
    return list(torch.split(gathered, sizes)) if gathered is not None else []


def exchange_values(comm: Comm, call: Call, value: T, kind: type[T]) -> list[T]:
    """All-gather values as JSON. A collective; see `exchange`.

    Args:
        comm: an open handle.
        call: the expected call of all ranks.
        value: this rank's, of a type that msgspec encodes.
        kind: type of the values, checked on arrival.
    """
    return start_values(comm, call, value, kind)()


def start_values(comm: Comm, call: Call, value: T, kind: type[T]) -> Callable[[], list[T]]:
    """Begin `exchange_values`; return a function that waits for the values. A collective.

    Args:
        comm, call, value, kind: as of `exchange_values`.
    """
    if comm.size == 1:
        comm.check_open()
        return lambda: [value]
    mine = msgspec.json.encode(value)
    arrive = _meet(comm, call, mine, len(mine))

    def wait() -> list[T]:
        answers = arrive()
        parts: Iterable[bytes] = map(answers.payload, range(comm.size))
        if max(answers.sizes) > inline_bytes(comm):
            gathered = gather_bytes(comm, as_tensor(mine), answers.sizes)
            assert gathered is not None  # without dst
            parts = map(as_bytes, torch.split(gathered, answers.sizes))
        return [msgspec.json.decode(part, type=kind) for part in parts]

    return wait


def _meet(comm: Comm, call: Call, payload: bytes, nbytes: int) -> Callable[[], Answers]:
    """Send as much of a payload as fits in the first message; return a function that waits for all messages."""
    message = blank(comm)
    fill(message, payload)
    return start(comm, call, message, nbytes)
