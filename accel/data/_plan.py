# SPDX-License-Identifier: Apache-2.0
"""Who gets which samples of which step: pure arithmetic on a cursor, so that resume is exact at any world size."""

from __future__ import annotations

from collections import Counter
from typing import Literal, Protocol, Self, get_args, runtime_checkable

import msgspec

from accel.data._position import StreamPosition
from accel.errors import ConfigError, DataError, check_choice
from accel.random import check_seed

Tail = Literal["ragged", "pad", "drop"]
Place = tuple[int, int, tuple[int, int]]  # of a context: rank, world size, (index, count) among data-parallel ranks


class Cursor(msgspec.Struct, frozen=True, weakref=True):
    """Where a run stands in its data, in samples of all ranks together.

    Attributes:
        seed: of the data order.
        epoch: epochs finished.
        consumed: samples of this epoch that all ranks together have taken.
        of: the order that `consumed` counts in, in words; empty for any. A cursor that `batches` gave fits no other.
        stream: where the readers of a stream stand; None for data with positions, and on ranks that do not read.
    """

    seed: int = 0
    epoch: int = 0
    consumed: int = 0
    of: str = ""
    stream: StreamPosition | None = None

    def __post_init__(self) -> None:
        check_seed(self.seed, where="Cursor.seed")
        check_seed(self.epoch, where="Cursor.epoch")
        check_seed(self.consumed, where="Cursor.consumed")

    def rank_part(self) -> object:
        """Return what differs between ranks, for a checkpoint to keep for each; None if nothing does."""
        return self.stream if self.stream is not None and self.stream.ranks else None

    def with_rank_part(self, part: object) -> Self:
        """Return the cursor with this rank's own part, in records or in plain values.

        Raises:
            msgspec.ValidationError: it is none.
        """
        return msgspec.structs.replace(self, stream=msgspec.convert(part, StreamPosition))


@runtime_checkable
class Positioned(Protocol):
    """A record that holds the run's cursor among others, such as `TrainState`."""

    @property
    def cursor(self) -> Cursor:
        """The position in the data."""
        ...

    def check_pass(self) -> None:
        """Raise `StepError` unless a pass over the data may begin now."""
        ...


class SampleCount(int):
    """How many real samples this rank's batch holds, an int that knows about the other ranks too.

    `world` says how many samples all ranks hold together in this step, and `copies` how many ranks hold each of them.
    `backward(weight=...)` reads both, so that the weights of a step need not be summed over ranks by communication.
    """

    world: int
    copies: int

    def __getnewargs__(self) -> tuple[int, int, int]:  # type: ignore[override] - int's own gives one value; for copies
        return int(self), self.world, self.copies

    def __new__(cls, here: int, world: int, copies: int = 1) -> Self:
        """Make the count of this rank and of all ranks."""
        count = int.__new__(cls, here)
        count.world, count.copies = world, copies
        return count


class Plan(msgspec.Struct, frozen=True):
    """How an epoch is cut into global batches of one size.

    Attributes:
        samples: in an epoch.
        global_batch: samples that all ranks take together in one step.
        tail: what becomes of a last global batch that is not full: `ragged` makes ranks' batches shorter, `pad` keeps
            shapes by repeating a sample that does not count, `drop` leaves it out.
    """

    samples: int
    global_batch: int
    tail: Tail = "ragged"

    def __post_init__(self) -> None:
        check_choice(self.tail, get_args(Tail), "unknown way to end an epoch", where="tail=")
        check_count(self.global_batch, "not a number of samples to a step", where="global_batch=")
        if self.samples < 1:
            raise DataError("the dataset is empty", expected="at least one sample", got=str(self.samples))
        if self.end == 0:
            raise DataError(
                "drop_last drops the whole epoch",
                expected=f"a global batch of at most {self.samples} samples",
                got=str(self.global_batch),
                fix="Lower the batch size, or leave drop_last out.",
            )

    @property
    def end(self) -> int:
        """Samples of an epoch that are used."""
        return self.samples - self.samples % self.global_batch if self.tail == "drop" else self.samples

    @property
    def steps(self) -> int:
        """Global batches in an epoch."""
        return self.steps_after(0)

    def steps_after(self, consumed: int) -> int:
        """Global batches from a position to the end of the epoch."""
        return -(-max(self.end - consumed, 0) // self.global_batch)


class Shard(msgspec.Struct, frozen=True, gc=False):
    """One rank's part of one global batch.

    Attributes:
        start, stop: positions in the epoch's order; empty when this rank is left with none.
        rows: samples to load, stand-ins included; at least 1.
        valid: real samples, here and over all ranks.
        is_last: whether the epoch ends with this step.
        next: the cursor after it.
    """

    start: int
    stop: int
    rows: int
    valid: SampleCount
    is_last: bool
    next: Cursor


def shard(plan: Plan, cursor: Cursor, rank: int, world_size: int) -> Shard:
    """Return a rank's part of the global batch at the cursor.

    Parts are contiguous in the epoch's order, in rank order, and differ by at most one sample.

    Args:
        plan: of the dataset.
        cursor: before the step.
        rank, world_size: which data-parallel rank asks.

    Raises:
        DataError: the cursor lies beyond the end of the epoch, as one of another dataset would.
    """
    end = plan.end
    if cursor.consumed >= end:
        raise beyond(cursor, end)
    total = min(plan.global_batch, end - cursor.consumed)
    each, extra = divmod(total, world_size)
    start = cursor.consumed + rank * each + min(rank, extra)
    count = each + (rank < extra)
    rows = -(-plan.global_batch // world_size) if plan.tail == "pad" else count or 1
    done = cursor.consumed + total
    valid, is_last = SampleCount(count, total), done == end
    return Shard(start, start + count, rows, valid, is_last, advance(cursor, done, is_last=is_last))


def advance(cursor: Cursor, consumed: int, *, is_last: bool) -> Cursor:
    """Return the cursor after a step that took the samples up to `consumed`."""
    if is_last:
        return Cursor(cursor.seed, cursor.epoch + 1)
    return Cursor(cursor.seed, cursor.epoch, consumed, cursor.of)


def beyond(cursor: Cursor, end: int) -> DataError:
    """The error for a cursor with nothing after it in its epoch."""
    return DataError(
        "the cursor is beyond the end of the epoch",
        expected=f"fewer than {end} samples consumed",
        got=f"{cursor.consumed} consumed",
        fix="The cursor belongs to another dataset, or to another batch size with drop_last.",
    )


def check_entry(ctx_place: Place, prepared_for: Place, cursor: object) -> None:
    """Raise `DataError` for a loader that was prepared for another rank, or a cursor that is none.

    Args:
        ctx_place: of the context.
        prepared_for: that of the context that the loader was prepared with.
        cursor: where to start.
    """
    if ctx_place != prepared_for:
        raise DataError(
            "the loader was prepared for another rank",
            expected="rank {} of {}, place {} among data-parallel ones".format(*ctx_place),
            got="rank {} of {}, place {}".format(*prepared_for),
            fix="Prepare it with this context.",
        )
    check_cursor(cursor)


def check_cursor(cursor: object) -> None:
    """Raise `DataError` for what is no cursor, such as a number of steps."""
    if not isinstance(cursor, Cursor):
        raise DataError("not a cursor", expected="accel.Cursor(seed=, epoch=) or batch.next", got=repr(cursor))


def copies_of(places: list[int], world_size: int) -> int:
    """Return how many ranks take each part of the data.

    Args:
        places: of each rank among the data-parallel ones.
        world_size: how many there are of these.

    Raises:
        DataError: not all parts are taken equally often.
    """
    taken, copies = Counter(places), max(len(places) // world_size, 1)
    if len(places) > 1 and any(taken[part] != copies for part in range(world_size)):
        unread = len(taken) < world_size
        raise DataError(
            f"a part of the data is read by {'no rank' if unread else 'more ranks than another'}",
            expected=f"indices 0 to {world_size - 1}, equally often",
            got=f"{places} by rank",
            where="prepare_loader(data_parallel=)",
        )
    return copies


def check_count(value: object, problem: str, *, where: str) -> None:
    """Raise `ConfigError` unless the value is an integer of at least 1."""
    if type(value) is not int or value < 1:
        raise ConfigError(problem, expected="an integer of at least 1", got=repr(value), where=where)
