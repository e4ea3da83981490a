# SPDX-License-Identifier: Apache-2.0
"""One process's reading of a stream: its elements, sharded step by step into the batches of ranks."""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import msgspec
from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info

from accel.data._epoch import fresh_generator
from accel.data._requests import seed_base, seed_streams, twin
from accel.data._shards import Tail
from accel.data._transfer import pin
from accel.errors import DataError
from accel.loop_state import WorkerPosition
from accel.random import Key
from accel.tree import Container
from accel.tree._walk import tensors

REPLAY = (
    'To read the stream again from its beginning, write accel.prepare_loader(ctx, loader, stream="dispatch", '
    "replay=True): pass replay=True."
)
_REPORT_S = 10.0


@runtime_checkable
class Resumable(Protocol):
    """A source that saves its position and goes back to it."""

    def state_dict(self) -> Any:
        """Return the position."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Go to a position that `state_dict` gave."""
        ...


def resumable(source: object) -> Resumable | None:
    """Return a source that gives its position, and goes back to it, without further arguments; None for others."""
    if not isinstance(source, Resumable):
        return None
    try:
        inspect.signature(source.state_dict).bind()
        inspect.signature(source.load_state_dict).bind(None)
    except TypeError:
        return None
    except ValueError:  # a method of an extension has no signature
        pass
    return source


def forgotten_samples(source: object) -> int:
    """Return the most samples that a stream's state leaves out: in shuffle buffers of Hugging Face's datasets."""
    buffers = (each for each in _parts(source) if type(each).__name__ == "BufferShuffledExamplesIterable")
    sizes = (getattr(each, "buffer_size", 0) for each in buffers)
    return sum(size for size in sizes if size > 1)


def is_unseeded(source: object) -> bool:
    """Whether a part of a stream draws from a generator of numpy that was made without a seed."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    generators = [cast(Any, each) for each in _parts(source) if isinstance(each, numpy.random.Generator)]
    seeds = [getattr(each.bit_generator.seed_seq, "entropy", None) for each in generators]
    return any(isinstance(seed, int) and seed >= 2**64 for seed in seeds)  # the system's entropy has 128 bits


def _parts(source: object) -> Iterator[object]:
    """Yield a stream and, at any depth, what it and the streams in it hold."""
    waiting, seen = [source], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        kind = type(each)
        if isinstance(each, list | tuple):
            waiting += cast("list[object]", each)
        elif isinstance(each, dict):
            waiting += cast("dict[object, object]", each).values()
        elif (
            issubclass(kind, IterableDataset) or kind.__module__.startswith("datasets.") or hasattr(kind, "state_dict")
        ):
            waiting += cast("dict[str, object]", getattr(each, "__dict__", {})).values()


class StepPlan(msgspec.Struct, frozen=True):
    """A reader's shard of its stream.

    Attributes:
        size: elements to a step.
        ranks: data-parallel ranks that share a step.
        mine: ranks that get their batches from here.
        tail: treatment of a step with fewer elements.
        whole: whether an element is a batch already, one for a rank.
        containers: further kinds of containers that batches may hold.
    """

    size: int
    ranks: int
    mine: tuple[int, ...]
    tail: Tail
    whole: bool
    containers: tuple[Container, ...] = ()


class LocalBatch(msgspec.Struct, frozen=True, eq=False):
    """One rank's batch."""

    data: Any  # the collate function's result
    rows: int  # samples in it, placeholders included


class WorkerStep(msgspec.Struct, frozen=True, eq=False):
    """One step as a worker has read it; one without batches marks the end of the worker's stream."""

    worker: int
    batches: dict[int, LocalBatch]
    counts: list[int]
    more: bool
    position: WorkerPosition

    def pin_memory(self) -> WorkerStep:
        """Torch calls this in its pinning thread."""
        pinned = {rank: LocalBatch(pin(batch.data), batch.rows) for rank, batch in self.batches.items()}
        return msgspec.structs.replace(self, batches=pinned)


class Skipped(msgspec.Struct, frozen=True):
    """A reader's progress on its way to its start."""

    worker: int  # its number among the reading processes
    elements: int  # elements that it has read and dropped
    of: int  # elements to drop in all


class StreamSteps(IterableDataset[Any]):
    """The stream in steps, as one process reads it.

    A `worker_init_fn` finds this object as `get_worker_info().dataset`. It shows the attributes of the user's dataset,
    and attributes set on it are set there.

    Args:
        source: iterable from its beginning, or from the position of its `load_state_dict`.
        plan: plan of its shards.
        collate: makes batches.
        begin: key of the random streams, position of each worker, and whether reading replays the skipped elements.
    """

    def __init__(
        self,
        source: Iterable[Any],
        plan: StepPlan,
        collate: Callable[[Any], Any],
        begin: tuple[Key, tuple[WorkerPosition, ...], bool],
    ) -> None:
        self.__dict__.update(_source=source, _rest=(plan, collate, begin))

    def __iter__(self) -> Iterator[WorkerStep | Skipped]:
        source: Any = self.__dict__["_source"]
        plan, collate, (key, positions, replay) = self.__dict__["_rest"]
        info = get_worker_info()
        worker = info.id if info is not None else 0
        if positions[worker].ended:
            return iter(())
        elements = _SeededElements(source, positions[worker], seed_base(key.fold_in(worker)), replay=replay)
        return _steps(elements, plan, collate, worker, positions[worker].elements)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_source"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.__dict__["_source"], name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return StreamSteps, (self.__dict__["_source"], *self.__dict__["_rest"])


def at_epoch(source: Any, epoch: int, key: Key) -> Any:
    """Return the source after one call of its `set_epoch`: workers may share the epoch, as Hugging Face's do.

    Generators of Python, numpy and torch that the source holds are seeded from the key. The source that is returned is
    a copy if reading changes it.
    """
    seeded = _with_seeded_generators(source, key.fold_in("generators", epoch), {})
    if seeded is source and isinstance(source, Resumable):  # reading moves a position
        seeded = twin(source)
    if callable(set_epoch := getattr(seeded, "set_epoch", None)):
        set_epoch(epoch)
    return seeded


def _with_seeded_generators(source: Any, key: Key, known: dict[int, Any]) -> Any:
    """Return a stream with generators seeded from the key, at any depth; itself if it holds none.

    Streams of Hugging Face and torch's data pipes seed theirs at each pass. `known` keeps shared objects shared.
    """
    if id(source) in known:
        return known[id(source)]
    kind = cast("type[object]", type(source))
    new = fresh_generator(source, key)
    if new is None:
        known[id(source)] = new = source  # for a stream that holds itself
        if kind in (list, tuple) and source and isinstance(source[0], IterableDataset):
            inside = [_with_seeded_generators(each, key.fold_in(at), known) for at, each in enumerate(source)]
            if any(one is not other for one, other in zip(inside, source, strict=True)):
                new = cast(Any, kind)(inside)
        elif issubclass(kind, IterableDataset) and not issubclass(kind, IterDataPipe):
            foreign = kind.__module__.startswith("datasets.")
            held = {} if foreign else cast("dict[str, Any]", getattr(source, "__dict__", {}))
            seeded = {name: _with_seeded_generators(value, key.fold_in(name), known) for name, value in held.items()}
            if any(seeded[name] is not value for name, value in held.items()):
                new = twin(source)
                if new is not source:  # which cannot be copied otherwise
                    new.__dict__.update(seeded)
    known[id(source)] = new
    return new


def _steps(
    stream: _SeededElements, plan: StepPlan, collate: Callable[[Any], Any], worker: int, start: int
) -> Iterator[WorkerStep | Skipped]:
    # one element ahead shows that a step follows; with `drop`, only a whole step does
    ahead = plan.size if plan.tail == "drop" else 1
    for at in stream.skip_to(start, (ahead, plan.size - ahead)):
        yield Skipped(worker, at, start)
    held = stream.take(ahead)
    if len(held) < ahead:
        yield WorkerStep(worker, {}, [], False, WorkerPosition(start, ended=True))
    while len(held) == ahead:
        elements = held + stream.take(plan.size - ahead)
        at = stream.at
        state = stream.state()
        batches, counts = _shard_step(plan, elements, collate)
        held = stream.take(ahead)
        more = len(held) == ahead
        yield WorkerStep(worker, batches, counts, more, WorkerPosition(at, state if more else None, ended=not more))


class _SeededElements:
    """The elements of a stream, read with random streams that follow from the position."""

    def __init__(self, source: Iterable[Any], begin: WorkerPosition, base: int, *, replay: bool) -> None:
        self._base = base
        self._owner = None if replay else resumable(source)
        resumes = begin.state is not None and not replay
        self.at = begin.elements if resumes else 0
        seed_streams(base, self.at)
        if resumes and self._owner is not None:
            self._owner.load_state_dict(copy.deepcopy(begin.state))
        self._elements = iter(source)
        if self._owner is None and not replay:
            self._owner = resumable(self._elements)
            if resumes and self._owner is not None:
                self._owner.load_state_dict(copy.deepcopy(begin.state))
        if resumes and self._owner is None:
            raise DataError(
                "the cursor holds a state, and the stream cannot take it",
                expected="a stream with load_state_dict, as when it was saved",
                got=type(source).__name__,
                fix=REPLAY,
            )

    def take(self, count: int) -> list[Any]:
        """Read that many elements, or fewer at the end."""
        if count:
            seed_streams(self._base, self.at)
        taken = list(itertools.islice(self._elements, count))
        self.at += len(taken)
        return taken

    def state(self) -> Any:
        """Return a copy of the stream's state, which the stream may change later; None without one."""
        if self._owner is None:
            return None
        try:
            return copy.deepcopy(self._owner.state_dict())
        except NotImplementedError:  # of a base class: it has none
            return None

    def skip_to(self, elements: int, strides: tuple[int, ...]) -> Iterator[int]:
        """Read and drop elements up to a position; yield the position now and then."""
        reported = time.monotonic()
        # random streams are seeded at each `take`, so skipping repeats the counts of the first reading
        counts = itertools.cycle(strides)
        while self.at < elements:
            count = min(next(counts), elements - self.at)
            if len(self.take(count)) < count:
                raise DataError(
                    "the stream ended before the cursor's position",
                    expected=f"more than {elements} elements",
                    got=str(self.at),
                    fix="It belongs to another stream. Begin the epoch again: state = state.at(Cursor(seed, epoch)).",
                )
            if time.monotonic() - reported > _REPORT_S:
                reported = time.monotonic()
                yield self.at


def _shard_step(
    plan: StepPlan, elements: Sequence[Any], collate: Callable[[Any], Any]
) -> tuple[dict[int, LocalBatch], list[int]]:
    """Shard the elements of one step, contiguous in rank order; return the batches made here, and real samples by rank.

    Raises `DataError` where elements are batches already, and one has no rows that can be counted.
    """
    if plan.whole:
        return _deal_batches(plan, [collate(element) for element in elements])
    each, extra = divmod(len(elements), plan.ranks)
    counts = [each + (rank < extra) for rank in range(plan.ranks)]
    constant = -(-plan.size // plan.ranks) if plan.tail == "pad" else 0
    batches: dict[int, LocalBatch] = {}
    for rank in plan.mine:
        start = rank * each + min(rank, extra)
        rows = max(counts[rank], constant, 1)
        samples = list(elements[start : start + counts[rank]])
        stand_ins = [elements[-1]] * (rows - len(samples))
        batches[rank] = LocalBatch(collate(samples + stand_ins), rows)
    return batches, counts


def _deal_batches(plan: StepPlan, given: list[Any]) -> tuple[dict[int, LocalBatch], list[int]]:
    """Assign each rank one of the stream's own batches; for a rank without one the last stands in."""
    rows = [_count_rows(batch, plan.containers) for batch in given]
    last = len(given) - 1
    counts = [rows[rank] if rank <= last else 0 for rank in range(plan.ranks)]
    return {rank: LocalBatch(given[min(rank, last)], rows[min(rank, last)]) for rank in plan.mine}, counts


def _count_rows(batch: object, containers: Sequence[Container]) -> int:
    """Return the samples in a batch of the stream: tensors of shape [samples, ...]."""
    shapes = {path: list(leaf.shape) for path, leaf in tensors(batch, containers)}
    rows = {shape[0] if shape else 0 for shape in shapes.values()}
    if len(rows) != 1 or rows == {0}:
        raise DataError(
            "the samples in a batch of the stream cannot be counted",
            expected="tensors of shape [samples, ...], at least one sample, equally many in all",
            got=", ".join(f"{path} of {shape}" for path, shape in shapes.items()) or f"{type(batch).__name__}",
            fix="Let the stream yield samples, and the DataLoader batch them: batch_size=.",
        )
    return rows.pop()
