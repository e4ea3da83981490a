# SPDX-License-Identifier: Apache-2.0
"""Steps of a stream read ahead: by workers in turn, and several for one message between ranks."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from torch.utils.data import DataLoader

from accel.comm import Call, reduce_ints, shared_failure
from accel.context import DistContext
from accel.data._requests import read_error
from accel.data._transfer import check_movable
from accel.data.stream._reader import (
    REPLAY,
    LocalBatch,
    Skipped,
    StepPlan,
    StreamSteps,
    WorkerStep,
    at_epoch,
    forgotten_samples,
    resumable,
)
from accel.errors import AccelError, DataError, TreeError
from accel.loop_state import StreamPosition
from accel.random import Key, isolated_rng
from accel.tree import Container
from accel.tree._walk import tensors

_MOST_BYTES = 1 << 23


class ReadStep(msgspec.Struct, frozen=True, eq=False):
    """One step, as a rank has read it."""

    batches: dict[int, LocalBatch]  # batches by data-parallel rank, for the ranks that this one serves
    counts: list[int]  # real samples of every data-parallel rank
    more: bool  # whether another step follows
    position: StreamPosition  # of the reader after this step


class AgreedStep(NamedTuple):
    """One step, as all ranks agree on it."""

    batch: LocalBatch  # this rank's batch
    samples: int  # real samples in it
    total: int  # real samples of all ranks
    is_last: bool  # whether the epoch ends with it
    position: StreamPosition | None  # of this rank's reader after it; None on a rank that does not read


def read_steps(
    source: Iterable[Any],
    plan: StepPlan,
    collate: Callable[[Any], Any],
    *,
    epoch: int,
    key: Key,
    start: StreamPosition,
    replay: bool,
    options: dict[str, Any],
) -> Generator[ReadStep | Skipped]:
    """Read a stream from a position to the end of its epoch, in steps; workers take turns. No communication.

    A step is yielded once one more element is known to follow; with tail `drop`, one more step.
    """
    _warn_of_resume(source, start, replay)
    steps = StreamSteps(at_epoch(source, epoch, Key(key.seed)), plan, collate, (key, start.workers, replay))
    loader = DataLoader(steps, batch_size=None, collate_fn=_unchanged, generator=key.generator(), **options)
    turns = _WorkerTurns(iter(loader), start)
    try:
        for skipped in turns.skip():  # progress, for a reader that replays
            _log().warning("skipped %d of %d elements (worker %d)", skipped.elements, skipped.of, skipped.worker)
            yield skipped
        while (step := turns.next()) is not None:
            for batch in step.batches.values():
                check_movable(batch.data, plan.containers)
            more = step.more or turns.any_left()
            yield ReadStep(step.batches, step.counts, more, turns.position())
    except Exception as error:
        if options["num_workers"]:  # torch reports a worker's death again, anywhere, while their iterator is held
            traceback.clear_frames(error.__traceback__)
        raise
    finally:
        turns.close()


class Prefetcher:
    """Reads several steps at once; raises an error of reading after the steps before it.

    Args:
        ctx: the context.
        call: the next message, as all ranks name it.
        steps: steps from `read_steps`; nothing on a rank that does not read.
        here: whether this process reads; its own random streams are then restored.
        loads: whether the stream takes a state before its first step.
    """

    def __init__(
        self, ctx: DistContext, call: Call, steps: Iterator[ReadStep | Skipped], *, here: bool, loads: bool
    ) -> None:
        self._guard = isolated_rng if here else contextlib.nullcontext
        self._ctx = ctx
        self._call = call
        self._steps = steps
        self._read: deque[ReadStep] = deque()
        self._failure: AccelError | None = None
        self._loads = loads

    def catch_up(self) -> None:
        """Wait until all ranks have read the elements that they skip. A collective, now and then."""
        # reading again can take longer than a message may, so ranks that still skip report it
        while any(reduce_ints(self._ctx.comm, self._call, [int(self._skips())], "max")):
            pass

    def take(self, count: int) -> list[ReadStep]:
        """Return that many steps, or fewer at the end or before an error; all ranks raise an error of the first one."""
        taken: list[ReadStep] = []
        with self._guard():  # once for all steps: it takes as long as a small one
            while len(taken) < count and (step := self._next()) is not None:
                if isinstance(step, ReadStep):
                    taken.append(step)
        if self._failure is not None and not taken:
            with shared_failure(self._ctx.comm, self._call):
                raise self._failure
        return taken

    def _skips(self) -> bool:
        """Read the first step or a report before it; return whether it was a report."""
        if self._read:
            return False
        with self._guard():
            step = self._next()
        if isinstance(step, ReadStep):
            self._read.append(step)
        return isinstance(step, Skipped)

    def _next(self) -> ReadStep | Skipped | None:
        if self._read:
            return self._read.popleft()
        if self._failure is not None:
            return None
        try:
            step = next(self._steps, None)
            self._loads = self._loads and not isinstance(step, ReadStep)
            return step
        except AccelError as error:
            self._failure = error
        except Exception as error:  # any error of the user's stream
            cause, place = read_error(error)
            where = f"{place}{', ' * bool(place)}rank {self._ctx.rank}, batches"
            problem = "the stream could not continue from its state" if self._loads else "reading the stream failed"
            self._failure = DataError(f"{problem}: {cause}", where=where, fix=REPLAY if self._loads else "")
            self._failure.__cause__ = error
        return None


def next_count(count: int, limit: int, step_bytes: int) -> int:
    """Return the steps of the next message: twice as many, as long as they are few and small. The first has one."""
    return max(1, min(2 * count, limit, _MOST_BYTES // max(step_bytes, 1)))


def batch_bytes(data: object, containers: Sequence[Container] = ()) -> int:
    """Return the bytes of a batch's tensors; an unknown container counts as a large batch."""
    try:
        return sum(leaf.nbytes for _, leaf in tensors(data, containers))
    except TreeError:
        return _MOST_BYTES


class _WorkerTurns:
    """Orders the steps of workers: one step from each that has not ended."""

    def __init__(self, items: Iterator[Any], start: StreamPosition) -> None:
        self._items: Iterator[Any] = items
        self._ranks = start.ranks
        self._positions = list(start.workers)
        workers = [i for i, worker in enumerate(start.workers) if not worker.ended]
        self._order = deque(sorted(workers, key=lambda worker: (worker < start.turn, worker)))
        self._waiting: dict[int, deque[WorkerStep]] = {worker: deque() for worker in workers}
        self._going: set[int] = set()  # workers known to have more

    def close(self) -> None:
        """Let go of the workers, which end with their iterator."""
        self._items = iter(())

    def skip(self) -> Iterator[Skipped]:
        """Wait until all workers have reached their start; yield their reports."""
        for worker in self._order if any(each.elements for each in self._positions) else ():
            while not self._waiting[worker]:
                if isinstance(item := next(self._items), Skipped):
                    yield item
                else:
                    self._waiting[item.worker].append(item)

    def next(self) -> WorkerStep | None:
        """Return the next step, None at the end."""
        while self._order:
            worker = self._order[0]
            step = self._peek(worker)
            self._waiting[worker].popleft()
            self._positions[worker] = step.position
            if step.more:
                self._order.rotate(-1)
                self._going.add(worker)
            else:
                self._order.popleft()
                self._going.discard(worker)
            if step.batches:
                return step
        return None

    def any_left(self) -> bool:
        """Return whether another step follows; waits for the next step of each worker."""
        return any(worker in self._going or self._peek(worker).batches for worker in self._order)

    def position(self) -> StreamPosition:
        """Return the position after the last step."""
        return StreamPosition(tuple(self._positions), self._order[0] if self._order else 0, self._ranks)

    def _peek(self, worker: int) -> WorkerStep:
        while not self._waiting[worker]:
            item = next(self._items)
            self._waiting[item.worker].append(item)
        return self._waiting[worker][0]


def _warn_of_resume(source: Iterable[Any], start: StreamPosition, replay: bool) -> None:
    """Log how many samples a resume reads again, or loses."""
    begun = [worker for worker in start.workers if worker.elements and not worker.ended]
    behind = [worker for worker in begun if replay or worker.state is None]
    replayed = sum(worker.elements for worker in behind)
    name = type(source).__name__
    forgotten = forgotten_samples(source) if begun else 0
    if forgotten and len(behind) < len(begun):
        lost = forgotten * (len(begun) - len(behind))
        text = "up to %d samples of %s are lost: they were in shuffle buffers, which its state leaves out. replay=True "
        _log().warning(text + "would read it again from its beginning", lost, name)
    if not replayed:
        return
    if forgotten:
        reason = "its state leaves out the samples in shuffle buffers"
    elif replay:
        reason = "replay=True"
    elif resumable(source) is not None:
        reason = "the cursor holds no state of it"
    else:
        reason = "it has no state_dict() and load_state_dict(state)"
    text = "%s is read again from its beginning and %d elements are skipped, because %s"
    _log().warning(text, name, replayed, reason)


def _unchanged(step: Any) -> Any:
    return step


def _log() -> logging.Logger:
    return logging.getLogger("accel.data")
