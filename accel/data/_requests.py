# SPDX-License-Identifier: Apache-2.0
"""A rank's requests for samples, and their answers or errors: each sample with separate random streams."""

from __future__ import annotations

import contextlib
import os
import random as python_random
import re
import sys
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, get_worker_info

from accel.data._epoch import DrawnOrder, Epoch, Order
from accel.data._shards import BatchBounds, EpochPlan, Shard, shard
from accel.errors._checks import is_users
from accel.loop_state import Cursor
from accel.random import Key, isolated_rng

_FIRST, _LOOKAHEAD = 1024, 16384  # positions of the order evaluated at once: few at first, which a batch waits for
_WORD = 2**64 - 1
_STORED = frozenset({list, tuple, range, torch.Tensor})

Request = tuple[Shard, list[int]]


def requests(epoch: Epoch, rank: int, world_size: int) -> Iterator[Request]:
    """Yield a rank's shards of the rest of an epoch, with their samples; placeholders repeat a sample of the step."""
    if isinstance(epoch.plan, EpochPlan):
        return _equal_requests(epoch.order, epoch.plan, epoch.cursor, (rank, world_size))
    return _unequal_requests(epoch.order, epoch.plan, epoch.cursor, (rank, world_size))


def _unequal_requests(
    this: Order | DrawnOrder, bounds: BatchBounds, cursor: Cursor, place: tuple[int, int]
) -> Iterator[Request]:
    epoch = cursor.epoch
    while cursor.epoch == epoch:
        part = bounds.shard(cursor, *place)
        yield part, _samples(this, part)
        cursor = part.next


def _equal_requests(
    this: Order | DrawnOrder, plan: EpochPlan, cursor: Cursor, place: tuple[int, int]
) -> Iterator[Request]:
    epoch, size, chunk = cursor.epoch, plan.global_batch, _FIRST
    while cursor.epoch == epoch:
        part = shard(plan, cursor, *place)
        whole = min((plan.end - cursor.consumed) // size, max(chunk // part.rows, 1))
        if whole == 0:
            yield part, _samples(this, part)
            return
        steps = torch.arange(part.start, part.start + whole * size, size)
        rows = torch.arange(part.rows).clamp_(max=part.stop - part.start - 1)
        for samples in this.at(steps[:, None] + rows):
            part = shard(plan, cursor, *place)
            yield part, samples
            cursor = part.next
        chunk = _LOOKAHEAD


def _samples(this: Order | DrawnOrder, part: Shard) -> list[int]:
    return this.at(torch.arange(part.start, part.start + part.rows).clamp_(max=part.stop - 1))


class Workers:
    """Worker processes that live from one epoch to the next, until `close` or the end of this object."""

    __slots__ = ("_busy", "_feed", "_reader")

    def __init__(self) -> None:
        self._reader: DataLoader[Any] | None = None
        self._feed = _Feed()
        self._busy = False

    def close(self) -> None:
        """End the processes; a later epoch starts new ones."""
        self._reader = None  # torch ends them when their iterator goes

    @contextlib.contextmanager
    def lend(self, make: Callable[[Any], DataLoader[Any]], asked: Iterable[Any]) -> Generator[Iterable[Any]]:
        """Read with these workers; while they are lent, another epoch reads with other workers."""
        if self._busy:
            yield make(asked)
            return
        self._busy, self._feed.source = True, asked
        try:
            if self._reader is None:
                self._reader = make(self._feed)
            yield self._reader
        except Exception:
            self.close()  # a broken reader is not used again
            raise
        finally:
            self._busy, self._feed.source = False, ()


class _Feed:
    """A batch sampler that gets new batches for each epoch."""

    def __init__(self) -> None:
        self.source: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)


class RequestQueue:
    """The batch sampler of the rest of an epoch; it remembers open requests, because workers read ahead.

    Attributes:
        parts: shards requested and not yet read.
        bare: whether a request is a list of samples alone, without seeds and epoch.
    """

    def __init__(self, requests: Iterator[Request], epoch: int, base: int | None, *, bare: bool) -> None:
        self._requests = requests
        self._epoch = epoch
        self._base = base
        self.bare = bare
        self.parts: deque[Shard] = deque()

    def __iter__(self) -> Iterator[Any]:
        for part, samples in self._requests:
            self.parts.append(part)
            yield samples if self.bare else (self._epoch, self._base, part.start, part.stop, samples)


class RequestedDataset(Dataset[Any]):
    """Answers requests from a dataset, each sample with separate random streams if seeds are given.

    Augmentation then depends on neither workers, ranks nor batches. A `worker_init_fn` finds this object as
    `get_worker_info().dataset`: it shows the attributes, length and samples of the user's dataset, and attributes set
    on it are set there. A dataset with `set_epoch` is read through a shallow copy at the epoch of the request.
    """

    def __init__(self, dataset: Any, whole: bool) -> None:
        self.__dict__.update(_dataset=dataset, _whole=whole, _epoch=None)

    def __getitems__(self, request: tuple[int, int | None, int, int, list[int]]) -> Any:
        epoch, base, start, stop, samples = request
        if epoch != self.__dict__["_epoch"]:
            self.__dict__.update(_dataset=_at_epoch(self.__dict__["_dataset"], epoch), _epoch=epoch)
        if base is None or get_worker_info() is not None:
            return self._read(base, start, stop, samples)
        with isolated_rng():  # this process's streams are also the model's
            return self._read(base, start, stop, samples)

    def _read(self, base: int | None, start: int, stop: int, samples: list[int]) -> Any:
        dataset = self.__dict__["_dataset"]
        whole = self.__dict__["_whole"]
        if whole or callable(getattr(_undivided(dataset), "__getitems__", None)):  # it reads several at once itself
            if base is not None:
                seed_streams(base, start)
            return dataset[samples] if whole else dataset.__getitems__(samples)
        if base is None or _draws_nothing(dataset):
            if base is not None:  # for the collate function, which draws where the last sample would leave off
                seed_streams(base, min(start + len(samples), stop) - 1)
            return [dataset[sample] for sample in samples]
        items: list[Any] = []
        for position, sample in enumerate(samples, start):
            seed_streams(base, min(position, stop - 1))
            items.append(dataset[sample])
        return items

    def __len__(self) -> int:
        return len(self.__dict__["_dataset"])

    def __getitem__(self, index: Any) -> Any:
        return self.__dict__["_dataset"][index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_dataset"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.__dict__["_dataset"], name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return RequestedDataset, (self.__dict__["_dataset"], self.__dict__["_whole"])


def has_epochs(dataset: Any) -> bool:
    """Whether a dataset, or the dataset behind a subset, has `set_epoch`."""
    return callable(getattr(_undivided(dataset), "set_epoch", None))


def _at_epoch(dataset: Any, epoch: int) -> Any:
    """Return a shallow copy of a dataset at an epoch; a second pass may read another epoch."""
    if not has_epochs(dataset):
        return dataset
    if type(dataset) is Subset:
        subset = cast(Any, dataset)
        return Subset(_at_epoch(subset.dataset, epoch), subset.indices)
    there = twin(dataset)
    there.set_epoch(epoch)
    return there


def twin(source: Any) -> Any:
    """Return a shallow copy: an epoch or a position set on it does not change the user's object."""
    kind = cast(Any, type(source))
    if hasattr(kind, "__del__"):  # which may close what both hold
        return source
    try:
        # `copy.copy` would not do: a class that pickles its own `__dict__` shares it with the copy
        other = kind.__new__(kind)
        other.__dict__.update(source.__dict__)
    except (TypeError, AttributeError):  # not made of attributes: it is read itself
        return source
    return other


def read_here(dataset: Any, collate: Callable[[Any], Any], asked: Iterable[Any]) -> Iterator[Any]:
    """Read the requests' batches lazily in this process, a batch at once if the dataset has `__getitems__`."""
    several = getattr(dataset, "__getitems__", None)

    def read(samples: Any) -> Any:
        return collate(several(samples) if several else [dataset[sample] for sample in samples])

    return map(read, asked)


def _draws_nothing(dataset: Any) -> bool:
    """Return whether reading a sample runs code of python, numpy and torch only, which draws no numbers there."""
    dataset = _undivided(dataset)
    if type(dataset) is TensorDataset:
        return all(type(tensor) is torch.Tensor for tensor in dataset.tensors)
    numpy = sys.modules.get("numpy")
    return type(dataset) in _STORED or (numpy is not None and type(dataset) in (numpy.ndarray, numpy.memmap))


def _undivided(dataset: Any) -> Any:
    """Return the dataset behind subsets, which forward to it."""
    while type(dataset) is Subset:
        dataset = cast(Any, dataset).dataset
    return dataset


def seed_base(key: Key) -> int:
    """Return the base seed, which gives a sample's seeds together with its position."""
    return key.integers(1)[0]


def seed_streams(base: int, position: int) -> None:
    """Seed python's, numpy's and torch's global streams; the mixing is SplitMix64's (Steele et al. 2014)."""
    word = (base + (position + 1) * 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    word ^= word >> 31
    python_random.seed(word)
    torch.default_generator.manual_seed(word & 0x7FFFFFFFFFFFFFFF)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(word >> 32)  # torch takes the lower half, and both are Mersenne twisters


_FRAME = re.compile(r'  File "(.+)", line (\d+), in (.+)')
_IN_WORKER = re.compile(r"Caught \w+ in (?:DataLoader )?(worker process \d+)\.\nOriginal Traceback ")


class ReadError(NamedTuple):
    """Cause and place of a failed read."""

    cause: str  # class and message
    place: str  # "data.py:7 in __getitem__, worker process 0"; empty where no line is the user's


def read_error(error: BaseException) -> ReadError:
    """Return cause and place of an error; torch's error for a worker holds the worker's traceback as text."""
    text = str(error)
    in_worker = _IN_WORKER.match(text)
    if in_worker is None:
        frames = [(each.filename, str(each.lineno), each.name) for each in traceback.extract_tb(error.__traceback__)]
        return ReadError(f"{type(error).__name__}: {error}", _users(frames))
    lines = text.splitlines()
    at = max((i for i, line in enumerate(lines) if _FRAME.fullmatch(line)), default=0)
    message = [line for line in lines[at + 1 :] if not line.startswith("    ")]
    begins = max((i for i, line in enumerate(lines) if line.endswith("(most recent call last):")), default=0)
    found = [match.groups() for line in lines[begins:] if (match := _FRAME.fullmatch(line))]
    frames = [(file, number, name) for file, number, name in found]
    place = ", ".join(filter(None, (_users(frames), in_worker[1])))
    return ReadError("\n".join(message).strip() or type(error).__name__, place)


def _users(frames: list[tuple[str, str, str]]) -> str:
    """Return the innermost frame of the user's own code."""
    for file, number, name in reversed(frames):
        if is_users(file):
            return f"{os.path.basename(file)}:{number} in {name}"
    return ""
