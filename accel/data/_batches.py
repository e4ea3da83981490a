# SPDX-License-Identifier: Apache-2.0
"""`batches`: the batches from a cursor to the end of its epoch, each with the cursor after it."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Generator, Iterable, Iterator
from itertools import chain, islice
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn, cast

import msgspec
import torch
from torch.utils.data import DataLoader

from accel.comm import Call, call_site, shared_failure, start_values
from accel.context import DistContext, context_first
from accel.data._epoch import Epoch, plan_epoch
from accel.data._loader import Loader
from accel.data._requests import (
    Request,
    RequestedDataset,
    RequestQueue,
    has_epochs,
    read_error,
    read_here,
    requests,
    seed_base,
)
from accel.data._shards import BatchBounds, SampleCount, Shard, check_entry, copies_of
from accel.data._transfer import check_movable, moved
from accel.data.stream._batches import BatchStep, stream_steps
from accel.data.stream._loader import StreamLoader
from accel.errors import AccelError, ConfigError, DataError
from accel.errors._checks import check_kind
from accel.loop_state import Cursor, Positioned
from accel.random import Key


class Batch(msgspec.Struct, frozen=True, eq=False):
    """One rank's batch.

    Attributes:
        data: the collate function's result, on the context's device.
        valid: the number of real samples, which come first. Stand-ins and padding follow them and do not count.
        rows: the number of samples, placeholders and padding included.
        is_last: whether the epoch ends with it.
        next: the cursor after it.
        start: the cursor before it.
        duplicate: whether a lower rank holds the same samples, so that metrics count these only once.
        asked_at: time at which the loop asked for it, of `time.perf_counter`; None for a batch made by hand.
        wait_s: seconds that the loop waited for it.
    """

    data: Any
    valid: SampleCount
    rows: int
    is_last: bool
    next: Cursor
    start: Cursor
    duplicate: bool = False
    asked_at: float | None = None
    wait_s: float = 0.0

    if not TYPE_CHECKING:  # checkers refuse both by themselves

        def __iter__(self) -> NoReturn:
            raise _not_the_data("inputs, targets = batch.data", "a loop over the batch, or its unpacking")

        def __getitem__(self, key: object) -> NoReturn:
            raise _not_the_data(f"batch.data[{key!r}]", f"batch[{key!r}]")

        def keys(self) -> NoReturn:  # which Python asks for
            raise _not_the_data("model(**batch.data)", "model(**batch), or its keys")

    @property
    def weight(self) -> int:
        """The number of samples that count in metrics: `valid`, or 0 where a lower rank holds the same samples."""
        return 0 if self.duplicate else int(self.valid)

    @property
    def weights(self) -> torch.Tensor:
        """Whether each row counts in metrics: bool, shape [rows], on the CPU."""
        return torch.arange(self.rows) < self.weight

    @property
    def mask(self) -> torch.Tensor:
        """True for each real row: bool, shape [rows], on the CPU."""
        return torch.arange(self.rows) < int(self.valid)


def _not_the_data(expected: str, got: str) -> DataError:
    return DataError("a batch holds your data in its field `data`", expected=expected, got=got)


@context_first
def batches(
    ctx: DistContext,
    loader: Loader | StreamLoader,
    state: Positioned | Cursor | None = None,
    *,
    repeat: bool = False,
) -> Generator[Batch]:
    """Yield this rank's batches from a position to the end of its epoch. A collective at an epoch's first batch.

    All ranks take equally many steps. A start in the middle costs as much as one at the beginning. Before the first
    batch, ranks compare their cursors, plans and samplers in one message; none follows it in the epoch. Over a stream,
    every batch is a collective, because only its readers know where it ends.

    Args:
        ctx: the context that the loader was prepared for.
        loader: from `prepare_loader`.
        state: the start position, a `TrainState` or a cursor. Without one, a pass from the start, as for evaluation.
        repeat: whether the next epoch follows the end of an epoch, without end, for loops over a number of steps.

    Yields:
        Batches, their tensors on the context's device.

    Raises:
        StepError: a state that waits for `backward` or `optimizer_step`.
        ConfigError: `repeat` without a position.
        DataError: a loader that is not prepared, or prepared for another rank; a cursor of another dataset or order;
            another length of the dataset than before; a sampler that fails or yields nothing; on every rank. Also a
            batch that cannot be read, on the rank that reads it; the others raise `PeerError` in their next collective.
        TreeError: the collate function returns a container of an unknown kind.
        CollectiveMismatch: ranks differ in their cursors, lengths of the dataset, batch sizes or samplers; on every
            rank.
        ContextClosedError: the context is closed.

    Examples:
        >>> [int(batch.valid) for batch in accel.batches(ctx, loader)]
        [4, 4, 2]
        >>> state = accel.train_state(ctx, seed=0)
        >>> next(accel.batches(ctx, loader, state)).next.consumed
        4
    """
    ctx.comm.check_open()
    with shared_failure(ctx.comm, Call("batches", site=call_site())):
        cursor = cursor_of(state)
        if repeat and state is None:
            raise ConfigError(
                "a pass without a position ends with its epoch",
                expected="a state or a cursor with repeat=True",
                got="none",
                where="batches, repeat=",
                fix="Pass the state: accel.batches(ctx, loader, state, repeat=True).",
            )
    while True:
        after = cursor
        read = stream_steps if isinstance(loader, StreamLoader) else _sharded_steps
        with contextlib.closing(_timed(read(ctx, cast(Any, loader), state, cursor), cursor)) as epoch:
            for batch in epoch:
                try:
                    yield batch
                except GeneratorExit:  # the loop was left: the next pass may not begin at its start again
                    if state is not None and not repeat:  # a loop over steps ends within an epoch
                        loader.passes.leave(batch.start, batch.next)
                    raise
                after = batch.next
        if state is not None:
            loader.passes.complete(state, cursor)
        if not repeat:
            return
        state = cursor = after


def _timed(steps: Iterator[tuple[Any, BatchStep]], start: Cursor) -> Generator[Batch]:
    """Yield the batches of the rest of an epoch, each with the time that the loop waited for it."""
    asked = perf_counter()
    for data, step in steps:
        wait = perf_counter() - asked
        yield Batch(data, step.valid, step.rows, step.is_last, step.next, start, step.duplicate, asked, wait)
        asked = perf_counter()
        start = step.next


def cursor_of(state: Positioned | Cursor | None) -> Cursor:
    """Return where a pass begins; a state within a window is a `StepError`."""
    if state is None:
        return Cursor()
    if isinstance(state, Positioned):
        state.check_pass()
        return state.cursor
    return state  # checked with the loader


def _sharded_steps(
    ctx: DistContext, loader: Loader, state: Positioned | Cursor | None, cursor: Cursor
) -> Generator[tuple[Any, BatchStep]]:
    """Yield this rank's batches, each with its step, from the cursor to the end of its epoch."""
    site = call_site()
    with shared_failure(ctx.comm, Call("batches", site=site)):
        epoch = _checked_epoch(ctx, loader, state, cursor)
    detail = f"{epoch.cursor}\n{loader.source.plan}\n{loader.world_size} data-parallel ranks"
    if isinstance(epoch.plan, BatchBounds):
        detail += f"\n{len(epoch.plan.bounds) - 1} batches, digest {epoch.plan.digest}"
    arrive = start_values(ctx.comm, Call("batches", detail, site), loader.rank, int)
    wanted = requests(epoch, loader.rank, loader.world_size)
    first = list(islice(wanted, 1))  # puts the first samples in order while the message is sent
    data_ranks = arrive()  # the host waits here, once an epoch
    copies = copies_of(data_ranks, loader.world_size)
    duplicate = loader.rank in data_ranks[: ctx.rank]
    read = _read(ctx, loader, epoch, chain(first, wanted))
    for data, part in moved(read, ctx.streams, ctx.containers, ahead=loader.num_workers > 0):
        valid = part.valid if copies == 1 else SampleCount(part.valid, part.valid.world, copies)
        yield data, BatchStep(valid, part.rows, part.is_last, part.next, duplicate)


def _checked_epoch(ctx: DistContext, loader: Loader, state: Positioned | Cursor | None, cursor: Cursor) -> Epoch:
    # users pass torch's
    check_kind(loader, Loader, "the loader is not prepared", fix="Use accel.prepare_loader first.", error=DataError)
    check_entry((ctx.rank, ctx.world_size, ctx.data_parallel), loader.prepared_for, cursor)
    if state is not None:
        loader.passes.check(state, cursor)
    if ctx.is_main_process:
        loader.passes.warn_left(cursor)
    source = loader.source
    now = len(source.dataset) if source.size is not None else None
    if now != source.size:
        raise DataError(
            "the length of the dataset has changed",
            expected=f"{source.size} samples, as when it was prepared",
            got=str(now),
            fix="Prepare the loader again at the start of an epoch.",
        )
    return plan_epoch(source, cursor)


def _read(ctx: DistContext, loader: Loader, epoch: Epoch, wanted: Iterator[Request]) -> Generator[tuple[Any, Shard]]:
    """Read this rank's shards; workers end with this generator, unless they persist."""
    source, at = loader.source, epoch.cursor
    key = Key(at.seed).fold_in("worker", at.epoch, *([] if source.salt is None else [source.salt]))
    base = seed_base(key) if loader.seed_samples else None
    bare = not (loader.seed_samples or loader.whole or has_epochs(source.dataset))
    asked = RequestQueue(wanted, at.epoch, base, bare=bare)
    is_last = False
    try:
        with _reader(loader, asked, key) as reader:
            for step, data in enumerate(reader):
                if step == 0:
                    check_movable(data, ctx.containers)
                part = asked.parts.popleft()
                is_last = part.is_last
                yield data, part
    except AccelError:
        raise
    except Exception as error:  # any error of the dataset, of the collate function, or of a dead worker
        if loader.num_workers:  # workers live as long as a frame holds their iterator
            traceback.clear_frames(error.__traceback__)
        raise _unread(loader, epoch, asked, *read_error(error)) from error
    if not is_last:  # torch takes a StopIteration from the dataset for the end of the epoch
        raise _unread(loader, epoch, asked, "StopIteration")


def _reader(loader: Loader, asked: RequestQueue, key: Key) -> contextlib.AbstractContextManager[Iterable[Any]]:
    """Lend a reader of the requests: torch's DataLoader, if there are workers or pinned memory."""
    dataset = loader.source.dataset
    if not asked.bare:
        dataset = RequestedDataset(dataset, loader.whole)
    if not (loader.num_workers or loader.options["pin_memory"]):
        return contextlib.nullcontext(read_here(dataset, loader.collate_fn, asked))

    def make(batch_sampler: Any) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_sampler=batch_sampler,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            generator=key.generator(),  # so that starting an epoch draws nothing from the global stream
            **loader.options,
        )

    return contextlib.nullcontext(make(asked)) if loader.workers is None else loader.workers.lend(make, asked)


def _unread(loader: Loader, epoch: Epoch, asked: RequestQueue, got: str, place: str = "") -> DataError:
    part = asked.parts[0] if asked.parts else None
    positions = f", positions {part.start} to {part.stop - 1}" if part is not None else ""
    return DataError(
        "a batch could not be read",
        got=got,
        where=f"{place}{', ' * bool(place)}rank {loader.prepared_for[0]}, epoch {epoch.cursor.epoch}{positions}",
        fix="Let this rank stop: the others raise PeerError when it ends.",
    )
