# SPDX-License-Identifier: Apache-2.0
"""All-gathers of payloads, reductions of small values, and work that succeeds on all ranks or raises on all.

Every function but `notes_of_ranks` and `raise_lost` is a collective of checked calls: where ranks make different calls,
each raises `CollectiveMismatch`; where a rank fails, each raises the lowest failing rank's error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, TypeVar

import msgspec
import torch

from accel.comm._call import Call, public_call
from accel.comm._group import Comm
from accel.comm._header import Answers, as_bytes, as_tensor
from accel.comm._lost import StoreAlarm
from accel.comm._message import blank, fail, fill, inline_bytes, reduced_bytes, start
from accel.comm._rounds import peer_error
from accel.comm._torch import all_gather_flat, all_reduce_flat, broadcast_flat, gather_bytes
from accel.errors import AccelError, PeerError
from accel.tensors import integers

T = TypeVar("T")

# Up to this size, payloads of different sizes are filled up to one, with the size in front. That saves a message.
_FILLED_BYTES = 1024
_LENGTH_BYTES = 8


def exchange(comm: Comm, call: Call, payload: torch.Tensor, *, dst: int | None = None) -> list[torch.Tensor]:
    """All-gather byte payloads, uint8 on the CPU, of any lengths. A collective.

    Ranks other than `dst`, which `call` must compare, get an empty list.
    """
    if comm.size == 1:
        comm.check_open()
        return [payload]
    answers = _meet(comm, call, payload)()
    if answers.most > inline_bytes(comm):
        # alike on all ranks, as each has read the same headers
        return _second(comm, answers, payload, dst)
    if dst not in (None, comm.rank):
        return []
    if comm.is_large:  # without room for payloads, so all of them are empty
        return [payload.new_empty(0) for _ in answers.sizes]
    rows = answers.inline if comm.share is None else answers.inline.clone()  # callers may change their payloads
    return [row[:size] for row, size in zip(rows, answers.sizes, strict=True)]


def exchange_values(comm: Comm, call: Call, value: T, kind: type[T], *, dst: int | None = None) -> list[T]:
    """All-gather JSON values. A collective; `call` must compare `dst`, unless it is the same in all such calls."""
    return _start_values(comm, call, value, kind, dst)()


def start_values(comm: Comm, call: Call, value: T, kind: type[T]) -> Callable[[], list[T]]:
    """Begin `exchange_values`; return a function that waits for the values. A collective."""
    return _start_values(comm, call, value, kind, None)


def _start_values(comm: Comm, call: Call, value: T, kind: type[T], dst: int | None) -> Callable[[], list[T]]:
    if comm.size == 1:
        comm.check_open()
        return lambda: [value]
    mine = as_tensor(msgspec.json.encode(value))
    arrive = _meet(comm, call, mine)

    def wait() -> list[T]:
        # A second message begins here, not in the start: ranks must wait for their calls in one order.
        answers = arrive()
        parts: Iterable[bytes] = ()
        if answers.most > inline_bytes(comm):
            parts = map(as_bytes, _second(comm, answers, mine, dst))
        elif dst in (None, comm.rank):
            parts = map(answers.payload, range(comm.size))
        return [msgspec.json.decode(part, type=kind) for part in parts]

    return wait


def _meet(comm: Comm, call: Call, payload: torch.Tensor) -> Callable[[], Answers]:
    """Send as much of a payload as fits in the first message; return a function that waits for all messages."""
    message = blank(comm)
    if room := inline_bytes(comm):
        fill(message, as_bytes(payload[:room]))
    return start(comm, call, message, payload.numel())


def _second(comm: Comm, answers: Answers, payload: torch.Tensor, dst: int | None) -> list[torch.Tensor]:
    """Gather payloads that the first message has no room for."""
    # a small group has all sizes from the headers
    if answers.sizes:
        return _gathered(comm, payload, answers.sizes, dst)
    length = torch.tensor([payload.numel()], dtype=torch.int64, device="cpu")
    if answers.most > _FILLED_BYTES:
        sizes = [int(size) for size in all_gather_flat(comm, length.to(comm.control))]
        return _gathered(comm, payload, sizes, dst)
    # equal rows with the length in front need one message, where sizes and payloads need two
    row = payload.new_zeros(_LENGTH_BYTES + answers.most)
    row[:_LENGTH_BYTES] = length.view(torch.uint8)
    row[_LENGTH_BYTES : _LENGTH_BYTES + payload.numel()] = payload
    rows = _gathered(comm, row, [row.numel()] * comm.size, dst)
    sizes = [int(row[:_LENGTH_BYTES].clone().view(torch.int64)) for row in rows]
    return [row[_LENGTH_BYTES : _LENGTH_BYTES + size] for row, size in zip(rows, sizes, strict=True)]


def _gathered(comm: Comm, payload: torch.Tensor, sizes: list[int], dst: int | None) -> list[torch.Tensor]:
    gathered = gather_bytes(comm, payload, sizes, dst)
    return list(torch.split(gathered, sizes)) if gathered is not None else []


def reduce_ints(comm: Comm, call: Call, numbers: Sequence[int], op: Literal["max", "min"]) -> list[int]:
    """Reduce integers of 64 bits over all ranks, elementwise. A collective; `call` must compare their number."""
    comm.check_open()
    if comm.size == 1:
        return list(numbers)
    mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    # too many for the first message: it only compares the call
    if mine.nbytes > max(inline_bytes(comm), reduced_bytes(comm)):
        _ = start(comm, call)()
        return integers(all_reduce_flat(comm, mine.to(comm.control), op))
    message = blank(comm)
    fill(message, as_bytes(mine.view(torch.uint8)))
    answers = start(
        comm, call, message, mine.nbytes, combine=partial(_in_place, torch.maximum if op == "max" else torch.minimum)
    )()
    if answers.reduced is not None:
        return integers(answers.reduced[: mine.nbytes].view(torch.int64))
    # a small group receives all payloads, and each rank reduces them itself
    rows = answers.elements(torch.int64, 0, mine.numel())
    return integers(rows.amax(0) if op == "max" else rows.amin(0))


def broadcast_bytes(comm: Comm, call: Call, payload: torch.Tensor, *, source: int) -> torch.Tensor:
    """Broadcast bytes of one rank, uint8 on the CPU; other ranks pass an empty payload. A collective.

    `call` must compare `source`.
    """
    if not comm.is_large:
        return exchange(comm, call, payload)[source]
    message = blank(comm)
    fill(message, as_bytes(payload[: reduced_bytes(comm)]))
    # only the source has bytes, so that `or` with the zeros of the others is its payload
    answers = start(comm, call, message, payload.numel(), combine=partial(_in_place, torch.bitwise_or))()
    if answers.reduced is not None and answers.most <= reduced_bytes(comm):
        return answers.reduced[: answers.most].clone()
    # the source sends from the caller's buffer, unchanged until all have it
    received = payload if comm.rank == source else payload.new_empty(answers.most)
    broadcast_flat(comm, received, source=source)
    return received


def broadcast_value(comm: Comm, call: Call, value: T, kind: type[T]) -> T:
    """Broadcast rank 0's value as JSON; other ranks' is ignored. A collective."""
    if comm.size == 1:
        comm.check_open()
        return value
    payload = as_tensor(msgspec.json.encode(value) if comm.rank == 0 else b"")
    return msgspec.json.decode(as_bytes(broadcast_bytes(comm, call, payload, source=0)), type=kind)


def _in_place(function: Callable[..., torch.Tensor], lower: torch.Tensor, upper: torch.Tensor) -> None:
    """Combine integers of 64 bits by an elementwise function of torch."""
    numbers = lower.view(torch.int64)
    _ = function(numbers, upper.view(torch.int64), out=numbers)


@contextlib.contextmanager
def agreed(comm: Comm, call: Call) -> Generator[None]:
    """Run a block that communicates nothing, then wait for all ranks. A collective at the block's end.

    Raises the lowest failing rank's error, with its rank unless all failed alike; not an `AccelError`: as `PeerError`.
    """
    with shared_failure(comm, call):
        yield
    # outside of the scope above: a rank that failed has sent its error in the place of this barrier's message
    barrier(comm, call)


def agreed_values(comm: Comm, call: Call, work: Callable[[], T], kind: type[T], *, dst: int | None = None) -> list[T]:
    """Run work without communication, and gather all ranks' values, or raise as `agreed`. A collective; one `dst`."""
    with shared_failure(comm, call):
        value = work()
    return exchange_values(comm, call, value, kind, dst=dst)


@contextlib.contextmanager
def shared_failure(comm: Comm, call: Call) -> Generator[None]:
    """Run a block that communicates nothing, directly before a collective; its error is raised on every rank.

    The other ranks receive the error in that collective. A collective where the block fails, no message elsewhere.
    """
    try:
        yield
    except Exception as error:  # no BaseException: an interrupt must not wait for other ranks
        fail(comm, call, error)


def notes_of_ranks(comm: Comm, subject: str, note: str) -> Mapping[int, str]:
    """Return a word of each rank that calls this, by rank; of this rank alone without a store.

    Not a collective of processes: one that calls it alone waits a second.
    """
    if comm.size == 1:
        return {comm.rank: note}
    if comm.share is not None:
        try:  # ranks are threads here, each with its word
            return dict(enumerate(exchange_values(comm, Call(subject, ordered=False), note, str)))
        except AccelError:
            return {comm.rank: note}
    if comm.roll is None:
        return {comm.rank: note}
    return comm.roll.exchange_notes(f"{subject} after {comm.number}", note)


def barrier(comm: Comm, call: Call) -> None:
    """Wait until every rank has made this call. A collective."""
    comm.check_open()
    if comm.size > 1:
        _ = start(comm, call)()


@contextlib.contextmanager
def foreign_call(comm: Comm, *, opens: bool = False) -> Generator[None]:
    """Run a call of a library that communicates by itself, and opens groups if `opens`. A collective.

    Raises the `PeerError` of a rank that failed in it or was lost; later calls on the handle raise it too.
    """
    if comm.size == 1 or comm.share is not None:
        yield
        return
    # counted whether or not it fails, so that the notes of a later failure have one number on all ranks
    number = comm.next_number()
    alarm = _alarm(comm)
    with contextlib.ExitStack() as scopes:
        # a batch-size search agrees on errors itself, and retries in the same group
        searched = alarm is not None and alarm.watched
        if alarm is not None and opens:
            scopes.enter_context(alarm.opening())
        # gloo raises when a peer closes its connection; a kernel of NCCL waits until it is aborted
        if alarm is not None and comm.backend != "gloo":
            scopes.enter_context(alarm.watching())
        try:
            yield
        except Exception as error:
            # without a cause, it was raised before the call communicates, alike on all ranks, or all ranks know it
            if isinstance(error, PeerError) or (isinstance(error, AccelError) and error.__cause__ is None):
                raise
            raise_lost(comm, error)
            if alarm is not None and not searched:
                _end(comm, alarm, number, error)
            raise


def raise_lost(comm: Comm, error: BaseException) -> None:
    """Raise `PeerError` if an error means a lost connection; with the error of the rank that failed, where known."""
    lost = peer_error(error, public_call())
    if lost is None:
        return
    alarm = _alarm(comm)
    note = alarm.ended().decode() if alarm is not None else ""
    if alarm is None or not note:
        raise lost from error
    comm.lost = note
    alarm.cut()  # so that ranks raise which wait for this one
    raise PeerError(
        note,
        expected="every rank in this call",
        where=f"rank {comm.rank}, {public_call()}",
        fix="Fix that rank's error, and restart from the newest checkpoint.",
    ) from error


def _alarm(comm: Comm) -> StoreAlarm | None:
    return comm.bell if isinstance(comm.bell, StoreAlarm) else None


def _end(comm: Comm, alarm: StoreAlarm, number: int, error: Exception) -> None:
    """End the group, unless all ranks failed in this call."""
    where = public_call()
    # if all ranks came here with an error, each raises its own, and the group stays usable
    came = comm.roll.ask(number, 0.0).waited if comm.roll is not None else {}
    if len(came) < comm.size:
        headline = str(error).strip().partition("\n")[0]
        comm.lost = f"rank {comm.rank} failed in {where}: {type(error).__name__}: {headline}"
        alarm.end(comm.lost.encode(errors="backslashreplace"))
