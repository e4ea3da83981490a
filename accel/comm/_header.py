# SPDX-License-Identifier: Apache-2.0
"""First messages as bytes: the fingerprint of a call, all ranks' answers, and the errors when they differ."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
import zlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple, NoReturn

import msgspec
import torch

from accel.comm._call import (
    Call,
    FirstValue,
    Met,
    TakenStep,
    TraceLevel,
    are_branches,
    call_trace,
    crossed,
    first_difference,
    steps,
)
from accel.comm._group import Comm
from accel.comm._torch import all_gather_flat, gather_bytes
from accel.errors import CollectiveMismatch
from accel.errors._base import ErrorRecord, rebuild
from accel.terminal import show_names

_LAYOUT = struct.Struct("<16s16sQ8sI3x?Q")  # the fields of Head; `failed` is the highest byte of its word
HEADER_BYTES = _LAYOUT.size  # a multiple of 16
# Large groups only reduce headers by the minimum; the maximum is the complement of the complements' minimum.
_ONES = (1 << 8 * HEADER_BYTES) - 1


class Head(NamedTuple):
    """One rank's header."""

    fingerprint: bytes  # hash of the call's name and detail
    variant: bytes  # facts that may differ between ranks of one call, or a hash of them
    payload_bytes: int  # size of the payload
    place: bytes = b""  # code place of the call; empty where its order does not matter
    steps: int = 0  # digest of the optimizer steps that the rank has taken with the group
    failed: bool = False  # whether the payload is this rank's error
    # Number of the comparison in which ranks' orders of this call and the one before proved right; 0 for none.
    order: int = 0

    def is_like(self, other: Head) -> bool:
        """Return whether two ranks sent payloads of one size and variant, or errors alike."""
        return self[:3] == other[:3] and self.failed == other.failed


def write_head(message: bytearray, head: Head) -> None:
    """Write a header to the begin of a message; the variant is hashed above 16 bytes."""
    _LAYOUT.pack_into(message, 0, *head._replace(variant=_digest(head.variant)))


def read_head(message: bytes | bytearray, offset: int = 0) -> Head:
    """Read the header at an offset."""
    return Head._make(_LAYOUT.unpack_from(message, offset))


def complement(header: bytes | bytearray) -> bytes:
    """Invert all bits of a header, so that the minimum of complements is the complement of the maximum."""
    return (int.from_bytes(header, "little") ^ _ONES).to_bytes(HEADER_BYTES, "little")


# A loop makes the same few calls; hashing costs more than the rest of a header.
@functools.lru_cache(maxsize=64)
def fingerprint(name: str, detail: str) -> bytes:
    """Hash a call's name and detail to at most 16 bytes."""
    return _digest(f"{name}\n{detail}".encode())


def _digest(data: bytes) -> bytes:
    return data if len(data) <= 16 else hashlib.blake2b(data, digest_size=16).digest()


class Answers(NamedTuple):
    """All ranks' first messages."""

    same: bool  # whether all ranks sent one variant and payloads of one size
    most: int  # bytes of the largest payload
    sizes: list[int]  # bytes of each rank's payload; empty in a large group where they differ
    # The messages, of equal length, one after another; a payload begins at HEADER_BYTES. Empty in a large group.
    # Read-only, as ranks of one process share it.
    received: bytearray
    # Bytes of the payloads, reduced; uint8, shape [reduced_bytes(comm)]. None in a small group. Read-only.
    reduced: torch.Tensor | None = None

    @property
    def inline(self) -> torch.Tensor:
        """The inline payloads: uint8, shape [size, inline_bytes(comm)], on the CPU."""
        return torch.frombuffer(self.received, dtype=torch.uint8).view(len(self.sizes), -1)[:, HEADER_BYTES:]

    def payload(self, rank: int) -> bytes:
        """Copy the inline payload of one rank."""
        begin = len(self.received) // len(self.sizes) * rank + HEADER_BYTES
        return bytes(self.received[begin : begin + self.sizes[rank]])

    def elements(self, dtype: torch.dtype, start: int, count: int) -> torch.Tensor:
        """View the elements at a byte offset of all payloads, a multiple of 16: shape [size, count], on the CPU."""
        ranks = len(self.sizes)
        size = dtype.itemsize
        stride = len(self.received) // ranks
        # a view across the messages: no copy for each rank
        return torch.frombuffer(self.received, dtype=dtype).as_strided(
            (ranks, count), (stride // size, 1), (HEADER_BYTES + start) // size
        )


def as_bytes(data: torch.Tensor) -> bytes:
    """Copy a uint8 tensor on the CPU to bytes."""
    # one copy, without NumPy, which is no requirement
    data = data.contiguous()
    return ctypes.string_at(data.data_ptr(), data.numel())


def as_tensor(data: bytes) -> torch.Tensor:
    """Copy bytes to a uint8 tensor on the CPU."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    # a bytearray, as torch warns about tensors on immutable bytes
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def raise_failure(
    comm: Comm, heads: list[Head], answers: Answers, failure: bytes, cause: BaseException | None
) -> NoReturn:
    """Raise the lowest failing rank's error. A collective if the error is longer than a first message."""
    comm.steps.clear()  # the error may have come between two ranks' decisions about a step; all know it now
    rank = next(i for i, head in enumerate(heads) if head.failed)
    size = heads[rank].payload_bytes
    data = answers.inline[rank, :size]
    # all ranks know from the headers that the error was cut, so all gather the rest
    if size > data.numel():
        mine = as_tensor(failure if comm.rank == rank else b"")
        gathered = gather_bytes(comm, mine, [size if i == rank else 0 for i in range(comm.size)])
        assert gathered is not None  # without dst
        data = gathered
    record = msgspec.json.decode(as_bytes(data), type=ErrorRecord)
    if any((head.failed, head.variant) != (True, heads[rank].variant) for head in heads):
        record = msgspec.structs.replace(record, problem=f"rank {rank}: {record.problem}")
    raise rebuild(record) from cause


def raise_mismatch(comm: Comm, call: Call, heads: list[Head]) -> NoReturn:
    """Raise `CollectiveMismatch` for rank 0's call and the first that differs from it. A collective."""
    other = next(i for i, head in enumerate(heads) if head.fingerprint != heads[0].fingerprint)
    detail = call.explain() if call.explain is not None else call.detail
    # only the two ranks that the error quotes send their texts
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


def check_steps(comm: Comm, call: Call, heads: list[Head]) -> None:
    """Raise `CollectiveMismatch` if ranks have decided differently about an optimizer step. A collective then."""
    other = next((i for i, head in enumerate(heads) if head.steps != heads[0].steps), None)
    if other is None:
        return
    texts = _texts(comm, msgspec.json.encode(comm.steps.latest()), (0, other))
    comm.steps.clear()  # else a caller that continues would meet this error at every later call
    kept = [msgspec.json.decode(text, type=list[TakenStep]) for text in texts]
    left, right = first_difference(*kept)
    raise CollectiveMismatch(
        "ranks have decided differently about an optimizer step, and hold different models since",
        expected=f"rank 0: {left or 'no further step'}",
        got=f"rank {other}: {right or 'no further step'}",
        where=call.label,
        fix="Resume from an earlier checkpoint. Gradients were equal after their exchange: look for code that "
        "edits .grad on one rank, for a rank with more steps, and for a faulty device.",
    )


def check_values(comm: Comm, call: Call, values: Sequence[FirstValue]) -> None:
    """Raise `CollectiveMismatch` if ranks that hold the same parameters noted other values. A collective.

    Args:
        comm: handle of the ranks.
        call: the message that compares.
        values: from `StepLog.take_values`.
    """
    held: dict[str, list[tuple[str, int]]] = {}  # names and bits, for each set of holders
    for each in values:  # of several models, which may have the same names
        held.setdefault(each.holders, []).append((each.name, each.bits))
    # sorted, as the optimizers of two ranks may list their parameters in different orders
    mine = {holders: zlib.crc32(msgspec.json.encode(sorted(named))) for holders, named in held.items()}
    first: dict[str, tuple[int, int]] = {}  # the first rank of each set of holders, and its digest
    for rank, text in enumerate(_texts(comm, msgspec.json.encode(mine), range(comm.size))):
        for holders, digest in msgspec.json.decode(text, type=dict[str, int]).items():
            other, expected = first.setdefault(holders, (rank, digest))
            if digest != expected:
                comm.steps.clear()
                raise _different_replicas(comm, call, (other, rank), held.get(holders, []))


def _different_replicas(
    comm: Comm, call: Call, ranks: tuple[int, int], named: Sequence[tuple[str, int]]
) -> CollectiveMismatch:
    """Make the error for two ranks with other bits of the parameters that both hold. A collective."""
    texts = _texts(comm, msgspec.json.encode(named), ranks)
    left, right = (msgspec.json.decode(text, type=list[tuple[str, int]]) for text in texts)
    differing = set(left) ^ set(right)
    names = list(dict.fromkeys(each[0] for each in [*left, *right] if each in differing))
    return CollectiveMismatch(
        "ranks held different parameters before the first optimizer step, and train different models since",
        expected="the values that prepare sent from rank 0, or changes that are alike on every rank",
        got=f"other values on rank {ranks[1]} than on rank {ranks[0]} of {show_names(names)}",
        where=call.label,
        fix="Load files and draw initial values before accel.prepare, or alike on every rank. If the forward sets"
        " parameters from its batch, as a data-dependent initialization does, run one forward before accel.prepare.",
    )


def check_order(comm: Comm, call: Call, earlier: Met | None, heads: list[Head]) -> None:
    """Raise `CollectiveMismatch` if ranks made this call and the one before in opposite orders. A collective then."""
    places = [head.place for head in heads]
    if places.count(places[0]) == len(places):
        return  # the headers only differ in size or variant
    now = Met(heads[0].fingerprint, places, call_trace())
    comm.met = now
    ranks = crossed(earlier, now)
    if earlier is not None and ranks is not None:
        _check_traces(comm, call, earlier, now, ranks)


def right_order(comm: Comm, earlier: Met | None, head: Head) -> int:
    """Return the number of the last comparison in which this rank made this call after the one before; 0 for none."""
    if earlier is None or earlier.fingerprint != head.fingerprint:
        return 0
    return comm.right_orders.get((head.fingerprint, earlier.places[0], head.place), 0)


def check_reduced_order(comm: Comm, call: Call, earlier: Met | None, head: Head, is_right: bool) -> None:
    """Do as `check_order` in a large group where the places of a call differ. A collective unless they are known.

    `is_right`: an earlier comparison had the same places on all ranks, and passed.
    """
    now = Met(head.fingerprint, [head.place], call_trace())
    comm.met = now
    if earlier is None or earlier.fingerprint != now.fingerprint or is_right:
        return
    before, place = earlier.places[0], head.place
    pairs = [as_bytes(row) for row in all_gather_flat(comm, as_tensor(before + place).to(comm.control)).cpu()]
    befores = [pair[: len(before)] for pair in pairs]
    places = [pair[len(before) :] for pair in pairs]
    ranks = crossed(earlier._replace(places=befores), now._replace(places=places))
    if ranks is not None:
        _check_traces(comm, call, earlier, now, ranks)
    else:
        # the number is alike on all ranks, so that the next headers show whether all compared the same places
        comm.right_orders[head.fingerprint, before, place] = comm.next_number()


def _check_traces(comm: Comm, call: Call, earlier: Met, now: Met, ranks: tuple[int, int]) -> None:
    """Raise `CollectiveMismatch` unless two crossed calls are branches. A collective."""
    mine = (steps(earlier.trace), steps(now.trace))
    texts = _texts(comm, msgspec.json.encode(mine), ranks)
    left, right = (msgspec.json.decode(text, type=tuple[list[TraceLevel], list[TraceLevel]]) for text in texts)
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
        fix="Make them in the same order on every rank, or send all values as one dict in one call. Give calls of "
        'different lines that belong together the same `tag="..."`.',
    )


def _texts(comm: Comm, mine: bytes, ranks: Sequence[int]) -> list[bytes]:
    """Gather texts of some ranks on every rank. A collective."""
    text = as_tensor(mine if comm.rank in ranks else b"")
    # texts exceed any fixed size, and errors may take a second message
    length = torch.tensor([text.numel()], dtype=torch.int64, device=comm.control)
    sizes = [int(size) for size in all_gather_flat(comm, length).flatten()]
    gathered = gather_bytes(comm, text, sizes)
    assert gathered is not None  # without dst
    parts = torch.split(gathered, sizes)
    return [as_bytes(parts[rank]) for rank in ranks]
