# SPDX-License-Identifier: Apache-2.0
"""The first message of every call: of fixed size, with a fingerprint of the call and room for a small payload.

Its size does not depend on the call. Ranks that make different calls therefore meet in it, compare fingerprints, and
all raise `CollectiveMismatch`. The same message carries a rank's failure to the others. Every rank receives one from
each, so messages are smaller among many ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import msgspec
import torch

from accel.comm._answers import Answers
from accel.comm._call import Call, call_place
from accel.comm._disagreement import check_order, raise_failure, raise_mismatch
from accel.comm._handle import Comm
from accel.comm._header import HEADER_BYTES, Head, fingerprint, read_head, write_head
from accel.comm._torch import start_all_gather
from accel.errors import describe

_MOST_BYTES = 8192
_LEAST_BYTES = 512
_RECEIVED_BYTES = 64 * 1024  # by each rank from all others together, between these limits


class _Arrived(NamedTuple):
    """All ranks' first messages; their headers only where these differ or report a failure."""

    answers: Answers
    heads: list[Head]


def inline_bytes(comm: Comm) -> int:
    """Return the room for a payload in the first message, in bytes: a multiple of 16, equal on all ranks."""
    return _message_bytes(comm) - HEADER_BYTES


def blank(comm: Comm) -> bytearray:
    """Make an empty first message; its payload begins at HEADER_BYTES."""
    return bytearray(_message_bytes(comm))


def start(
    comm: Comm,
    call: Call,
    message: bytearray | None = None,
    payload_bytes: int = 0,
    *,
    variant: bytes = b"",
    failure: bytes = b"",
    cause: BaseException | None = None,
) -> Callable[[], Answers]:
    """Send the first message of a call; return a function that waits for those of all ranks. A collective.

    Args:
        comm: an open handle of more than one rank.
        call: the expected call of all ranks.
        message: from `blank`, filled with as much of the payload as fits; None for no payload.
        payload_bytes: size of the whole payload.
        variant: facts that may differ between ranks of one call; a hash of them above 16 bytes.
        failure: this rank's encoded error, sent in place of a payload; empty without one.
        cause: the error itself, the cause of the error raised here.

    Raises:
        CollectiveMismatch: ranks made different calls, or this call and the one before in different orders; on every
            rank, by the returned function.
        AccelError: a rank failed; the same error on every rank, by the returned function.
    """
    sent = blank(comm) if message is None else message
    if failure:
        fill(sent, failure)
        payload_bytes, variant = len(failure), failure
    place = call_place() if call.ordered else b""
    write_head(sent, Head(fingerprint(call.name, call.detail), variant, payload_bytes, bool(failure), place))
    earlier = comm.met
    if call.ordered:
        comm.met = None
    arrive = _start_exchange(comm, sent)

    def wait() -> Answers:
        answers, heads = arrive()
        if any(head.failed for head in heads):
            raise_failure(comm, heads, answers, failure, cause)
        if any(head.fingerprint != heads[0].fingerprint for head in heads):
            raise_mismatch(comm, call, heads)
        if heads and call.ordered:
            check_order(comm, call, earlier, heads)
        return answers

    return wait


def fill(message: bytearray, payload: bytes | memoryview) -> None:
    """Write as much of a payload as fits into a first message."""
    fitting = payload[: len(message) - HEADER_BYTES]
    message[HEADER_BYTES : HEADER_BYTES + len(fitting)] = fitting


def fail(comm: Comm, call: Call, error: BaseException) -> NoReturn:
    """Send this rank's error to all ranks, whatever they are calling; every rank raises it. A collective.

    Raises:
        AccelError: always; the lowest failing rank's error, with the rank unless all failed alike.
    """
    if comm.size == 1:
        raise error
    record = describe(error)
    texts = {name: _sendable(getattr(record, name)) for name in ("problem", "expected", "got", "where", "fix")}
    data = msgspec.json.encode(msgspec.structs.replace(record, **texts))
    _ = start(comm, call, failure=data, cause=error)()
    raise error


def _start_exchange(comm: Comm, sent: bytearray) -> Callable[[], _Arrived]:
    """Begin to all-gather one message of each rank."""
    if comm.share is not None:
        return comm.share(sent, _join)
    received = bytearray(len(sent) * comm.size)
    mine = torch.frombuffer(sent, dtype=torch.uint8)
    rows = arriving = torch.frombuffer(received, dtype=torch.uint8)
    if comm.control.type != "cpu":
        mine = mine.to(comm.control)
        arriving = rows.to(comm.control)
    arrive = start_all_gather(comm, arriving, mine)

    def wait() -> _Arrived:
        arrive()
        if arriving is not rows:
            _ = rows.copy_(arriving)
        return _read(received, comm.size)

    return wait


def _join(messages: Sequence[bytearray]) -> _Arrived:
    return _read(bytearray().join(messages), len(messages))


def _read(received: bytearray, ranks: int) -> _Arrived:
    """Compare the headers of all ranks' messages."""
    length = len(received) // ranks
    header = received[:HEADER_BYTES]
    first = read_head(header)
    if not first.failed and all(received.startswith(header, rank * length) for rank in range(1, ranks)):
        return _Arrived(Answers(True, [first.payload_bytes] * ranks, received), [])
    heads = [read_head(received, rank * length) for rank in range(ranks)]
    same = all(head[:-1] == first[:-1] for head in heads)
    return _Arrived(Answers(same, [head.payload_bytes for head in heads], received), heads)


def _message_bytes(comm: Comm) -> int:
    share = _RECEIVED_BYTES // comm.size // HEADER_BYTES * HEADER_BYTES
    return max(_LEAST_BYTES, min(share, _MOST_BYTES))


def _sendable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()  # file names may hold bytes that UTF-8 cannot encode
