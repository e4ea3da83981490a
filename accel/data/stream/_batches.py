# SPDX-License-Identifier: Apache-2.0
"""The batches of a stream on all ranks: readers, their positions, and the cursor after each step."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import msgspec

from accel.comm import Call, call_site, exchange_values, shared_failure
from accel.context import DistContext
from accel.data._cursor import Cursor, StreamPosition, WorkerPosition, check_entry
from accel.data._plan import SampleCount, copies_of
from accel.data._transfer import moved
from accel.data.stream._dispatch import Dispatcher
from accel.data.stream._independent import IndependentReaders
from accel.data.stream._loader import StreamLoader
from accel.data.stream._prefetch import AgreedStep, Prefetcher, ReadStep, next_count, read_steps
from accel.data.stream._reader import Skipped
from accel.errors import DataError
from accel.random import Key

_STREAM = "a stream"  # the `of` of a stream's cursors


class StreamStep(NamedTuple):
    """One step of a rank, its data left out; attributes are those of `Batch`."""

    valid: SampleCount
    rows: int
    is_last: bool
    next: Cursor
    duplicate: bool


class _ReadMode(msgspec.Struct, frozen=True, array_like=True):
    """A rank's way of reading.

    Attributes:
        node: its node's number.
        data_rank: its rank among the data-parallel ones.
        limit: largest number of steps in a message.
        ahead: whether it has workers, so that a batch can be read and moved ahead of the one in use.
    """

    node: int
    data_rank: int
    limit: int
    ahead: bool


def stream_batches(ctx: DistContext, loader: StreamLoader, cursor: Cursor) -> Generator[tuple[Any, StreamStep]]:
    """Yield this rank's batches from the cursor to the end of its epoch. A collective, now and then.

    Args and errors are those of `batches`.

    Yields:
        Batches on the context's device, each with its step.
    """
    site = call_site()
    with shared_failure(ctx.comm, Call("batches", site=site)):
        check_entry((ctx.rank, ctx.world_size, ctx.data_parallel), loader.prepared_for, cursor)
        loader.passes.check(cursor)
    facts = f"stream {loader.mode}, batch {loader.batch_size}, of all {loader.global_batch}, tail {loader.tail}"
    where = f"seed {cursor.seed}, epoch {cursor.epoch}, {cursor.consumed} consumed"
    opening = Call("batches", f"{where}\n{facts}\n{loader.world_size} data-parallel ranks", site)
    here = _ReadMode(ctx.node_rank, loader.rank, loader.steps_per_message, loader.num_workers > 0)
    modes = exchange_values(ctx.comm, opening, here, _ReadMode)
    data_ranks = [mode.data_rank for mode in modes]
    copies = copies_of(data_ranks, loader.world_size)
    call = Call("batches, next steps", facts, site)
    if loader.is_shared:
        nodes = [mode.node if loader.mode == "elements" else 0 for mode in modes]
        sharing = Dispatcher(ctx, call, nodes, data_ranks)
        reads = sharing.reads
        read = _read(ctx, loader, cursor, sharing.mine) if reads else iter(())
        readers = [modes[reader] for reader in sharing.readers]
    else:
        sharing = IndependentReaders(
            ctx,
            call,
            data_ranks,
            drops=loader.tail == "drop",
            compares=loader.mode == "own" and not cursor.consumed,
            position=cursor.stream,
        )
        reads = True
        read = _read(ctx, loader, cursor, (0,))
        readers = modes
    prefetcher = Prefetcher(ctx, call, read, here=reads and not loader.num_workers)
    if cursor.consumed:
        prefetcher.catch_up()
    # a rank that reads alone reads no step before its turn
    limit = min(mode.limit for mode in readers) if len(readers) > 1 else 1
    agreed = _agreed_steps(loader, cursor, prefetcher, sharing, limit)
    duplicate = loader.rank in data_ranks[: ctx.rank]
    steps = _with_cursors(agreed, cursor, copies, duplicate=duplicate)
    yield from moved(steps, ctx.device, ctx.containers, ahead=all(mode.ahead for mode in readers))


def _agreed_steps(
    loader: StreamLoader, cursor: Cursor, prefetcher: Prefetcher, sharing: Dispatcher | IndependentReaders, limit: int
) -> Iterator[AgreedStep]:
    """Yield the steps of the rest of an epoch, at most `limit` in a message."""
    count = 1
    while agreed := sharing.agree(prefetcher.take(count)):
        for step in agreed:
            yield step
            if step.is_last:
                return
        count = next_count(count, limit, sharing.step_bytes)
    # an error, because `while cursor.epoch < epochs` would never end
    full = " that is full on every rank" if loader.tail == "drop" else ""
    raise DataError(
        f"the stream has no batch{full}",
        expected="at least one in each epoch",
        got=f"none in epoch {cursor.epoch} after {cursor.consumed} samples",
        where="batches",
        fix="Check that the stream has elements, and that it starts anew each time it is iterated.",
    )


def _with_cursors(
    agreed: Iterator[AgreedStep], cursor: Cursor, copies: int, *, duplicate: bool
) -> Iterator[tuple[Any, StreamStep]]:
    consumed = cursor.consumed
    for step in agreed:
        consumed += step.total
        after = Cursor(cursor.seed, cursor.epoch, consumed, _STREAM, step.position)
        if step.is_last:
            after = Cursor(cursor.seed, cursor.epoch + 1)
        valid = SampleCount(step.samples, step.total, copies)
        yield step.batch.data, StreamStep(valid, step.batch.rows, step.is_last, after, duplicate)


def _read(
    ctx: DistContext, loader: StreamLoader, cursor: Cursor, mine: tuple[int, ...]
) -> Iterator[ReadStep | Skipped]:
    own = [] if loader.is_shared else [loader.rank]
    yield from read_steps(
        loader.source,
        loader.plan(mine, ctx.containers),
        loader.collate_fn,
        epoch=cursor.epoch,
        key=Key(cursor.seed).fold_in("stream", cursor.epoch, *own),
        start=_start(loader, cursor),
        replay=loader.replay,
        options={"num_workers": loader.num_workers, **loader.options},
    )


def _start(loader: StreamLoader, cursor: Cursor) -> StreamPosition:
    """Return the position that this rank's reader begins at."""
    workers = max(loader.num_workers, 1)
    ranks = 0 if loader.is_shared else loader.world_size
    at = cursor.stream
    if cursor.of not in ("", _STREAM):
        raise DataError("the cursor belongs to another order", expected=_STREAM, got=cursor.of, where="batches")
    if at is None and not cursor.consumed:
        return StreamPosition((WorkerPosition(),) * workers, ranks=ranks)
    if at is None and loader.is_shared and workers == 1 and loader.batch_size is not None:
        return StreamPosition((WorkerPosition(elements=cursor.consumed),))
    if at is None:
        raise DataError(
            "the cursor has no position of the stream's reader",
            expected="a cursor from batches of the rank that reads, or one at the beginning of an epoch",
            got=f"{cursor.consumed} consumed and no position",
            fix="Begin the epoch again with Cursor(seed=, epoch=).",
        )
    if at.ranks != ranks:
        raise DataError(
            "the cursor is a position in a stream that was divided in another way",
            expected=f"one {_division(ranks)}",
            got=f"one {_division(at.ranks)}",
            fix="Go on with as many ranks as before, begin the epoch again, or use a stream mode that reads the whole "
            'stream ("elements" or "dispatch"), whose cursors fit any number of ranks.',
        )
    if len(at.workers) != workers:
        raise DataError(
            "each worker reads a part of the stream of its own",
            expected=f"num_workers={len(at.workers)}, as when the cursor was made",
            got=f"num_workers={loader.num_workers}",
        )
    return at


def _division(ranks: int) -> str:
    return f"of {ranks} ranks that read parts of their own" if ranks else "in the whole stream"
