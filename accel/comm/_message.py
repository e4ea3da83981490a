# SPDX-License-Identifier: Apache-2.0
"""The first message of every call: of fixed size, with a fingerprint of the call and room for a small payload.

Because it has the same size whatever the call, ranks that call different things still meet in it, see each other's
fingerprints, and all raise `CollectiveMismatch`. The same message carries a rank's failure to the others. Each rank
gets one from each, so it is smaller where there are many.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Callable
from itertools import zip_longest
from typing import NamedTuple, NoReturn

import msgspec
import torch

from accel.comm._call import Call
from accel.comm._handle import Comm
from accel.comm._torch import all_gather_flat, gather_bytes, start_all_gather
from accel.errors import CollectiveMismatch, ErrorRecord, describe, rebuild

_MOST_BYTES = 8192
_LEAST_BYTES = 512
_RECEIVED_BYTES = 64 * 1024  # by a rank from all, between these limits

_HEADER = struct.Struct("<16s16sQ?23x")  # the fields of _Head
HEADER_BYTES = _HEADER.size  # a multiple of 16


class _Head(NamedTuple):
    fingerprint: bytes
    variant: bytes
    payload_bytes: int
    failed: bool


class Answers(NamedTuple):
    """All ranks' first messages.

    Attributes:
        same: whether all ranks sent the same variant and equally many bytes.
        sizes: bytes of each rank's payload.
        inline: the payloads as far as they fit, uint8, shape [size, inline_bytes(comm)], on the CPU.
    """

    same: bool
    sizes: list[int]
    inline: torch.Tensor


def inline_bytes(comm: Comm) -> int:
    """The bytes of a payload that fit the first message, the same on all ranks; a multiple of 16."""
    return _message_bytes(comm) - HEADER_BYTES


def start(
    comm: Comm,
    call: Call,
    payload: torch.Tensor,
    *,
    variant: bytes = b"",
    failed: bool = False,
    cause: BaseException | None = None,
) -> Callable[[], Answers]:
    """Send the first message of a call, and return what waits for those of the other ranks. A collective.

    Args:
        comm: an open handle of more than one rank.
        call: what this rank believes that all ranks are calling.
        payload: uint8, shape [bytes], on the CPU; what fits of it is sent.
        variant: what may differ between ranks of one call; compared in full if it is longer than 16 bytes.
        failed: whether this rank failed before the call; the payload is its error.
        cause: the error itself, to be the cause of what is raised here.

    Raises:
        CollectiveMismatch: ranks made different calls; on every rank, by the function returned.
        AccelError: a rank failed; the same error on every rank, by the function returned.
    """
    length = _message_bytes(comm)
    data, room = bytearray(length), bytearray(length * comm.size)
    fingerprint = _digest(f"{call.name}\n{call.detail}".encode())
    _HEADER.pack_into(data, 0, fingerprint, _digest(variant), payload.numel(), failed)
    message, rows = torch.frombuffer(data, dtype=torch.uint8), torch.frombuffer(room, dtype=torch.uint8)
    if payload.numel():
        fitting = payload[: length - HEADER_BYTES]
        message[HEADER_BYTES : HEADER_BYTES + fitting.numel()] = fitting
    on_cpu = comm.control.type == "cpu"
    sent, arriving = (message, rows) if on_cpu else (message.to(comm.control), rows.to(comm.control))
    arrive = start_all_gather(comm, arriving, sent)

    def wait() -> Answers:
        arrive()
        if not on_cpu:
            _ = rows.copy_(arriving)
        received = rows.view(comm.size, length)
        headers, inline = as_bytes(received[:, :HEADER_BYTES]), received[:, HEADER_BYTES:]
        if not failed and headers == bytes(data[:HEADER_BYTES]) * comm.size:
            return Answers(True, [payload.numel()] * comm.size, inline)
        heads = list(map(_Head._make, _HEADER.iter_unpack(headers)))
        if any(head.failed for head in heads):
            _raise_failure(comm, heads, payload, inline, cause)
        if any(head.fingerprint != heads[0].fingerprint for head in heads):
            _raise_mismatch(comm, call, heads)
        return Answers(False, [head.payload_bytes for head in heads], inline)

    return wait


def fail(comm: Comm, call: Call, error: BaseException) -> NoReturn:
    """Tell all ranks, whatever they are calling, that this one failed; every rank raises the same error. A collective.

    Raises:
        AccelError: always: this rank's error, or the lowest failing rank's, with the rank unless all failed alike.
    """
    if comm.size == 1:
        raise error
    record = describe(error)
    texts = {name: _sendable(getattr(record, name)) for name in ("problem", "expected", "got", "where", "fix")}
    data = msgspec.json.encode(msgspec.structs.replace(record, **texts))
    _ = start(comm, call, as_tensor(data), variant=data, failed=True, cause=error)()
    raise error


def as_bytes(data: torch.Tensor) -> bytes:
    """Copy a uint8 tensor on the CPU out as bytes."""
    data = data.contiguous()
    return ctypes.string_at(data.data_ptr(), data.numel())


def as_tensor(data: bytes) -> torch.Tensor:
    """Copy bytes into a uint8 tensor on the CPU."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _raise_failure(
    comm: Comm, heads: list[_Head], payload: torch.Tensor, inline: torch.Tensor, cause: BaseException | None
) -> NoReturn:
    rank = next(i for i, head in enumerate(heads) if head.failed)
    size = heads[rank].payload_bytes
    data = inline[rank, :size]
    if size > inline.shape[1]:
        mine = payload if comm.rank == rank else payload.new_empty(0)
        data = gather_bytes(comm, mine, [size if i == rank else 0 for i in range(comm.size)])
        assert data is not None  # all ranks want it
    record = msgspec.json.decode(as_bytes(data), type=ErrorRecord)
    if any(head[1:] != heads[rank][1:] for head in heads):
        record = msgspec.structs.replace(record, problem=f"rank {rank}: {record.problem}")
    raise rebuild(record) from cause


def _raise_mismatch(comm: Comm, call: Call, heads: list[_Head]) -> NoReturn:
    other = next(i for i, head in enumerate(heads) if head.fingerprint != heads[0].fingerprint)
    text = b""
    if comm.rank in (0, other):
        detail = call.explain() if call.explain is not None else call.detail
        text = f"{call.label}\n{call.name}\n{detail}".encode(errors="backslashreplace")
    mine = torch.tensor([len(text)], dtype=torch.int64, device=comm.control)
    sizes = [int(length) for length in all_gather_flat(comm, mine).flatten()]
    gathered = gather_bytes(comm, as_tensor(text), sizes)
    assert gathered is not None  # all ranks want it
    texts = torch.split(gathered, sizes)
    (label, *left), (other_label, *right) = (as_bytes(texts[i]).decode().split("\n") for i in (0, other))
    differing = ((a, b) for a, b in zip_longest(left, right, fillvalue="nothing") if a != b)
    ours, theirs = next(differing, ("", "")) if left[0] == right[0] else ("", "")
    raise CollectiveMismatch(
        "ranks disagree about the call they make together",
        expected=f"rank 0: {label}" + f" ({ours})" * bool(ours),
        got=f"rank {other}: {other_label}" + f" ({theirs})" * bool(theirs),
        fix="Let every rank make the same calls, in the same order, with the same structure.",
    )


def _message_bytes(comm: Comm) -> int:
    share = _RECEIVED_BYTES // comm.size // HEADER_BYTES * HEADER_BYTES
    return max(_LEAST_BYTES, min(share, _MOST_BYTES))


def _digest(data: bytes) -> bytes:
    return data if len(data) <= 16 else hashlib.blake2b(data, digest_size=16).digest()


def _sendable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()  # file names can hold what UTF-8 cannot
