# SPDX-License-Identifier: Apache-2.0
"""Batches of different sizes: where each ends in an epoch, and which of a step's batches a rank takes."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import Literal

import msgspec

from accel.data._plan import Cursor, SampleCount, Shard, advance, beyond, check_count
from accel.errors import DataError, check_choice


class BatchPlan(msgspec.Struct, frozen=True):
    """How batches of different sizes are dealt to ranks.

    Attributes:
        batches_per_step: batches that all ranks take together in one step.
        tail: what becomes of a last step with fewer batches: `ragged` leaves some ranks with none, `drop` leaves the
            step out.
        batch_tokens: the most tokens in a batch, for batches that are cut by length; None for those of a batch sampler.
    """

    batches_per_step: int
    tail: Literal["ragged", "drop"] = "ragged"
    batch_tokens: int | None = None

    def __post_init__(self) -> None:
        check_choice(self.tail, ("ragged", "drop"), "unknown way to end an epoch of unequal batches", where="tail=")
        check_count(self.batches_per_step, "not a number of batches to a step", where="batches_per_step=")
        if self.batch_tokens is not None:
            check_count(self.batch_tokens, "not a number of tokens", where="batch_tokens=")


class Cuts(msgspec.Struct, frozen=True):
    """The batches of the rest of one epoch.

    Attributes:
        bounds: positions in the epoch's order: where the first batch starts, and where each one ends.
        batches_per_step: batches that all ranks take together.
        drop: whether a last step with fewer batches is left out.
    """

    bounds: list[int]
    batches_per_step: int
    drop: bool

    @property
    def digest(self) -> str:
        """A short text that differs between different batches."""
        return hashlib.blake2b(array("q", self.bounds), digest_size=6).hexdigest()

    def steps_after(self, consumed: int) -> int:
        """Steps from a position to the end of the epoch.

        Raises:
            DataError: the position lies within a batch.
        """
        batches = len(self.bounds) - 1 - self.batch_at(consumed)
        return batches // self.batches_per_step if self.drop else -(-batches // self.batches_per_step)

    def shard(self, cursor: Cursor, rank: int, world_size: int) -> Shard:
        """Return a rank's part of the step at the cursor: whole batches, one after another, in rank order.

        Raises:
            DataError: the cursor lies beyond the end of the epoch, or within a batch.
        """
        steps, first = self.steps_after(cursor.consumed), self.batch_at(cursor.consumed)
        if not steps:
            raise beyond(cursor, cursor.consumed)
        last = min(first + self.batches_per_step, len(self.bounds) - 1)
        each, extra = divmod(last - first, world_size)
        begin = first + rank * each + min(rank, extra)
        start, stop = self.bounds[begin], self.bounds[begin + each + (rank < extra)]
        valid = SampleCount(stop - start, self.bounds[last] - cursor.consumed)
        after = advance(cursor, self.bounds[last], is_last=steps == 1)
        return Shard(start, stop, max(stop - start, 1), valid, steps == 1, after)

    def batch_at(self, consumed: int) -> int:
        """Return which batch starts at a position.

        Raises:
            DataError: none does.
        """
        at = bisect_left(self.bounds, consumed)
        if at == len(self.bounds) or self.bounds[at] != consumed:
            raise DataError(
                "the cursor is not between two batches",
                expected=f"a position where a batch starts, such as {self.bounds[max(at - 1, 0)]}",
                got=f"{consumed} consumed",
                fix="The cursor belongs to other batches; start the epoch anew with Cursor(seed=, epoch=).",
            )
        return at


def token_bounds(lengths: Iterable[int], batch_tokens: int, start: int = 0) -> list[int]:
    """Cut samples into batches, in their order, each as long as its tokens allow.

    A batch counts its rows times its longest sample, which is what it takes once padded.

    Args:
        lengths: of the samples from `start` on, in tokens; none above `batch_tokens`.
        batch_tokens: the most that a batch holds.
        start: the position of the first sample.

    Returns:
        Positions: `start`, and where each batch ends.
    """
    bounds, stop, longest = [start], start, 0
    for length in lengths:
        longest = max(longest, length)
        if longest * (stop + 1 - bounds[-1]) > batch_tokens:
            bounds.append(stop)
            longest = length
        stop += 1
    return [*bounds, stop]
