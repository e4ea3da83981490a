# SPDX-License-Identifier: Apache-2.0
"""The shards of a step: pure arithmetic on a cursor, so that resume is exact at any world size."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from typing import Literal, Self, get_args

import msgspec

from accel.errors import DataError
from accel.errors._checks import check_choice, check_count
from accel.loop_state import Cursor, advance

Tail = Literal["ragged", "pad", "drop"]

# of a context: rank, world size, (index, count) among data-parallel ranks
Coordinates = tuple[int, int, tuple[int, int]]


class SampleCount(int):
    """Number of real samples in this rank's batch: an int with the counts of the other ranks.

    `world` counts the samples of all ranks in this step, and `copies` the ranks that hold each of them.
    `backward(weight=...)` reads both, so the weights of a step need no communication.
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


class EpochPlan(msgspec.Struct, frozen=True):
    """Plan of an epoch's global batches of one size."""

    samples: int | None  # samples in an epoch; None for a sampler, before a draw
    global_batch: int  # samples of all ranks in one step
    # Treatment of a last global batch that is not full: `ragged` makes ranks' batches shorter, `pad` keeps shapes by
    # repeating a sample that does not count, `drop` leaves it out.
    tail: Tail = "ragged"

    def __post_init__(self) -> None:
        check_choice(self.tail, get_args(Tail), "unknown way to end an epoch", where="tail=")
        check_count(self.global_batch, "the number of samples in a step is not valid", where="global_batch=")
        if self.samples is None:
            return
        if self.samples < 1:
            raise DataError("the dataset is empty", expected="at least one sample", got=str(self.samples))
        if self.end == 0:
            raise DataError(
                "drop_last drops the full epoch",
                expected=f"a global batch of at most {self.samples} samples",
                got=str(self.global_batch),
                fix="Lower the batch size, or leave drop_last out.",
            )

    @property
    def end(self) -> int:
        """Samples of an epoch that are used."""
        assert self.samples is not None
        return self.samples - self.samples % self.global_batch if self.tail == "drop" else self.samples

    @property
    def steps(self) -> int:
        """Global batches in an epoch."""
        return self.steps_after(0)

    def steps_after(self, consumed: int) -> int:
        """Global batches from a position to the end of the epoch."""
        return -(-max(self.end - consumed, 0) // self.global_batch)


class BatchPlan(msgspec.Struct, frozen=True):
    """Plan that deals batches of different sizes to ranks."""

    batches_per_step: int  # batches of all ranks in one step
    # Treatment of a last step with fewer batches: `ragged` leaves some ranks with none, `drop` leaves the step out.
    tail: Literal["ragged", "drop"] = "ragged"
    # Largest number of tokens in a batch that is cut by length; None for a batch sampler's.
    batch_tokens: int | None = None

    def __post_init__(self) -> None:
        check_choice(self.tail, ("ragged", "drop"), "unknown way to end an epoch of unequal batches", where="tail=")
        check_count(self.batches_per_step, "the number of batches in a step is not valid", where="batches_per_step=")
        if self.batch_tokens is not None:
            check_count(self.batch_tokens, "the number of tokens is not valid", where="batch_tokens=")


class Shard(msgspec.Struct, frozen=True, gc=False):
    """One rank's part of one global batch."""

    start: int  # first of its positions in the epoch's order
    stop: int  # the position behind the last; equal to `start` for a rank without samples
    rows: int  # samples to load, placeholders included; at least 1
    valid: SampleCount  # real samples, here and over all ranks
    is_last: bool  # whether the epoch ends with this step
    next: Cursor  # the cursor after it


class BatchBounds(msgspec.Struct, frozen=True):
    """The batches of the rest of one epoch."""

    bounds: list[int]  # positions in the epoch's order: the start of the first batch, and the end of each
    batches_per_step: int  # batches of all ranks in one step
    drop: bool  # whether a last step with fewer batches is left out

    @property
    def digest(self) -> str:
        """A short text, different for different batches."""
        return hashlib.blake2b(array("q", self.bounds), digest_size=6).hexdigest()

    def steps_after(self, consumed: int) -> int:
        """Steps from a position to the end of the epoch; raises `DataError` for one within a batch."""
        batches = len(self.bounds) - 1 - self.batch_at(consumed)
        return batches // self.batches_per_step if self.drop else -(-batches // self.batches_per_step)

    def shard(self, cursor: Cursor, rank: int, world_size: int) -> Shard:
        """Return a rank's part of the step at the cursor, in rank order; `DataError` past the end or within a batch."""
        steps = self.steps_after(cursor.consumed)
        first = self.batch_at(cursor.consumed)
        if not steps:
            raise beyond(cursor, cursor.consumed)
        last = min(first + self.batches_per_step, len(self.bounds) - 1)
        each, extra = divmod(last - first, world_size)
        begin = first + rank * each + min(rank, extra)
        start = self.bounds[begin]
        stop = self.bounds[begin + each + (rank < extra)]
        valid = SampleCount(stop - start, self.bounds[last] - cursor.consumed)
        after = advance(cursor, self.bounds[last], is_last=steps == 1)
        return Shard(start, stop, max(stop - start, 1), valid, steps == 1, after)

    def batch_at(self, consumed: int) -> int:
        """Return the number of the batch that starts at a position, or raise `DataError`."""
        at = bisect_left(self.bounds, consumed)
        if at == len(self.bounds) or self.bounds[at] != consumed:
            raise DataError(
                "the cursor is not between two batches",
                expected=f"a position where a batch starts, such as {self.bounds[max(at - 1, 0)]}",
                got=f"{consumed} consumed",
                fix="It belongs to other batches. Begin the epoch again: state = state.at(Cursor(seed, epoch)).",
            )
        return at


def shard(plan: EpochPlan, cursor: Cursor, rank: int, world_size: int) -> Shard:
    """Return a rank's part of the global batch at the cursor, or raise `DataError` past the end of the epoch.

    Shards are contiguous in the epoch's order, in rank order, and differ by at most one sample.
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
    is_last = done == end
    valid = SampleCount(count, total)
    return Shard(start, start + count, rows, valid, is_last, advance(cursor, done, is_last=is_last))


def token_bounds(lengths: Iterable[int], batch_tokens: int, start: int = 0) -> list[int]:
    """Cut samples into batches, in their order, each as large as its tokens allow; return `start` and the ends.

    A batch counts its rows times its longest sample: its size once padded.
    """
    bounds, stop, longest = [start], start, 0
    for length in lengths:
        longest = max(longest, length)
        if longest * (stop + 1 - bounds[-1]) > batch_tokens:
            bounds.append(stop)
            longest = length
        stop += 1
    return [*bounds, stop]


def copies_of(data_ranks: list[int], world_size: int) -> int:
    """Return the number of ranks that read each part of the data; unequal numbers are a `DataError`."""
    taken = Counter(data_ranks)
    copies = max(len(data_ranks) // world_size, 1)
    if len(data_ranks) > 1 and any(taken[part] != copies for part in range(world_size)):
        unread = len(taken) < world_size
        raise DataError(
            f"a part of the data is read by {'no rank' if unread else 'more ranks than another'}",
            expected=f"indices 0 to {world_size - 1}, equally often",
            got=f"{data_ranks} by rank",
            where="prepare_loader(data_parallel=)",
        )
    return copies


def beyond(cursor: Cursor, end: int) -> DataError:
    """Return the error for a cursor with nothing after it in its epoch."""
    return DataError(
        "the cursor is beyond the end of the epoch",
        expected=f"fewer than {end} samples consumed",
        got=f"{cursor.consumed} consumed",
        fix="The cursor belongs to another dataset, or to another batch size with drop_last.",
    )


def check_entry(here: Coordinates, prepared_for: Coordinates, cursor: object) -> None:
    """Raise `DataError` for a loader that was prepared for another rank, or for anything but a cursor."""
    if here != prepared_for:
        raise DataError(
            "the loader was prepared for another rank",
            expected="rank {} of {}, place {} among data-parallel ranks".format(*here),
            got="rank {} of {}, place {}".format(*prepared_for),
            fix="Prepare it with this context.",
        )
    check_cursor(cursor)


def check_cursor(cursor: object) -> None:
    """Raise `DataError` for anything but a cursor, such as a number of steps."""
    if not isinstance(cursor, Cursor):
        raise DataError(
            "the cursor is not valid", expected="accel.Cursor(seed=, epoch=) or batch.next", got=repr(cursor)
        )
