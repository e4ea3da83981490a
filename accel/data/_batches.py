# SPDX-License-Identifier: Apache-2.0
"""`batches`: from a cursor to the batches of the rest of its epoch, each knowing the cursor after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch
from torch.utils.data import DataLoader, Dataset

from accel.comm import Call, call_site, exchange
from accel.context import DistContext
from accel.data._loader import Loader
from accel.data._order import Order, order
from accel.data._plan import Cursor, SampleCount, Shard, shard
from accel.errors import DataError
from accel.random import Key, seed_rng
from accel.tree import map_leaves

_LOOKAHEAD = 8192  # positions of the order evaluated at once


class Batch(msgspec.Struct, frozen=True, eq=False):
    """One rank's batch.

    Attributes:
        data: what the loader's collate function made, on the context's device.
        valid: how many of its samples are real; the first ones. Stand-ins and padding follow them and do not count.
        rows: how many samples it holds, stand-ins and padding included.
        is_last: whether the epoch ends with it.
        next: the cursor after it.
    """

    data: Any
    valid: SampleCount
    rows: int
    is_last: bool
    next: Cursor

    @property
    def mask(self) -> torch.Tensor:
        """Which rows are real: bool, shape [rows], on the CPU."""
        return torch.arange(self.rows) < int(self.valid)


@runtime_checkable
class _Movable(Protocol):
    def to(self, device: torch.device, /) -> object: ...


def batches(ctx: DistContext, loader: Loader, cursor: Cursor) -> Generator[Batch]:
    """Give this rank's batches from the cursor to the end of its epoch. A collective at the first.

    All ranks take equally many steps. Starting in the middle costs what starting at the beginning costs. Before the
    first batch, ranks compare their plans and cursors in one message.

    Args:
        ctx: the context that the loader was prepared for.
        loader: from `prepare_loader`.
        cursor: where to start.

    Yields:
        Batches, their tensors on the context's device.

    Raises:
        DataError: a loader that is not prepared, or prepared for another rank; a cursor of another dataset.
        CollectiveMismatch: ranks hold other cursors, datasets of other lengths or other batch sizes; on every rank.
        ContextClosedError: the context is closed.
    """
    if not isinstance(loader, Loader):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass torch's
        raise DataError("the loader is not prepared", got=type(loader).__name__, fix="Use accel.prepare_loader first.")
    if (loader.rank, loader.world_size) != (ctx.rank, ctx.world_size):
        raise DataError(
            "the loader was prepared for another rank",
            expected=f"rank {ctx.rank} of {ctx.world_size}",
            got=f"rank {loader.rank} of {loader.world_size}",
            fix="Prepare it with this context.",
        )
    same = Call("batches", f"{cursor}\n{loader.plan}", call_site())
    _ = exchange(ctx.comm, same, torch.empty(0, dtype=torch.uint8))
    asked: deque[Shard] = deque()  # workers read ahead of what has been given
    for data in _read(loader, cursor, asked):
        part = asked.popleft()
        yield Batch(_to_device(data, ctx.device), part.valid, part.rows, part.is_last, part.next)


def _read(loader: Loader, cursor: Cursor, asked: deque[Shard]) -> Iterator[Any]:
    key = Key(cursor.seed).fold_in("worker", cursor.epoch)
    workers = loader.num_workers > 0
    return iter(
        DataLoader(
            _KeyedDataset(loader.dataset, key) if workers else loader.dataset,
            batch_sampler=_Requests(loader, cursor, asked),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            generator=key.generator(),  # so that starting an epoch draws nothing from the global stream
            **loader.options,
        )
    )


class _Requests:
    """The batch sampler of the rest of an epoch: indices, and for workers the position that seeds their streams."""

    def __init__(self, loader: Loader, cursor: Cursor, asked: deque[Shard]) -> None:
        self._loader = loader
        self._cursor = cursor
        self._asked = asked

    def __iter__(self) -> Iterator[Any]:
        workers = self._loader.num_workers > 0
        for part, indices in _requests(self._loader, self._cursor):
            self._asked.append(part)
            yield (part.start, indices) if workers else indices


def _requests(loader: Loader, cursor: Cursor) -> Iterator[tuple[Shard, list[int]]]:
    """This rank's shards with their dataset indices, the order evaluated in chunks."""
    epoch_order = order(cursor.seed, cursor.epoch, loader.plan.samples, shuffle=loader.plan.shuffle)
    waiting: list[Shard] = []
    rows, limit = 0, 1  # the first batch must not wait for a whole chunk
    for part in _shards(loader, cursor):
        waiting.append(part)
        rows += part.rows
        if rows >= limit or part.is_last:
            yield from _evaluate(epoch_order, waiting)
            waiting, rows, limit = [], 0, min(limit * 8 + part.rows, _LOOKAHEAD)


def _shards(loader: Loader, cursor: Cursor) -> Iterator[Shard]:
    epoch = cursor.epoch
    while cursor.epoch == epoch:
        part = shard(loader.plan, cursor, loader.rank, loader.world_size)
        yield part
        cursor = part.next


def _evaluate(epoch_order: Order, parts: list[Shard]) -> Iterator[tuple[Shard, list[int]]]:
    spans = [torch.arange(part.start, part.start + part.rows) for part in parts]
    for span, part in zip(spans, parts, strict=True):
        if part.rows > part.valid:  # stand-ins repeat a sample of the same step
            span[part.valid :] = part.stop - 1
    indices = epoch_order.at(torch.cat(spans))
    at = 0
    for part in parts:
        yield part, indices[at : at + part.rows]
        at += part.rows


class _KeyedDataset(Dataset[Any]):
    """In a worker: seed the random streams per batch, so that augmentation repeats whichever worker reads it.

    To a `worker_init_fn`, which finds it as `get_worker_info().dataset`, it has the attributes of the user's dataset,
    and what is set on it is set there.
    """

    def __init__(self, dataset: Any, key: Key) -> None:
        self.__dict__.update(_dataset=dataset, _key=key)

    def __getitems__(self, request: tuple[int, list[int]]) -> list[Any]:
        position, indices = request
        seed_rng(self._key.fold_in(position), torch.device("cpu"))
        whole = getattr(self._dataset, "__getitems__", None)
        return whole(indices) if whole is not None else [self._dataset[index] for index in indices]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_dataset"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._dataset, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _KeyedDataset, (self._dataset, self._key)


def _to_device(data: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return data
    if isinstance(data, _Movable) and not isinstance(data, torch.Tensor):
        return data.to(device)
    return map_leaves(lambda leaf: _move(leaf, device), data)


def _move(leaf: object, device: torch.device) -> object:
    if isinstance(leaf, torch.Tensor):
        return leaf.to(device, non_blocking=leaf.is_pinned())
    return leaf.to(device) if isinstance(leaf, _Movable) else leaf
