# SPDX-License-Identifier: Apache-2.0
"""Payloads of all ranks for all ranks: in the first message if they fit, in a second of known size if not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec
import torch

from accel.comm._call import Call
from accel.comm._handle import Comm
from accel.comm._message import Answers, as_bytes, as_tensor, blank, fill, inline_bytes, start
from accel.comm._torch import gather_bytes

T = TypeVar("T")


def exchange(comm: Comm, call: Call, payload: torch.Tensor, *, dst: int | None = None) -> list[torch.Tensor]:
    """Give every rank's payload to every rank. A collective.

    Args:
        comm: an open handle.
        call: what this rank believes that all ranks are calling.
        payload: bytes, shape [length], dtype uint8, on the CPU; lengths may differ between ranks.
        dst: the rank that wants them; None for all. The same on every rank, and part of what `call` compares.

    Returns:
        The payloads by rank, uint8 on the CPU; none on a rank that does not want them.

    Raises:
        CollectiveMismatch: ranks made different calls; on every rank.
        AccelError: a rank called `fail`; the same error on every rank.
    """
    if comm.size == 1:
        comm.check_open()
        return [payload]
    answers = _meet(comm, call, as_bytes(payload[: inline_bytes(comm)]), payload.numel())()
    sizes = answers.sizes
    if max(sizes) <= inline_bytes(comm):
        if dst not in (None, comm.rank):
            return []
        rows = answers.inline if comm.share is None else answers.inline.clone()  # the caller may change what it gets
        return [row[:size] for row, size in zip(rows, sizes, strict=True)]
    gathered = gather_bytes(comm, payload, sizes, dst)
    return list(torch.split(gathered, sizes)) if gathered is not None else []


def exchange_values(comm: Comm, call: Call, value: T, kind: type[T]) -> list[T]:
    """Give every rank's value to every rank, as JSON. A collective; see `exchange`.

    Args:
        comm: an open handle.
        call: what this rank believes that all ranks are calling.
        value: anything that msgspec encodes.
        kind: its type, checked on arrival.
    """
    return start_values(comm, call, value, kind)()


def start_values(comm: Comm, call: Call, value: T, kind: type[T]) -> Callable[[], list[T]]:
    """Begin `exchange_values`, and return what waits for the values. A collective.

    Args:
        comm, call, value, kind: as there.
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
            assert gathered is not None  # all ranks want it
            parts = map(as_bytes, torch.split(gathered, answers.sizes))
        return [msgspec.json.decode(part, type=kind) for part in parts]

    return wait


def _meet(comm: Comm, call: Call, payload: bytes, nbytes: int) -> Callable[[], Answers]:
    """Send a payload, or what fits of its so many bytes, in the first message; return what waits for the others'."""
    message = blank(comm)
    fill(message, payload)
    return start(comm, call, message, nbytes)
