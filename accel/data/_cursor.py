# SPDX-License-Identifier: Apache-2.0
"""A run's position in its data: the cursor, the position in a stream, and guards against a dropped cursor."""

from __future__ import annotations

import dataclasses
import enum
import logging
import sys
from collections.abc import Iterator
from typing import Any, Protocol, Self, cast, runtime_checkable

import msgspec
import torch

from accel.comm._marks import Marks
from accel.errors import ConfigError, DataError
from accel.random import check_seed

# of a context: rank, world size, (index, count) among data-parallel ranks
Coordinates = tuple[int, int, tuple[int, int]]


class WorkerPosition(msgspec.Struct, frozen=True):
    """Progress of one reading process."""

    elements: int = 0  # elements of its part of the stream, in the batches so far
    state: Any = None  # the stream's `state_dict()` at that point; None if it has none
    ended: bool = False  # whether its part has been read to the end

    def check_saveable(self) -> None:
        """Raise `ConfigError` for a user's record or enum in `state`: a run that loads it has no class to decode it."""
        for path, name in _user_classes(self.state, "$"):
            raise ConfigError(
                "the state of a stream holds a record, which could not be loaded again",
                expected="tensors, numbers, text, bytes and None in dicts, lists and tuples",
                got=f"{name} at {path} of its state_dict()",
                fix="Return plain values from state_dict(), and make the record in load_state_dict().",
            )


class StreamPosition(msgspec.Struct, frozen=True):
    """Position of a stream's reader.

    Attributes:
        workers: positions of its reading processes; one if it reads without workers.
        turn: number of the worker with the next batch.
        ranks: number of ranks that read a part each; 0 for a position in the full stream, which fits any number of
            ranks.
    """

    workers: tuple[WorkerPosition, ...]
    turn: int = 0
    ranks: int = 0


class Cursor(msgspec.Struct, frozen=True, weakref=True):
    """A run's position in its data, in samples of all ranks together.

    Attributes:
        seed: seed of the data order.
        epoch: epochs finished.
        consumed: samples of this epoch taken by all ranks together.
        of: name of the order that `consumed` counts in; empty for any. A cursor from `batches` fits no other order.
        stream: position of the stream's reader; None for data with positions, and on ranks that do not read.
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
        """Return the part that differs between ranks, None if there is none; a checkpoint keeps it for each rank."""
        return self.stream if self.stream is not None and self.stream.ranks else None

    def with_rank_part(self, part: object) -> Self:
        """Return the cursor with this rank's own part, in records or in plain values.

        Raises:
            msgspec.ValidationError: the part does not fit.
        """
        return msgspec.structs.replace(self, stream=msgspec.convert(part, StreamPosition))


@runtime_checkable
class Positioned(Protocol):
    """A record that holds the run's cursor among others, such as `TrainState`; weak references to it are possible."""

    @property
    def cursor(self) -> Cursor:
        """The position in the data."""
        ...

    def check_pass(self) -> None:
        """Raise `StepError` unless a pass over the data may begin now."""
        ...

    def at(self, cursor: Cursor) -> Self:
        """Return the record at another position."""
        ...


class LastPass:
    """Starts of the complete training passes over a loader, and where the last one was left.

    A pass trains if gradients are enabled. Only the same object counts, however many passes came since: an equal new
    cursor means a new start, or a resumed run, and so does a copy of a state.
    """

    __slots__ = ("_marks", "_warned")

    def __init__(self) -> None:
        self._marks = Marks()
        self._warned = False

    def __reduce__(self) -> tuple[type[LastPass], tuple[()]]:
        return LastPass, ()  # another process begins without a memory

    def check(self, start: Positioned | Cursor, cursor: Cursor) -> None:
        """Raise `DataError` if a training pass would begin at the cursor of a complete one."""
        passed = self._marks.find(cursor, "passed")
        if passed is None or not torch.is_grad_enabled():
            return
        if self._marks.find(start, "passed") is None and passed.note == _without_cursor(start):
            return
        raise DataError(
            "the loop dropped the cursor after each batch, and would repeat the epoch",
            expected="state = state.next(batch) for each batch",
            got=f"the cursor of an earlier pass: epoch {cursor.epoch}, {cursor.consumed} consumed",
            where="batches",
            fix="Write `state = state.next(batch)` in the loop, or `cursor = batch.next` where it carries a Cursor. To"
            " read the epoch again, pass a state from another train_state, or a new Cursor; to evaluate, leave it"
            " out: accel.batches(ctx, loader).",
        )

    def complete(self, start: Positioned | Cursor, cursor: Cursor) -> None:
        """Note a complete pass. Evaluation leaves the memory as it is."""
        if torch.is_grad_enabled():
            self._marks.put(start, "passed")
            self._marks.put(cursor, "passed", _without_cursor(start))

    def leave(self, *cursors: Cursor) -> None:
        """Note a pass that its loop left before the end: the cursors before and after its last batch."""
        if not sys.is_finalizing() and torch.is_grad_enabled():  # torch goes before a generator that nobody ended
            self._marks.clear("broken off")
            for each in cursors:
                self._marks.put(each, "broken off")

    def warn_left(self, cursor: Cursor) -> None:
        """Log once that a training pass begins inside an epoch which the loop before left by `break`."""
        if self._warned or not cursor.consumed or not torch.is_grad_enabled():
            return
        if self._marks.find(cursor, "broken off") is not None:
            self._warned = True
            logging.getLogger("accel.data").warning(
                "this pass resumes inside epoch %d, after %d of its samples, where the previous loop left the epoch by "
                "`break`. To begin the next epoch instead, write `state = state.next_epoch()` after the loop",
                cursor.epoch,
                cursor.consumed,
            )


def _without_cursor(start: Positioned | Cursor) -> Positioned | None:
    """Return a record without its cursor: equal for a copy of the record, different for a later one."""
    return start.at(Cursor()) if isinstance(start, Positioned) else None


def advance(cursor: Cursor, consumed: int, *, is_last: bool) -> Cursor:
    """Return the cursor after a step that ends at `consumed`."""
    if is_last:
        return Cursor(cursor.seed, cursor.epoch + 1)
    return Cursor(cursor.seed, cursor.epoch, consumed, cursor.of)


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


def _user_classes(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Find the user's records and enums in plain containers: path, and name of the class."""
    kind: Any = type(value)
    if isinstance(value, msgspec.Struct | enum.Enum) or dataclasses.is_dataclass(value) or hasattr(value, "_fields"):
        if kind.__module__.partition(".")[0] != "accel":
            yield path, kind.__qualname__
    elif isinstance(value, list | tuple):
        for at, child in enumerate(cast("list[object]", value)):
            yield from _user_classes(child, f"{path}[{at}]")
    elif isinstance(value, dict):
        for key, child in cast("dict[object, object]", value).items():
            yield from _user_classes(child, f"{path}.{key}")
