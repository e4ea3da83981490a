# SPDX-License-Identifier: Apache-2.0
"""The two ways of first messages: to all ranks, or reduced among many.

Up to 64 ranks every rank receives the message of each, with small payloads. Among more, that would be most of a call's
cost. There the minimum and the maximum of the header are reduced, with a payload that is reduced beside them, in about
log2(W) messages; ranks send their headers to all only where these differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from accel.comm._answers import Answers
from accel.comm._bytes import as_bytes
from accel.comm._handle import Comm
from accel.comm._header import HEADER_BYTES, Head, complement, read_head
from accel.comm._rounds import Combine, reduce_rows, start_reduction
from accel.comm._torch import start_all_gather, start_all_reduce

_WORDS = slice(0, HEADER_BYTES)
_PAYLOAD = slice(HEADER_BYTES, -HEADER_BYTES)
_COMPLEMENT = slice(-HEADER_BYTES, None)


class Heads(NamedTuple):
    """All ranks' first messages; their headers only where these differ or report a failure."""

    answers: Answers
    heads: list[Head]


class Range(NamedTuple):
    """The reduced first message: minimum and maximum of each word of the headers, and the reduced payload."""

    lowest: Head
    highest: Head
    payload: torch.Tensor


def start_gathered(comm: Comm, sent: bytearray) -> Callable[[], Heads]:
    """Begin to all-gather one message of each rank, from its header on. A collective; returns a function that waits."""
    if comm.share is not None:
        return comm.share(sent, _join)
    received = bytearray(len(sent) * comm.size)
    mine = torch.frombuffer(sent, dtype=torch.uint8)
    rows = arriving = torch.frombuffer(received, dtype=torch.uint8)
    if comm.control.type != "cpu":
        mine = mine.to(comm.control)
        arriving = rows.to(comm.control)
    arrive = start_all_gather(comm, arriving, mine)

    def wait() -> Heads:
        arrive()
        if arriving is not rows:
            _ = rows.copy_(arriving)
        return _read(received, comm.size)

    return wait


def start_range(comm: Comm, sent: bytearray, combine: Combine | None) -> Callable[[], Range]:
    """Begin to reduce one message of each rank. A collective; returns a function that waits.

    Args:
        comm: an open handle of more than one rank.
        sent: the header, the payload and room for another header; overwritten.
        combine: reduces payloads; None for none.
    """
    sent[_COMPLEMENT] = complement(sent[_WORDS])
    if comm.share is not None:
        return comm.share(sent, partial(_reduce, combine=combine))
    message = torch.frombuffer(sent, dtype=torch.uint8)
    if comm.has_pairs:
        arrive = start_reduction(comm, message, partial(_combine, combine=combine))
    else:
        arrive = _start_all_reduce(comm, message)

    return lambda: _range(arrive())


def _start_all_reduce(comm: Comm, message: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Reduce the headers on a device, whose backend has trees of its own; they are the whole message there."""
    words = message.view(torch.int64).to(comm.control)
    arrive = start_all_reduce(comm, words, "min")

    def wait() -> torch.Tensor:
        arrive()
        return words.cpu().view(torch.uint8)

    return wait


def _reduce(messages: Sequence[bytearray], combine: Combine | None) -> Range:
    """Reduce the messages of ranks of one process."""
    first = messages[0]
    if combine is None and all(message == first for message in messages):
        return _range(torch.frombuffer(first, dtype=torch.uint8))
    rows = torch.frombuffer(bytearray().join(messages), dtype=torch.uint8).view(len(messages), -1)
    return _range(reduce_rows(rows, partial(_combine, combine=combine)))


def _combine(lower: torch.Tensor, upper: torch.Tensor, combine: Combine | None) -> None:
    for part in (_WORDS, _COMPLEMENT):
        words = lower[..., part].view(torch.int64)
        _ = torch.minimum(words, upper[..., part].view(torch.int64), out=words)
    if combine is not None:
        combine(lower[..., _PAYLOAD], upper[..., _PAYLOAD])


def _range(message: torch.Tensor) -> Range:
    lowest = as_bytes(message[_WORDS])
    highest = complement(as_bytes(message[_COMPLEMENT]))
    return Range(read_head(lowest), read_head(highest), message[_PAYLOAD])


def _join(messages: Sequence[bytearray]) -> Heads:
    return _read(bytearray().join(messages), len(messages))


def _read(received: bytearray, ranks: int) -> Heads:
    """Compare the headers of all ranks' messages."""
    length = len(received) // ranks
    header = received[:HEADER_BYTES]
    first = read_head(header)
    if not first.failed and all(received.startswith(header, rank * length) for rank in range(1, ranks)):
        return Heads(Answers(True, first.payload_bytes, [first.payload_bytes] * ranks, received), [])
    heads = [read_head(received, rank * length) for rank in range(ranks)]
    same = all(head.is_like(first) for head in heads)
    sizes = [head.payload_bytes for head in heads]
    return Heads(Answers(same, max(sizes), sizes, received), heads)
