# SPDX-License-Identifier: Apache-2.0
"""The first message of every call: of fixed size, with room for a small payload; reduced where ranks are many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, NoReturn

import msgspec
import torch

from accel.comm._call import Call, FirstValue, Met, call_place
from accel.comm._group import Comm
from accel.comm._header import (
    HEADER_BYTES,
    Answers,
    Head,
    as_bytes,
    check_order,
    check_reduced_order,
    check_steps,
    check_values,
    complement,
    fingerprint,
    raise_failure,
    raise_mismatch,
    read_head,
    right_order,
    write_head,
)
from accel.comm._rounds import Combine, reduce_rows, start_reduction
from accel.comm._torch import start_all_gather, start_all_reduce
from accel.errors._base import describe

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
    # shares memory with `sent` and `received`, which the function below keeps alive until the wait
    mine = torch.frombuffer(sent, dtype=torch.uint8)
    rows = arriving = torch.frombuffer(received, dtype=torch.uint8)
    # NCCL alone: the message goes through the device, and `copy_` below makes the host wait for it
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
    """Begin to reduce one message of each rank, header and payload; return a function that waits. A collective.

    Overwrites `sent`, which has room for another header at its end.
    """
    # one minimum gives both ends of every word: any difference shows as lowest != highest
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
    """Reduce the headers on a device by the backend's trees; they are the full message there."""
    words = message.view(torch.int64).to(comm.control)
    arrive = start_all_reduce(comm, words, "min")

    def wait() -> torch.Tensor:
        arrive()
        # the host waits here for the device
        return words.cpu().view(torch.uint8)

    return wait


def _reduce(messages: Sequence[bytearray], combine: Combine | None) -> Range:
    """Reduce the messages of ranks of one process."""
    first = messages[0]
    # the way of nearly every call, without a stack of all rows
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
    # the way of nearly every call: headers compare as bytes, and none but the first is parsed
    if not first.failed and all(received.startswith(header, rank * length) for rank in range(1, ranks)):
        return Heads(Answers(True, first.payload_bytes, [first.payload_bytes] * ranks, received), [])
    heads = [read_head(received, rank * length) for rank in range(ranks)]
    same = all(head.is_like(first) for head in heads)
    sizes = [head.payload_bytes for head in heads]
    return Heads(Answers(same, max(sizes), sizes, received), heads)


# Larger first messages save second ones, but each call pays for them, times the number of ranks.
_MOST_BYTES = 8192
_LEAST_BYTES = 512
_RECEIVED_BYTES = 64 * 1024  # by each rank from all others together, between these limits
_REDUCED_BYTES = 1024


def inline_bytes(comm: Comm) -> int:
    """Return the room in the first message for payloads to all ranks, a multiple of 16; 0 in a large group."""
    return 0 if comm.is_large else _message_bytes(comm) - HEADER_BYTES


def reduced_bytes(comm: Comm) -> int:
    """Return the room in the first message for a reduced payload, a multiple of 16; 0 in a small group."""
    return _REDUCED_BYTES - 2 * HEADER_BYTES if comm.is_large and comm.has_pairs else 0


def blank(comm: Comm) -> bytearray:
    """Make an empty first message; its payload begins at HEADER_BYTES."""
    if comm.is_large:
        return bytearray(2 * HEADER_BYTES + reduced_bytes(comm))
    return bytearray(_message_bytes(comm))


def start(
    comm: Comm,
    call: Call,
    message: bytearray | None = None,
    payload_bytes: int = 0,
    *,
    variant: bytes = b"",
    combine: Combine | None = None,
    failure: bytes = b"",
    cause: BaseException | None = None,
) -> Callable[[], Answers]:
    """Send the first message of a call; return a function that waits for all ranks' messages. A collective.

    `message` begins the payload (from `blank`); `variant` may differ between ranks; `failure` is sent in its place.
    """
    sent = blank(comm) if message is None else message
    if failure:
        # as the variant, so that ranks see whether all failed alike
        payload_bytes, variant = len(failure), failure
    place = call_place() if call.ordered else b""
    head = Head(fingerprint(call.name, call.detail), variant, payload_bytes, place, comm.steps.digest, bool(failure))
    values = comm.steps.take_values()
    # the call before matters to ordered calls alone; unordered ones between them keep it
    earlier = comm.met
    if call.ordered:
        comm.met = None
    if comm.is_large:
        return _start_large(comm, call, sent, head, earlier, values, combine, failure, cause)
    fill(sent, failure)
    write_head(sent, head)
    arrive = start_gathered(comm, sent)

    def wait() -> Answers:
        answers, heads = arrive()
        if heads:
            _raise_differences(comm, call, heads, answers, failure, cause)
            if call.ordered:
                check_order(comm, call, earlier, heads)
        if values is not None:
            check_values(comm, call, values)
        return answers

    return wait


def fill(message: bytearray, payload: bytes | memoryview) -> None:
    """Write as much of a payload as fits into a first message."""
    fitting = payload[: len(message) - HEADER_BYTES]
    message[HEADER_BYTES : HEADER_BYTES + len(fitting)] = fitting


def fail(comm: Comm, call: Call, error: BaseException) -> NoReturn:
    """Send this rank's error in the place of the others' call; all raise the lowest failing rank's. A collective."""
    # the peers of a lost group receive nothing any more
    if comm.size == 1 or comm.lost:
        raise error
    record = describe(error)
    texts = {name: _sendable(getattr(record, name)) for name in ("problem", "expected", "got", "where", "fix")}
    data = msgspec.json.encode(msgspec.structs.replace(record, **texts))
    _ = start(comm, call, failure=data, cause=error)()
    raise error


def _start_large(
    comm: Comm,
    call: Call,
    sent: bytearray,
    head: Head,
    earlier: Met | None,
    values: Sequence[FirstValue] | None,
    combine: Combine | None,
    failure: bytes,
    cause: BaseException | None,
) -> Callable[[], Answers]:
    """Reduce the first messages; gather the headers of all ranks only to report an error."""
    # each rank states the comparison that it knows; lowest == highest below if all know the same
    head = head._replace(order=right_order(comm, earlier, head))
    write_head(sent, head)
    # a copy, as the reduction overwrites the message
    own = sent[:HEADER_BYTES]
    arrive = start_range(comm, sent, combine)

    def wait() -> Answers:
        lowest, highest, reduced = arrive()
        if highest.failed or (lowest.fingerprint, lowest.steps) != (highest.fingerprint, highest.steps):
            answers, heads = start_gathered(comm, own)()
            _raise_differences(comm, call, heads, answers, failure, cause)
        if values is not None:
            check_values(comm, call, values)
        if lowest.place != highest.place:
            check_reduced_order(comm, call, earlier, head, 0 < lowest.order == highest.order)
        # without the headers of all, sizes are known only where both ends agree
        even = lowest.payload_bytes == highest.payload_bytes
        sizes = [highest.payload_bytes] * comm.size if even else []
        return Answers(lowest.is_like(highest), highest.payload_bytes, sizes, bytearray(), reduced)

    return wait


def _raise_differences(
    comm: Comm, call: Call, heads: list[Head], answers: Answers, failure: bytes, cause: BaseException | None
) -> None:
    # failures first: a rank that failed sends its error in whatever call the others make
    if any(head.failed for head in heads):
        raise_failure(comm, heads, answers, failure, cause)
    if any(head.fingerprint != heads[0].fingerprint for head in heads):
        raise_mismatch(comm, call, heads)
    check_steps(comm, call, heads)


def _message_bytes(comm: Comm) -> int:
    # of one size on all ranks, however much each has to send: unequal messages could not be exchanged at all
    share = _RECEIVED_BYTES // comm.size // HEADER_BYTES * HEADER_BYTES
    return max(_LEAST_BYTES, min(share, _MOST_BYTES))


def _sendable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()  # file names may hold bytes that UTF-8 cannot encode
