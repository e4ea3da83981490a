# SPDX-License-Identifier: Apache-2.0
"""The first message of every call: of fixed size, with a fingerprint of the call and room for a small payload.

Its size does not depend on the call. Ranks that make different calls therefore meet in it, compare fingerprints, and
all raise `CollectiveMismatch`. The same message carries a rank's failure to the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import msgspec

from accel.comm._answers import Answers
from accel.comm._call import Call, call_place
from accel.comm._disagreement import check_order, check_reduced_order, raise_failure, raise_mismatch, right_order
from accel.comm._handle import Comm
from accel.comm._header import HEADER_BYTES, Head, fingerprint, write_head
from accel.comm._headers import start_gathered, start_range
from accel.comm._order import Met
from accel.comm._rounds import Combine
from accel.errors import describe

_MOST_BYTES = 8192
_LEAST_BYTES = 512
_RECEIVED_BYTES = 64 * 1024  # by each rank from all others together, between these limits
_REDUCED_BYTES = 1024


def inline_bytes(comm: Comm) -> int:
    """Return the room for a payload that all ranks receive in the first message, in bytes; 0 in a large group.

    It is a multiple of 16, equal on all ranks.
    """
    return 0 if comm.is_large else _message_bytes(comm) - HEADER_BYTES


def reduced_bytes(comm: Comm) -> int:
    """Return the room for a payload that is reduced in the first message, in bytes; 0 in a small group.

    It is a multiple of 16, equal on all ranks. Messages through a device's memory have none.
    """
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
    """Send the first message of a call; return a function that waits for those of all ranks. A collective.

    Args:
        comm: an open handle of more than one rank.
        call: the expected call of all ranks.
        message: from `blank`, filled with as much of the payload as fits; None for no payload.
        payload_bytes: size of the whole payload.
        variant: facts that may differ between ranks of one call; a hash of them above 16 bytes.
        combine: reduces payloads in a large group; None for no payload there.
        failure: this rank's encoded error, sent in place of a payload; empty without one.
        cause: the error itself, the cause of the error raised here.

    Raises:
        CollectiveMismatch: ranks made different calls, or this call and the one before in different orders; on every
            rank, by the returned function.
        AccelError: a rank failed; the same error on every rank, by the returned function.
    """
    sent = blank(comm) if message is None else message
    if failure:
        payload_bytes, variant = len(failure), failure
    place = call_place() if call.ordered else b""
    head = Head(fingerprint(call.name, call.detail), variant, payload_bytes, place, bool(failure))
    earlier = comm.met
    if call.ordered:
        comm.met = None
    if comm.is_large:
        return _start_large(comm, call, sent, head, earlier, combine, failure, cause)
    fill(sent, failure)
    write_head(sent, head)
    arrive = start_gathered(comm, sent)

    def wait() -> Answers:
        answers, heads = arrive()
        if heads:
            _raise_differences(comm, call, heads, answers, failure, cause)
            if call.ordered:
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


def _start_large(
    comm: Comm,
    call: Call,
    sent: bytearray,
    head: Head,
    earlier: Met | None,
    combine: Combine | None,
    failure: bytes,
    cause: BaseException | None,
) -> Callable[[], Answers]:
    """Reduce the first messages; gather the headers of all ranks only to report an error."""
    head = head._replace(order=right_order(comm, earlier, head))
    write_head(sent, head)
    own = sent[:HEADER_BYTES]
    arrive = start_range(comm, sent, combine)

    def wait() -> Answers:
        lowest, highest, reduced = arrive()
        if highest.failed or lowest.fingerprint != highest.fingerprint:
            answers, heads = start_gathered(comm, own)()
            _raise_differences(comm, call, heads, answers, failure, cause)
        if lowest.place != highest.place:
            check_reduced_order(comm, call, earlier, head, 0 < lowest.order == highest.order)
        even = lowest.payload_bytes == highest.payload_bytes
        sizes = [highest.payload_bytes] * comm.size if even else []
        return Answers(lowest.is_like(highest), highest.payload_bytes, sizes, bytearray(), reduced)

    return wait


def _raise_differences(
    comm: Comm, call: Call, heads: list[Head], answers: Answers, failure: bytes, cause: BaseException | None
) -> None:
    if any(head.failed for head in heads):
        raise_failure(comm, heads, answers, failure, cause)
    if any(head.fingerprint != heads[0].fingerprint for head in heads):
        raise_mismatch(comm, call, heads)


def _message_bytes(comm: Comm) -> int:
    share = _RECEIVED_BYTES // comm.size // HEADER_BYTES * HEADER_BYTES
    return max(_LEAST_BYTES, min(share, _MOST_BYTES))


def _sendable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()  # file names may hold bytes that UTF-8 cannot encode
