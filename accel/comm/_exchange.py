# SPDX-License-Identifier: Apache-2.0
"""Payloads of all ranks for all, small values combined, and work that succeeds on all ranks or raises on all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
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

T = TypeVar("T")

# Up to this size, payloads of different sizes are filled up to one, with the size in front. That saves a message.
_FILLED_BYTES = 1024
_LENGTH_BYTES = 8


def exchange(comm: Comm, call: Call, payload: torch.Tensor, *, dst: int | None = None) -> list[torch.Tensor]:
    """All-gather byte payloads. A collective.

    Args:
        comm: an open handle.
        call: the expected call of all ranks.
        payload: bytes, shape [length], dtype uint8, on the CPU; lengths may differ between ranks.
        dst: the receiving rank; None for all. `call` must compare it.

    Returns:
        The payloads by rank, uint8 on the CPU; empty on ranks other than `dst`.

    Raises:
        CollectiveMismatch: ranks made different calls; on every rank.
        AccelError: another rank failed; the same error on every rank.
    """
    if comm.size == 1:
        comm.check_open()
        return [payload]
    answers = _meet(comm, call, payload)()
    if answers.most > inline_bytes(comm):
        return _second(comm, answers, payload, dst)
    if dst not in (None, comm.rank):
        return []
    if comm.is_large:
        return [payload.new_empty(0) for _ in answers.sizes]
    rows = answers.inline if comm.share is None else answers.inline.clone()  # callers may change their payloads
    return [row[:size] for row, size in zip(rows, answers.sizes, strict=True)]


def exchange_values(comm: Comm, call: Call, value: T, kind: type[T], *, dst: int | None = None) -> list[T]:
    """All-gather values as JSON. A collective; see `exchange`.

    Args:
        comm: an open handle.
        call: the expected call of all ranks.
        value: this rank's, of a type that msgspec encodes.
        kind: type of the values, checked on arrival.
        dst: the receiving rank; None for all. `call` must compare it unless it is the same in all such calls.
    """
    return _start_values(comm, call, value, kind, dst)()


def start_values(comm: Comm, call: Call, value: T, kind: type[T]) -> Callable[[], list[T]]:
    """Begin `exchange_values`; return a function that waits for the values. A collective.

    Args:
        comm, call, value, kind: as of `exchange_values`.
    """
    return _start_values(comm, call, value, kind, None)


def _start_values(comm: Comm, call: Call, value: T, kind: type[T], dst: int | None) -> Callable[[], list[T]]:
    if comm.size == 1:
        comm.check_open()
        return lambda: [value]
    mine = as_tensor(msgspec.json.encode(value))
    arrive = _meet(comm, call, mine)

    def wait() -> list[T]:
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
    if answers.sizes:
        return _gathered(comm, payload, answers.sizes, dst)
    length = torch.tensor([payload.numel()], dtype=torch.int64, device="cpu")
    if answers.most > _FILLED_BYTES:
        sizes = [int(size) for size in all_gather_flat(comm, length.to(comm.control))]
        return _gathered(comm, payload, sizes, dst)
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
    """Reduce integers over all ranks, each by itself. A collective.

    Args:
        comm: an open handle.
        call: the expected call of all ranks.
        numbers: of 64 bits, as many on every rank; `call` must compare how many.
        op: the reduction.

    Raises:
        CollectiveMismatch: ranks made different calls; on every rank.
        AccelError: another rank failed; the same error on every rank.
    """
    comm.check_open()
    if comm.size == 1:
        return list(numbers)
    mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if mine.nbytes > max(inline_bytes(comm), reduced_bytes(comm)):
        _ = start(comm, call)()
        return _listed(all_reduce_flat(comm, mine.to(comm.control), op))
    message = blank(comm)
    fill(message, as_bytes(mine.view(torch.uint8)))
    answers = start(comm, call, message, mine.nbytes, combine=_greatest if op == "max" else _least)()
    if answers.reduced is not None:
        return _listed(answers.reduced[: mine.nbytes].view(torch.int64))
    rows = answers.elements(torch.int64, 0, mine.numel())
    return _listed(rows.amax(0) if op == "max" else rows.amin(0))


def broadcast_bytes(comm: Comm, call: Call, payload: torch.Tensor, *, source: int) -> torch.Tensor:
    """Broadcast bytes of one rank. A collective.

    Args:
        comm: an open handle.
        call: the expected call of all ranks, which must compare `source`.
        payload: bytes, shape [length], dtype uint8, on the CPU; empty on other ranks.
        source: the sending rank.

    Returns:
        The payload of `source`, uint8 on the CPU.

    Raises:
        CollectiveMismatch: ranks made different calls; on every rank.
        AccelError: another rank failed; the same error on every rank.
    """
    if not comm.is_large:
        return exchange(comm, call, payload)[source]
    message = blank(comm)
    fill(message, as_bytes(payload[: reduced_bytes(comm)]))
    answers = start(comm, call, message, payload.numel(), combine=_only)()
    if answers.reduced is not None and answers.most <= reduced_bytes(comm):
        return answers.reduced[: answers.most].clone()
    received = payload if comm.rank == source else payload.new_empty(answers.most)
    broadcast_flat(comm, received, source=source)
    return received


def broadcast_value(comm: Comm, call: Call, value: T, kind: type[T], *, source: int = 0) -> T:
    """Broadcast one rank's value as JSON. A collective; see `broadcast_bytes`.

    Args:
        comm: an open handle.
        call: the expected call of all ranks, which must compare `source`.
        value: of a type that msgspec encodes; ignored on other ranks.
        kind: type of the value, checked on arrival.
        source: the sending rank.
    """
    if comm.size == 1:
        comm.check_open()
        return value
    payload = as_tensor(msgspec.json.encode(value) if comm.rank == source else b"")
    return msgspec.json.decode(as_bytes(broadcast_bytes(comm, call, payload, source=source)), type=kind)


def _greatest(lower: torch.Tensor, upper: torch.Tensor) -> None:
    numbers = lower.view(torch.int64)
    _ = torch.maximum(numbers, upper.view(torch.int64), out=numbers)


def _least(lower: torch.Tensor, upper: torch.Tensor) -> None:
    numbers = lower.view(torch.int64)
    _ = torch.minimum(numbers, upper.view(torch.int64), out=numbers)


def _only(lower: torch.Tensor, upper: torch.Tensor) -> None:
    """Combine payloads of which one at most is not zero."""
    _ = torch.bitwise_or(lower, upper, out=lower)


def _listed(numbers: torch.Tensor) -> list[int]:
    return [int(number) for number in numbers]


@contextlib.contextmanager
def agreed(comm: Comm, call: Call) -> Generator[None]:
    """Run a block that communicates nothing, then wait for all ranks. A collective at the block's end.

    Args:
        comm: an open handle.
        call: the expected call of all ranks.

    Raises:
        AccelError: the lowest failing rank's error, on every rank, with the rank unless all failed alike; errors of
            other kinds arrive as `PeerError`.
        CollectiveMismatch: ranks made different calls; on every rank.
    """
    with shared_failure(comm, call):
        yield
    barrier(comm, call)


def agreed_values(comm: Comm, call: Call, work: Callable[[], T], kind: type[T], *, dst: int | None = None) -> list[T]:
    """Run work that communicates nothing, and gather every rank's value. A collective.

    Args:
        comm: an open handle.
        call: the expected call of all ranks.
        work: returns this rank's value.
        kind: type of the values, which msgspec encodes; checked on arrival.
        dst: the receiving rank, the same in all such calls; None for all.

    Returns:
        The values by rank; empty on ranks other than `dst`.

    Raises:
        AccelError: as `agreed`.
        CollectiveMismatch: ranks made different calls; on every rank.
    """
    with shared_failure(comm, call):
        value = work()
    return exchange_values(comm, call, value, kind, dst=dst)


@contextlib.contextmanager
def shared_failure(comm: Comm, call: Call) -> Generator[None]:
    """Run a block that communicates nothing, directly before a collective; its error is raised on every rank.

    The other ranks receive the error in that collective. A collective where the block fails, no message elsewhere.

    Args:
        comm: an open handle.
        call: the expected call of all ranks, for reports.

    Raises:
        AccelError: as `agreed`.
    """
    try:
        yield
    except Exception as error:
        fail(comm, call, error)


def told_by_ranks(comm: Comm, subject: str, note: str) -> Mapping[int, str]:
    """Return a word of each rank that calls this, by rank; of this one alone where the group has no store to ask.

    It is no collective of processes: a rank that calls it alone waits a second. Ranks of one process exchange their
    words, and a rank alone there has its own.

    Args:
        comm: an open handle.
        subject: of the words.
        note: this rank's.
    """
    if comm.size == 1:
        return {comm.rank: note}
    if comm.share is not None:
        try:
            return dict(enumerate(exchange_values(comm, Call(subject, ordered=False), note, str)))
        except AccelError:
            return {comm.rank: note}
    if comm.roll is None:
        return {comm.rank: note}
    return comm.roll.tell(f"{subject} after {comm.number}", note)


def barrier(comm: Comm, call: Call) -> None:
    """Wait until every rank has made this call. A collective.

    Args:
        comm: an open handle.
        call: the expected call of all ranks.

    Raises:
        AccelError: a rank failed; the same error on every rank.
        CollectiveMismatch: ranks made different calls; on every rank.
    """
    comm.check_open()
    if comm.size > 1:
        _ = start(comm, call)()


@contextlib.contextmanager
def foreign_call(comm: Comm, *, opens: bool = False) -> Generator[None]:
    """Run a call of a library that communicates by itself. A collective.

    An `AccelError` without a cause passes: it is raised before such a call communicates, alike on all ranks, or by a
    call of this package, which tells the ranks itself. So does any error that all ranks have, or that a batch-size
    search handles.

    Args:
        comm: an open handle.
        opens: whether the library opens groups in it.

    Raises:
        PeerError: another rank failed in the call, with its error, or was lost. Later calls on the handle raise it too.
    """
    if comm.size == 1 or comm.share is not None:
        yield
        return
    number = comm.next_number()
    alarm = _alarm(comm)
    with contextlib.ExitStack() as scopes:
        searched = alarm is not None and alarm.watched
        if alarm is not None and opens:
            scopes.enter_context(alarm.opening())
        if alarm is not None and comm.backend != "gloo":
            scopes.enter_context(alarm.watching())
        try:
            yield
        except Exception as error:
            if isinstance(error, PeerError) or (isinstance(error, AccelError) and error.__cause__ is None):
                raise
            raise_lost(comm, error)
            if alarm is not None and not searched:
                _end(comm, alarm, number, error)
            raise


def raise_lost(comm: Comm, error: BaseException) -> None:
    """Raise `PeerError` if an error tells of a lost connection; with the error of the rank that failed, where known."""
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
        fix="Mend what that rank says, and begin again from the newest checkpoint.",
    ) from error


def _alarm(comm: Comm) -> StoreAlarm | None:
    return comm.bell if isinstance(comm.bell, StoreAlarm) else None


def _end(comm: Comm, alarm: StoreAlarm, number: int, error: Exception) -> None:
    """End the group, unless all ranks failed in this call."""
    where = public_call()
    came = comm.roll.ask(number, 0.0).waited if comm.roll is not None else {}
    if len(came) < comm.size:
        headline = str(error).strip().partition("\n")[0]
        comm.lost = f"rank {comm.rank} failed in {where}: {type(error).__name__}: {headline}"
        alarm.end(comm.lost.encode(errors="backslashreplace"))
