# SPDX-License-Identifier: Apache-2.0
"""Who gets which samples of which step: pure arithmetic on a cursor, so that resume is exact at any world size."""

from __future__ import annotations

from typing import Literal, Self, get_args

import msgspec

from accel.errors import ConfigError, DataError, check_choice
from accel.random import check_seed

Tail = Literal["ragged", "pad", "drop"]


class Cursor(msgspec.Struct, frozen=True):
    """Where a run stands in its data, in samples of all ranks together.

    Attributes:
        seed: of the data order.
        epoch: epochs finished.
        consumed: samples of this epoch that all ranks together have taken.
    """

    seed: int = 0
    epoch: int = 0
    consumed: int = 0

    def __post_init__(self) -> None:
        for name in ("seed", "epoch", "consumed"):
            check_seed(getattr(self, name), where=f"Cursor.{name}")


class SampleCount(int):
    """How many real samples this rank's batch holds; `world` says how many all ranks hold together in this step.

    It is an int in every other way. `backward(weight=...)` reads `world`, so that the weights of a step need not be
    summed over ranks by communication.
    """

    world: int

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override] - int's own gives one value; for copy, pickle
        return int(self), self.world

    def __new__(cls, here: int, world: int) -> Self:
        """Make the count of this rank and of all ranks."""
        count = super().__new__(cls, here)
        count.world = world
        return count


class Plan(msgspec.Struct, frozen=True):
    """How an epoch is cut into global batches.

    Attributes:
        samples: in the dataset.
        global_batch: samples that all ranks take together in one step.
        shuffle: whether each epoch has its own permutation.
        tail: what becomes of a last global batch that is not full: `ragged` makes ranks' batches shorter, `pad` keeps
            shapes by repeating a sample that does not count, `drop` leaves it out.
    """

    samples: int
    global_batch: int
    shuffle: bool
    tail: Tail = "ragged"

    def __post_init__(self) -> None:
        check_choice(self.tail, get_args(Tail), "unknown way to end an epoch", where="tail=")
        if type(self.global_batch) is not int or self.global_batch < 1:
            raise ConfigError(
                "not a number of samples to a step",
                expected="an integer of at least 1",
                got=repr(self.global_batch),
                where="global_batch=",
            )
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
        return -(-self.end // self.global_batch)


class Shard(msgspec.Struct, frozen=True):
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
    if cursor.consumed >= plan.end:
        raise DataError(
            "the cursor is beyond the end of the epoch",
            expected=f"fewer than {plan.end} samples consumed",
            got=f"{cursor.consumed} consumed",
            fix="The cursor belongs to another dataset, or to another batch size with drop_last.",
        )
    total = min(plan.global_batch, plan.end - cursor.consumed)
    each, extra = divmod(total, world_size)
    start = cursor.consumed + rank * each + min(rank, extra)
    count = each + (rank < extra)
    done = cursor.consumed + total
    is_last = done == plan.end
    return Shard(
        start=start,
        stop=start + count,
        rows=-(-plan.global_batch // world_size) if plan.tail == "pad" else max(count, 1),
        valid=SampleCount(count, total),
        is_last=is_last,
        next=Cursor(cursor.seed, cursor.epoch + 1) if is_last else Cursor(cursor.seed, cursor.epoch, done),
    )
