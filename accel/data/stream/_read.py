# SPDX-License-Identifier: Apache-2.0
"""Reading one stream step by step, in this process or in workers, with the position after every step."""

from __future__ import annotations

import copy
import itertools
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import msgspec
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel.data._cursor import StreamPosition, WorkerPosition
from accel.data._requests import seed_base, seed_streams, twin
from accel.data._transfer import check_movable, pin
from accel.data.stream._cut import Cut, Part, cut
from accel.errors import DataError
from accel.random import Key

_REPORT_S = 10.0


@runtime_checkable
class Resumable(Protocol):
    """What can say where it stands and be put back there."""

    def state_dict(self) -> Any:
        """Return the position."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Go to a position that `state_dict` gave."""
        ...


class Step(msgspec.Struct, frozen=True, eq=False):
    """What a reader gives for one step.

    Attributes:
        parts: batches by rank, for the ranks that it reads for.
        counts: real samples of every rank.
        more: whether another step follows.
        position: of the reader after this step.
    """

    parts: dict[int, Part]
    counts: list[int]
    more: bool
    position: StreamPosition


class _Piece(msgspec.Struct, frozen=True, eq=False):
    """One step as a worker has read it; one without parts says that the worker's stream has ended."""

    worker: int
    parts: dict[int, Part]
    counts: list[int]
    more: bool
    position: WorkerPosition

    def pin_memory(self) -> _Piece:
        """Torch calls this in its pinning thread."""
        pinned = {rank: Part(pin(part.data), part.rows) for rank, part in self.parts.items()}
        return msgspec.structs.replace(self, parts=pinned)


class Skipped(msgspec.Struct, frozen=True):
    """A reader's word on how far it has come on its way to where it starts.

    Attributes:
        worker: which of its processes.
        elements: that this one has read and dropped.
        of: how many it will.
    """

    worker: int
    elements: int
    of: int


def read_steps(
    source: Iterable[Any],
    plan: Cut,
    collate: Callable[[Any], Any],
    *,
    epoch: int,
    key: Key,
    start: StreamPosition,
    replay: bool,
    options: dict[str, Any],
) -> Generator[Step | Skipped]:
    """Read a stream from a position to the end of its epoch. No communication.

    A step is given as soon as one more element is known to follow; with tail `drop`, one more step. Without workers,
    reading leaves the global random streams where it has drawn to.

    Args:
        source: iterable from its beginning, or from where its `load_state_dict` puts it; left as it is.
        plan: how it is cut into steps.
        collate: makes batches, in the process that reads.
        epoch: told to a source that has `set_epoch`.
        key: of the random streams that reading draws from.
        start: where to begin.
        replay: whether a state that the source has is left alone, and resuming reads again from the beginning.
        options: of torch's DataLoader.

    Yields:
        Steps; workers take turns. Before them, now and then, how far a reader is that reads again what it skips.

    Raises:
        DataError: the stream ends before the position.
        TreeError: a batch holds a container that cannot be taken apart.
    """
    _warn_of_replay(source, start, replay)
    chunks = _Chunks(_at_epoch(source, epoch), plan, collate, (key, start.workers, replay))
    loader = DataLoader(chunks, batch_size=None, collate_fn=_unchanged, generator=key.generator(), **options)
    turns = _Turns(iter(loader), start)
    try:
        for skipped in turns.skip():
            _log().warning("skipped %d of %d elements (worker %d)", skipped.elements, skipped.of, skipped.worker)
            yield skipped
        while (piece := turns.next()) is not None:
            for part in piece.parts.values():
                check_movable(part.data, plan.containers)
            more = piece.more or turns.any_left()
            yield Step(piece.parts, piece.counts, more, turns.position())
    except Exception as error:
        if options["num_workers"]:  # torch reports a worker's death again, anywhere, while their iterator is held
            traceback.clear_frames(error.__traceback__)
        raise
    finally:
        turns.close()


class _Turns:
    """Puts what workers give into their order: one step from each that has not ended."""

    def __init__(self, items: Iterator[Any], start: StreamPosition) -> None:
        self._items: Iterator[Any] = items
        self._ranks = start.ranks
        self._positions = list(start.workers)
        workers = [i for i, worker in enumerate(start.workers) if not worker.ended]
        self._order = deque(sorted(workers, key=lambda worker: (worker < start.turn, worker)))
        self._waiting: dict[int, deque[_Piece]] = {worker: deque() for worker in workers}
        self._going: set[int] = set()  # said that they have more

    def close(self) -> None:
        """Let go of the workers, which end with it."""
        self._items = iter(())

    def skip(self) -> Iterator[Skipped]:
        """Wait until all workers are where they start; give what they say until then."""
        for worker in self._order if any(each.elements for each in self._positions) else ():
            while not self._waiting[worker]:
                if isinstance(item := next(self._items), Skipped):
                    yield item
                else:
                    self._waiting[item.worker].append(item)

    def next(self) -> _Piece | None:
        """Return the next step's piece, None at the end."""
        while self._order:
            worker = self._order[0]
            piece = self._hear(worker)
            self._waiting[worker].popleft()
            self._positions[worker] = piece.position
            if piece.more:
                self._order.rotate(-1)
                self._going.add(worker)
            else:
                self._order.popleft()
                self._going.discard(worker)
            if piece.parts:
                return piece
        return None

    def any_left(self) -> bool:
        """Whether another step follows; waits for workers that have not been heard of."""
        return any(worker in self._going or self._hear(worker).parts for worker in self._order)

    def position(self) -> StreamPosition:
        """The position after the last piece."""
        return StreamPosition(tuple(self._positions), self._order[0] if self._order else 0, self._ranks)

    def _hear(self, worker: int) -> _Piece:
        while not self._waiting[worker]:
            item = next(self._items)
            self._waiting[item.worker].append(item)
        return self._waiting[worker][0]


class _Chunks(IterableDataset[Any]):
    """The stream in steps, as one process reads it.

    To a `worker_init_fn`, which finds it as `get_worker_info().dataset`, it has the attributes of the user's dataset,
    and what is set on it is set there.
    """

    def __init__(
        self,
        source: Iterable[Any],
        plan: Cut,
        collate: Callable[[Any], Any],
        begin: tuple[Key, tuple[WorkerPosition, ...], bool],
    ) -> None:
        self.__dict__.update(_source=source, _rest=(plan, collate, begin))

    def __iter__(self) -> Iterator[_Piece | Skipped]:
        source: Any = self.__dict__["_source"]
        plan, collate, (key, positions, replay) = self.__dict__["_rest"]
        info = get_worker_info()
        worker = info.id if info is not None else 0
        if positions[worker].ended:
            return iter(())
        stream = _Seeded(source, positions[worker], seed_base(key.fold_in(worker)), replay=replay)
        return _pieces(stream, plan, collate, worker, positions[worker].elements)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_source"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.__dict__["_source"], name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Chunks, (self.__dict__["_source"], *self.__dict__["_rest"])


def _at_epoch(source: Any, epoch: int) -> Any:
    """The source to read, told its epoch once: workers may share the number, as those of Hugging Face's datasets do."""
    source = twin(source) if isinstance(source, Resumable) else source  # reading moves a position
    if callable(set_epoch := getattr(source, "set_epoch", None)):
        set_epoch(epoch)
    return source


def _pieces(
    stream: _Seeded, plan: Cut, collate: Callable[[Any], Any], worker: int, start: int
) -> Iterator[_Piece | Skipped]:
    ahead = plan.size if plan.tail == "drop" else 1
    for at in stream.skip_to(start, (ahead, plan.size - ahead)):
        yield Skipped(worker, at, start)
    held = stream.take(ahead)
    if len(held) < ahead:
        yield _Piece(worker, {}, [], False, WorkerPosition(start, ended=True))
    while len(held) == ahead:
        elements = held + stream.take(plan.size - ahead)
        at, state = stream.at, stream.state()
        parts, counts = cut(plan, elements, collate)
        held = stream.take(ahead)
        more = len(held) == ahead
        yield _Piece(worker, parts, counts, more, WorkerPosition(at, state if more else None, ended=not more))


class _Seeded:
    """A stream that is read with random streams of its own from each position on, and that can say where it stands."""

    def __init__(self, source: Iterable[Any], begin: WorkerPosition, base: int, *, replay: bool) -> None:
        self._base = base
        self._owner: Resumable | None = source if isinstance(source, Resumable) and not replay else None
        resumes = begin.state is not None and not replay
        self.at = begin.elements if resumes else 0
        seed_streams(base, self.at)
        if resumes and self._owner is not None:
            self._owner.load_state_dict(copy.deepcopy(begin.state))
        self._elements = iter(source)
        if self._owner is None and isinstance(self._elements, Resumable) and not replay:
            self._owner = self._elements
            if resumes:
                self._owner.load_state_dict(copy.deepcopy(begin.state))
        if resumes and self._owner is None:
            raise DataError(
                "the cursor holds a state, and the stream cannot take it",
                expected="a stream with load_state_dict, as when it was saved",
                got=type(source).__name__,
            )

    def take(self, count: int) -> list[Any]:
        """Read so many elements, or fewer at the end, with random streams that follow from the position."""
        if count:
            seed_streams(self._base, self.at)
        taken = list(itertools.islice(self._elements, count))
        self.at += len(taken)
        return taken

    def state(self) -> Any:
        """Return where the stream stands, None if it cannot tell; a copy, since streams go on changing theirs."""
        return copy.deepcopy(self._owner.state_dict()) if self._owner is not None else None

    def skip_to(self, elements: int, strides: tuple[int, ...]) -> Iterator[int]:
        """Read up to a position and drop what is read; tell now and then how far it has come.

        Args:
            elements: the position.
            strides: how many were taken at once, in turns, when this was read for use: so were the streams seeded.
        """
        told = time.monotonic()
        counts = itertools.cycle(strides)
        while self.at < elements:
            count = min(next(counts), elements - self.at)
            if len(self.take(count)) < count:
                raise DataError(
                    "the stream ended before the cursor's position",
                    expected=f"more than {elements} elements",
                    got=str(self.at),
                    fix="The cursor belongs to another stream; begin the epoch again with Cursor(seed=, epoch=).",
                )
            if time.monotonic() - told > _REPORT_S:
                told = time.monotonic()
                yield self.at


def _warn_of_replay(source: Iterable[Any], start: StreamPosition, replay: bool) -> None:
    behind = [worker for worker in start.workers if (replay or worker.state is None) and not worker.ended]
    replayed = sum(worker.elements for worker in behind)
    if replayed:
        _log().warning(
            "%s is read again from its beginning and %d elements are skipped, because %s",
            type(source).__name__,
            replayed,
            "replay=True"
            if replay
            else "the cursor holds no state of it"
            if isinstance(source, Resumable)
            else "it has no state_dict and load_state_dict",
        )


def _unchanged(piece: Any) -> Any:
    return piece


def _log() -> logging.Logger:
    return logging.getLogger("accel.data")
