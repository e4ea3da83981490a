# SPDX-License-Identifier: Apache-2.0
"""The first message of every call: of fixed size, with a fingerprint of the call and room for a small payload.

Its size does not depend on the call. Ranks that make different calls therefore meet in it, compare fingerprints, and
all raise `CollectiveMismatch`. The same message carries a rank's failure to the others. Every rank receives one from
each, so messages are smaller among many ranks.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple, NoReturn

import msgspec
import torch

from accel.comm._call import Call, call_place, call_trace
from accel.comm._handle import Comm
from accel.comm._order import Met, Step, are_branches, crossed, steps
from accel.comm._torch import all_gather_flat, gather_bytes, start_all_gather
from accel.errors import CollectiveMismatch, ErrorRecord, describe, rebuild

_MOST_BYTES = 8192
_LEAST_BYTES = 512
_RECEIVED_BYTES = 64 * 1024  # by each rank from all others together, between these limits

_HEADER = struct.Struct("<16s16sQ?8s15x")  # the fields of _Head
HEADER_BYTES = _HEADER.size  # a multiple of 16


class _Head(NamedTuple):
    fingerprint: bytes
    variant: bytes
    payload_bytes: int
    failed: bool
    place: bytes


class Answers(NamedTuple):
    """All ranks' first messages.

    Attributes:
        same: whether all ranks sent one variant and payloads of one size.
        sizes: bytes of each rank's payload.
        received: the messages, of equal length, one after another; a payload begins at HEADER_BYTES. Read-only, as
            ranks of one process share it.
    """

    same: bool
    sizes: list[int]
    received: bytearray

    @property
    def inline(self) -> torch.Tensor:
        """The inline payloads: uint8, shape [size, inline_bytes(comm)], on the CPU."""
        return torch.frombuffer(self.received, dtype=torch.uint8).view(len(self.sizes), -1)[:, HEADER_BYTES:]

    def payload(self, rank: int) -> bytes:
        """Copy the inline payload of one rank."""
        begin = len(self.received) // len(self.sizes) * rank + HEADER_BYTES
        return bytes(self.received[begin : begin + self.sizes[rank]])

    def elements(self, dtype: torch.dtype, start: int, count: int) -> torch.Tensor:
        """View the elements at one offset of all payloads.

        Args:
            dtype: of the elements.
            start: offset in each payload, in bytes; a multiple of 16.
            count: number of elements in each payload.

        Returns:
            Shape [size, count], on the CPU.
        """
        ranks = len(self.sizes)
        size = dtype.itemsize
        stride = len(self.received) // ranks
        return torch.frombuffer(self.received, dtype=dtype).as_strided(
            (ranks, count), (stride // size, 1), (HEADER_BYTES + start) // size
        )


class _Arrived(NamedTuple):
    """All ranks' first messages; their headers only where these differ or report a failure."""

    answers: Answers
    heads: list[_Head]


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
    fingerprint = _fingerprint(call.name, call.detail)
    place = call_place() if call.ordered else b""
    _HEADER.pack_into(sent, 0, fingerprint, _digest(variant), payload_bytes, bool(failure), place)
    earlier = comm.met
    if call.ordered:
        comm.met = None
    arrive = _start_exchange(comm, sent)

    def wait() -> Answers:
        answers, heads = arrive()
        if any(head.failed for head in heads):
            _raise_failure(comm, heads, answers, failure, cause)
        if any(head.fingerprint != heads[0].fingerprint for head in heads):
            _raise_mismatch(comm, call, heads)
        if heads and call.ordered:
            _check_order(comm, call, earlier, heads)
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


def as_bytes(data: torch.Tensor) -> bytes:
    """Copy a uint8 tensor on the CPU to bytes."""
    data = data.contiguous()
    return ctypes.string_at(data.data_ptr(), data.numel())


def as_tensor(data: bytes) -> torch.Tensor:
    """Copy bytes to a uint8 tensor on the CPU."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


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
    first = _Head._make(_HEADER.unpack(header))
    if not first.failed and all(received.startswith(header, rank * length) for rank in range(1, ranks)):
        return _Arrived(Answers(True, [first.payload_bytes] * ranks, received), [])
    heads = [_Head._make(_HEADER.unpack_from(received, rank * length)) for rank in range(ranks)]
    same = all(head[:-1] == first[:-1] for head in heads)
    return _Arrived(Answers(same, [head.payload_bytes for head in heads], received), heads)


def _raise_failure(
    comm: Comm, heads: list[_Head], answers: Answers, failure: bytes, cause: BaseException | None
) -> NoReturn:
    rank = next(i for i, head in enumerate(heads) if head.failed)
    size = heads[rank].payload_bytes
    data = answers.inline[rank, :size]
    if size > data.numel():
        mine = as_tensor(failure if comm.rank == rank else b"")
        gathered = gather_bytes(comm, mine, [size if i == rank else 0 for i in range(comm.size)])
        assert gathered is not None  # without dst
        data = gathered
    record = msgspec.json.decode(as_bytes(data), type=ErrorRecord)
    if any(head[1:-1] != heads[rank][1:-1] for head in heads):
        record = msgspec.structs.replace(record, problem=f"rank {rank}: {record.problem}")
    raise rebuild(record) from cause


def _raise_mismatch(comm: Comm, call: Call, heads: list[_Head]) -> NoReturn:
    other = next(i for i, head in enumerate(heads) if head.fingerprint != heads[0].fingerprint)
    detail = call.explain() if call.explain is not None else call.detail
    texts = _texts(comm, f"{call.label}\n{call.name}\n{detail}".encode(errors="backslashreplace"), (0, other))
    (label, *left), (other_label, *right) = (text.decode().split("\n") for text in texts)
    differing = ((a, b) for a, b in zip_longest(left, right, fillvalue="nothing") if a != b)
    ours, theirs = next(differing, ("", "")) if left[0] == right[0] else ("", "")
    way = call.hint(ours, theirs) if call.hint is not None else ""
    raise CollectiveMismatch(
        "ranks disagree about the call they make together",
        expected=f"rank 0: {label}" + f" ({ours})" * bool(ours),
        got=f"rank {other}: {other_label}" + f" ({theirs})" * bool(theirs),
        fix=way or "Let every rank make the same calls, in the same order, with the same structure.",
    )


def _check_order(comm: Comm, call: Call, earlier: Met | None, heads: list[_Head]) -> None:
    """Raise `CollectiveMismatch` if ranks made this call and the one before in opposite orders. A collective then."""
    places = [head.place for head in heads]
    if places.count(places[0]) == len(places):
        return
    now = Met(heads[0].fingerprint, places, call_trace())
    comm.met = now
    ranks = crossed(earlier, now)
    if earlier is None or ranks is None:
        return
    mine = (steps(earlier.trace), steps(now.trace))
    texts = _texts(comm, msgspec.json.encode(mine), ranks)
    left, right = (msgspec.json.decode(text, type=tuple[list[Step], list[Step]]) for text in texts)
    if are_branches(left, right):
        return
    expected, got = (
        f"rank {rank}: {call.name} at {before[-1].text}, then at {after[-1].text}"
        for rank, (before, after) in zip(ranks, (left, right), strict=True)
    )
    raise CollectiveMismatch(
        "two calls of one kind were made in opposite orders, and each met the other",
        expected=expected,
        got=got,
        fix="Make them in the same order on every rank, or send all values as one dict in one call. Calls that belong "
        'together from different lines say so by the same `tag="..."`.',
    )


def _texts(comm: Comm, mine: bytes, ranks: Sequence[int]) -> list[bytes]:
    """Gather texts of some ranks on every rank. A collective."""
    text = as_tensor(mine if comm.rank in ranks else b"")
    length = torch.tensor([text.numel()], dtype=torch.int64, device=comm.control)
    sizes = [int(size) for size in all_gather_flat(comm, length).flatten()]
    gathered = gather_bytes(comm, text, sizes)
    assert gathered is not None  # without dst
    parts = torch.split(gathered, sizes)
    return [as_bytes(parts[rank]) for rank in ranks]


def _message_bytes(comm: Comm) -> int:
    share = _RECEIVED_BYTES // comm.size // HEADER_BYTES * HEADER_BYTES
    return max(_LEAST_BYTES, min(share, _MOST_BYTES))


@functools.lru_cache(maxsize=64)
def _fingerprint(name: str, detail: str) -> bytes:
    return _digest(f"{name}\n{detail}".encode())


def _digest(data: bytes) -> bytes:
    return data if len(data) <= 16 else hashlib.blake2b(data, digest_size=16).digest()


def _sendable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()  # file names may hold bytes that UTF-8 cannot encode
