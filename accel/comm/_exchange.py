# SPDX-License-Identifier: Apache-2.0
"""One checked message per call: header, fingerprint and small payloads in an all-gather of fixed size.

Because the first message has the same size whatever the call, ranks that call different things still meet in it, see
each other's fingerprints, and all raise `CollectiveMismatch`. The same message carries a rank's failure to the others.
Only payloads that do not fit need a second message, whose size every rank then knows.
"""

from __future__ import annotations

import ctypes
import hashlib
import os.path
import struct
import sys
from typing import NamedTuple, NoReturn, TypeVar

import msgspec
import torch

from accel.comm._handle import Comm
from accel.comm._torch import all_gather_flat
from accel.errors import CollectiveMismatch, ErrorRecord, PeerError, describe, rebuild

T = TypeVar("T")

EAGER_BYTES = 4096
HEADER_BYTES = 320
INLINE_BYTES = EAGER_BYTES - HEADER_BYTES

_HEADER = struct.Struct("<4s16sQ?H")  # magic, fingerprint, payload bytes, failed, label bytes
_MAGIC = b"acc1"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class _Head(NamedTuple):
    magic: bytes
    fingerprint: bytes
    payload_bytes: int
    failed: bool
    label_bytes: int


class Call(msgspec.Struct, frozen=True):
    """A call that all ranks make together.

    Attributes:
        name: the public function's name.
        detail: what must agree between ranks, one fact a line; the first that differs is reported.
        site: file, line and function of the caller.
    """

    name: str
    detail: str = ""
    site: str = ""


def call_site() -> str:
    """Return "file:line in function" of the nearest caller outside this package."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_PACKAGE) or frame.f_code.co_filename.endswith("contextlib.py")
    ):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def exchange(comm: Comm, call: Call, payload: torch.Tensor) -> list[torch.Tensor]:
    """Give every rank's payload to every rank. A collective.

    Args:
        comm: an open handle.
        call: what this rank believes that all ranks are calling.
        payload: bytes, shape [length], dtype uint8, on the CPU; lengths may differ between ranks.

    Returns:
        The payloads by rank, uint8 on the CPU.

    Raises:
        CollectiveMismatch: ranks made different calls; on every rank.
        AccelError: a rank called `fail`; the same error on every rank.
    """
    if comm.size == 1:
        comm.check_open()
        return [payload]
    return _exchange(comm, call, payload, failed=False)


def exchange_values(comm: Comm, call: Call, value: T, kind: type[T]) -> list[T]:
    """Give every rank's value to every rank, as JSON. A collective; see `exchange`.

    Args:
        comm: an open handle.
        call: what this rank believes that all ranks are calling.
        value: anything that msgspec encodes.
        kind: its type, checked on arrival.
    """
    payload = torch.frombuffer(bytearray(msgspec.json.encode(value)), dtype=torch.uint8)
    return [msgspec.json.decode(_bytes(part), type=kind) for part in exchange(comm, call, payload)]


def fail(comm: Comm, call: Call, error: BaseException) -> NoReturn:
    """Tell all ranks, whatever they are calling, that this one failed; every rank raises the same error. A collective.

    Raises:
        AccelError: always: this rank's error, or the lowest failing rank's.
    """
    if comm.size == 1:
        raise error
    _exchange(comm, call, _failure(error), failed=True, cause=error)
    raise error


def _exchange(
    comm: Comm, call: Call, payload: torch.Tensor, *, failed: bool, cause: BaseException | None = None
) -> list[torch.Tensor]:
    message, label = torch.zeros(EAGER_BYTES, dtype=torch.uint8), f"{call.name} at {call.site}".encode(errors="replace")
    label = label[: HEADER_BYTES - _HEADER.size]
    fingerprint = hashlib.blake2b(f"{call.name}\n{call.detail}".encode(), digest_size=16).digest()
    header = _HEADER.pack(_MAGIC, fingerprint, payload.numel(), failed, len(label)) + label
    message[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    inline = min(payload.numel(), INLINE_BYTES)
    message[HEADER_BYTES : HEADER_BYTES + inline] = payload[:inline]
    rows = _gather_rows(comm, call, message)
    heads = [_Head._make(_HEADER.unpack(_bytes(row[: _HEADER.size]))) for row in rows]
    if any(head.failed for head in heads):
        _raise_failure(comm, rows, heads, cause)
    if len({head.fingerprint for head in heads}) > 1:
        _raise_mismatch(comm, call, rows, heads)
    sizes = [head.payload_bytes for head in heads]
    if max(sizes) <= INLINE_BYTES:
        return [row[HEADER_BYTES : HEADER_BYTES + size] for row, size in zip(rows, sizes, strict=True)]
    return _gather_bytes(comm, call, payload, sizes)


def _failure(error: BaseException) -> torch.Tensor:
    """The error as bytes that fit into the first message, with its kind; what is too long of its texts is cut."""
    record, limit = describe(error), INLINE_BYTES
    while True:
        texts = {name: _cut(getattr(record, name), limit) for name in ("problem", "expected", "got", "where", "fix")}
        data = msgspec.json.encode(msgspec.structs.replace(record, **texts))
        if len(data) <= INLINE_BYTES:
            return torch.frombuffer(bytearray(data), dtype=torch.uint8)
        limit //= 2


def _cut(text: str, limit: int) -> str:
    text = text.encode(errors="backslashreplace").decode()  # file names can hold what UTF-8 cannot
    return text if len(text) <= limit else f"{text[:limit]} [cut]"


def _gather_rows(comm: Comm, call: Call, mine: torch.Tensor) -> torch.Tensor:
    try:
        return all_gather_flat(comm, mine.to(comm.control)).cpu()
    except PeerError as error:  # say which call was left alone
        where = f"rank {comm.rank}, {call.name} at {call.site}"
        raise PeerError(error.problem, expected=error.expected, where=where, fix=error.fix) from error


def _gather_bytes(comm: Comm, call: Call, payload: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    width = -(-max(sizes) // 16) * 16  # so that every row stays aligned for every dtype
    padded = torch.zeros(width, dtype=torch.uint8)
    padded[: payload.numel()] = payload
    rows = _gather_rows(comm, call, padded)
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]


def _raise_failure(comm: Comm, rows: torch.Tensor, heads: list[_Head], cause: BaseException | None) -> NoReturn:
    rank = next(i for i, head in enumerate(heads) if head.failed)
    data = _bytes(rows[rank, HEADER_BYTES : HEADER_BYTES + heads[rank].payload_bytes])
    record = msgspec.json.decode(data, type=ErrorRecord)
    record = msgspec.structs.replace(record, problem=f"rank {rank}: {record.problem}")
    raise rebuild(record) from cause


def _raise_mismatch(comm: Comm, call: Call, rows: torch.Tensor, heads: list[_Head]) -> NoReturn:
    other = next(i for i, head in enumerate(heads) if head.fingerprint != heads[0].fingerprint)
    labels = [
        _bytes(rows[i, _HEADER.size : _HEADER.size + heads[i].label_bytes]).decode(errors="replace") for i in (0, other)
    ]
    text = bytearray(f"{call.name}\n{call.detail}".encode())
    lengths = all_gather_flat(comm, torch.tensor([len(text)], dtype=torch.int64, device=comm.control))
    sizes = [int(length) for length in lengths.flatten()]
    details = _gather_bytes(comm, call, torch.frombuffer(text, dtype=torch.uint8), sizes)
    left, right = (_bytes(details[i]).decode().split("\n") for i in (0, other))
    longest = max(len(left), len(right))
    left, right = left + ["nothing"] * (longest - len(left)), right + ["nothing"] * (longest - len(right))
    first = next(i for i in range(longest) if left[i] != right[i])
    raise CollectiveMismatch(
        "ranks disagree about the call they make together",
        expected=f"rank 0: {labels[0]}" + f" ({left[first]})" * (first > 0),
        got=f"rank {other}: {labels[1]}" + f" ({right[first]})" * (first > 0),
        fix="Let every rank make the same calls, in the same order, with the same structure.",
    )


def _bytes(data: torch.Tensor) -> bytes:
    assert data.device.type == "cpu" and data.is_contiguous()  # noqa: PT018 - one fact: its memory can be read here
    return ctypes.string_at(data.data_ptr(), data.numel())
