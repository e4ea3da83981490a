# SPDX-License-Identifier: Apache-2.0
"""Frozen records that a loop carries: its position in the data, its accumulation window, its loss scale.

A call takes a record and returns the next one. A record that the loop has dropped is found by marks that are kept with
the records (`comm/_marks.py`).
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import sys
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol, Self, cast, runtime_checkable

import msgspec
import torch

from accel.comm._marks import Marks, Uncompared, carry_mark, find_mark
from accel.errors import ConfigError, DataError, StepError
from accel.errors._checks import check_count
from accel.random import check_seed


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

    _is_finalizing = staticmethod(sys.is_finalizing)  # a module's names go before a generator that nobody ended

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
        if not self._is_finalizing() and torch.is_grad_enabled():
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


class WindowLosses(Uncompared):
    """Losses of a window.

    Attributes:
        seen: figure that is finite if the losses are; a tensor of shape [] where reading it would wait.
    """

    seen: ClassVar[float | torch.Tensor | None] = None


class Accumulation(msgspec.Struct, frozen=True, weakref=True):
    """A window of micro-batches that share one optimizer step.

    Attributes:
        steps: micro-batches in a full window.
        sync_each_batch: whether ranks exchange gradients in every micro-batch and not only in the last. This takes more
            communication, but sharded models need no memory for full gradients. The result is the same.
        micro: micro-batches begun in this window; 0 between windows.
        backwards: micro-batches of this window with a backward.
        latest: the last of these.
        sync: whether the current micro-batch ends the window.
        updates: optimizer steps taken since the run began.
        skipped: steps skipped because a gradient was not finite.
        unit: unit of the weights of this window, which keeps gradients at the size of a mean's; 0 before its first
            backward.
        world_weight: weight of the window so far, over all ranks; a number where reading it does not wait for the
            device, else float64 of shape [].
        own_weight: weight of the window so far on this rank alone, a number or a tensor; None without one, as after the
            window's end, when ranks have summed it.
        scale: loss scale of the window's gradients; 0 before its first backward.
        retained: whether ranks exchanged gradients of a retained graph, so that further backward passes may follow.
        divided: number of gradients that `unscale_gradients` has divided by weight and loss scale: all, or 0; -1 where
            it has run and this rank has none.
        weighted: whether backward passes of this window gave a weight; None before its first.
        losses: known facts of the window's losses.
    """

    steps: int = 1
    sync_each_batch: bool = False
    micro: int = 0
    backwards: int = 0
    latest: int = 0
    sync: bool = False
    updates: int = 0
    skipped: int = 0
    unit: float = 0.0
    world_weight: Any = 0.0  # msgspec decodes no union of number and tensor
    own_weight: Any = None
    scale: float = 0.0
    retained: bool = False
    divided: int = 0
    weighted: bool | None = None
    losses: WindowLosses = WindowLosses()

    def __post_init__(self) -> None:
        check_count(self.steps, "the number of micro-batches is not valid", where="Accumulation.steps")

    def next(self, *, last: bool = False) -> Accumulation:
        """Return the record for the next micro-batch.

        Args:
            last: whether this is the last micro-batch, which ends a window that is not full.

        Raises:
            StepError: the window before has ended without an optimizer step, or a later record was dropped.
        """
        check_latest(self, "accum.next")
        if self.sync:
            raise StepError(
                "the window has ended without an optimizer step",
                expected="step = accel.optimizer_step(...); accum = step.accum",
                got=f"accum.next() after micro-batch {self.micro} of {self.steps}",
                fix="Call optimizer_step when accum.sync, and keep the accum that it returns.",
            )
        return next_micro_batch(self, last=last)

    def add(
        self,
        *,
        scale: float,
        unit: float,
        weighted: bool | None = None,
        world: float | torch.Tensor = 0.0,
        local: float | torch.Tensor | None = None,
    ) -> Accumulation:
        """Return the record after a backward.

        Args:
            scale: loss scale of the new gradients.
            unit: unit of their weight.
            weighted: whether the caller passed the weight.
            world: their weight over all ranks, where it is known.
            local: else their weight on this rank.

        Raises:
            StepError: no micro-batch has begun, or the loss scale changed within the window.
        """
        if self.micro == 0:
            raise StepError(
                "a backward outside of any micro-batch",
                expected="accum = accum.next(last=batch.is_last) before it",
                got="an accum between two windows",
            )
        if self.scale not in (0.0, scale):
            raise StepError(
                "the loss scale changed within a window", expected=str(self.scale), got=str(scale), where="backward"
            )
        both = local if self.own_weight is None else self.own_weight if local is None else self.own_weight + local
        return msgspec.structs.replace(
            self,
            backwards=self.backwards + (self.latest != self.micro),
            latest=self.micro,
            scale=scale,
            unit=unit,
            world_weight=self.world_weight + world,
            own_weight=both,
            weighted=weighted,
        )

    def share(self, total: float | torch.Tensor) -> Accumulation:
        """Return the record after ranks have summed their own weights.

        Args:
            total: the sum of `own_weight` over all ranks.
        """
        # most windows have no weight besides: no sum then, which would be a kernel
        before: float | torch.Tensor = self.world_weight
        known = not isinstance(before, torch.Tensor) and before == 0.0
        return msgspec.structs.replace(self, own_weight=None, world_weight=total if known else before + total)

    def close(self, *, stepped: bool, finite: bool = True) -> Accumulation:
        """Return the record between this window and the next.

        Args:
            stepped: whether parameters were changed.
            finite: whether the gradients were finite.
        """
        return Accumulation(
            steps=self.steps,
            sync_each_batch=self.sync_each_batch,
            updates=self.updates + stepped,
            skipped=self.skipped + (not finite),
        )

    def reset(self) -> Accumulation:
        """Return the record between two windows after this one is abandoned."""
        closed = self.close(stepped=False)
        carry_mark(self, closed, "spent")
        return closed

    def check_saveable(self) -> None:
        """Raise `ConfigError` within a window: a checkpoint would lose its gradients."""
        if self.micro:
            raise ConfigError(
                "gradients of an unfinished window cannot be saved",
                expected="a checkpoint between two windows",
                got=f"micro-batch {self.micro} of {self.steps}",
                where="Accumulation",
                fix="Save after optimizer_step.",
            )


def next_micro_batch(window: Accumulation, *, last: bool) -> Accumulation:
    """Return the window with its next micro-batch begun."""
    micro = window.micro + 1
    begun = msgspec.structs.replace(window, micro=micro, sync=last or micro == window.steps)
    if micro == 1:
        carry_mark(window, begun, "spent")  # until the first backward of the window
    return begun


def check_scale(window: Accumulation, scaler: object) -> None:
    """Raise `StepError` if a window begins with the loss scale that the step before has replaced."""
    if (mark := find_mark(window, "spent")) is not None and mark.note is scaler:
        raise StepError(
            "the loss scale belongs to the previous window",
            expected="scaler = step.scaler after each optimizer_step",
            got="the record that the latest step has replaced",
            where="backward",
            fix="Keep both records that the step returns: accum, scaler = step.accum, step.scaler.",
        )


def check_latest(record: object, where: str) -> None:
    """Raise `StepError` if a call has returned a later record of a window, which was dropped."""
    if (mark := find_mark(record, "followed")) is not None:
        raise StepError(
            "a later record of this window was dropped",
            expected="the record that the latest call returned",
            got="the one that it was given",
            where=where,
            fix=f"Keep its result: {mark.note}.",
        )


_LEAST = 2.0**-126  # the range of fp32
_MOST = 2.0**127


class LossScale(msgspec.Struct, frozen=True, weakref=True):
    """The factor of losses before backward, so that small gradients survive fp16.

    Attributes:
        scale: the factor, 2**-126 to 2**127.
        dynamic: whether the scale follows overflows.
        growth_factor: factor of the scale after `growth_interval` steps without an overflow.
        backoff_factor: factor of the scale after an overflow.
        growth_interval: steps without an overflow between two growths.
        good_steps: steps without an overflow since the last change.
        overflows: overflows in a row.
    """

    scale: float = 1.0
    dynamic: bool = False
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    good_steps: int = 0
    overflows: int = 0

    def __post_init__(self) -> None:
        facts = {
            "scale from 2**-126 to 2**127": _LEAST <= self.scale <= _MOST,
            "growth_factor of at least 1": self.growth_factor >= 1,
            "backoff_factor between 0 and 1": 0 < self.backoff_factor < 1,
            "growth_interval of at least 1": self.growth_interval >= 1,
        }
        for expected, holds in facts.items():
            if not holds:
                raise ConfigError("the loss scale is not valid", expected=expected, got=repr(self), where="LossScale")

    def update(self, *, finite: bool) -> LossScale:
        """Return the scale for the next step.

        Args:
            finite: whether the gradients of this step were finite.
        """
        if not self.dynamic:
            return self
        if not finite:
            return msgspec.structs.replace(
                self,
                scale=max(self.scale * self.backoff_factor, _LEAST),
                good_steps=0,
                overflows=self.overflows + 1,
            )
        if self.good_steps + 1 < self.growth_interval:
            return msgspec.structs.replace(self, good_steps=self.good_steps + 1, overflows=0)
        grown = min(self.scale * self.growth_factor, _MOST)
        return msgspec.structs.replace(self, scale=grown, good_steps=0, overflows=0)
