# SPDX-License-Identifier: Apache-2.0
"""The batches of a stream on all ranks: readers, their positions, and what independent readers agree on."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from accel.comm import Call, broadcast_bytes, call_site, exchange_values, shared_failure
from accel.context import DistContext
from accel.data._shards import SampleCount, check_entry, copies_of
from accel.data._transfer import moved
from accel.data.stream._dispatch import BatchPacker, BatchUnpacker, Dispatcher, PackedBatches
from accel.data.stream._loader import StreamLoader
from accel.data.stream._prefetch import AgreedStep, Prefetcher, ReadStep, batch_bytes, next_count, read_steps
from accel.data.stream._reader import LocalBatch, Skipped
from accel.errors import DataError, TreeError
from accel.loop_state import Cursor, Positioned, StreamPosition, WorkerPosition
from accel.random import Key
from accel.tree import Container
from accel.tree._walk import leaves

_DIGEST_BYTES = 1 << 16  # of each tensor


class _Report(msgspec.Struct, frozen=True, array_like=True):
    """A rank's facts of its next steps."""

    counts: list[int]  # real samples of its batches; none once its stream has ended
    more: bool  # whether it has more after them
    bare: bool  # whether it has neither a batch nor an older one to stand in
    size: int  # bytes of the first batch
    digest: str = ""  # of the first batch of an epoch, where ranks read streams of their own


@dataclasses.dataclass(eq=False)
class IndependentReaders:
    """Every rank reads; its last batch, or another rank's, stands in once its stream has ended."""

    ctx: DistContext
    call: Call  # each message, as all ranks name it
    data_ranks: list[int]  # data-parallel rank by rank; ranks of one read the same
    drops: bool  # whether the epoch ends at the first rank without another full batch
    compares: bool  # whether to warn if two data-parallel ranks begin with the same samples
    position: StreamPosition | None  # of this rank's reader
    latest: LocalBatch | None = None  # the last batch of this rank, or a borrowed one
    step_bytes: int = 0  # size of the largest first batch in the last message

    def agree(self, steps: list[ReadStep]) -> list[AgreedStep]:
        """Agree on the next steps with the other ranks; return those known of every rank. A collective.

        On every rank, different streams of one data-parallel rank are a `DataError`, an unsendable batch a `TreeError`.
        """
        reports = exchange_values(self.ctx.comm, self.call, self._report(steps), _Report)
        if self.compares and self.ctx.is_main_process:
            _warn_of_equal([report.digest for report in reports], self.data_ranks)
        self.compares = False
        totals = _agreed_totals(reports, self.data_ranks, drops=self.drops)
        if totals and any(report.bare for report in reports):
            self.latest = self._lend(steps, [report.bare for report in reports])
        self.step_bytes = max(report.size for report in reports)
        agreed: list[AgreedStep] = []
        for at, (total, is_last) in enumerate(totals):
            count = 0
            if at < len(steps):
                self.latest = steps[at].batches[0]
                self.position = steps[at].position
                count = steps[at].counts[0]
            assert self.latest is not None  # its own, or a borrowed one
            agreed.append(AgreedStep(self.latest, count, total, is_last, self.position))
        return agreed

    def _report(self, steps: list[ReadStep]) -> _Report:
        first = steps[0].batches[0].data if steps else None
        return _Report(
            counts=[step.counts[0] for step in steps],
            more=bool(steps) and steps[-1].more,
            bare=not steps and self.latest is None,
            size=batch_bytes(first, self.ctx.containers) if steps else 0,
            digest=_digest(first, self.ctx.containers) if steps and self.compares else "",
        )

    def _lend(self, steps: list[ReadStep], bare: list[bool]) -> LocalBatch:
        """Send the first batch of a rank that has one to ranks that never had any, as their placeholder."""
        ctx = self.ctx
        own = steps[0].batches[0] if steps else self.latest
        lender = bare.index(False)
        payload = torch.empty(0, dtype=torch.uint8)
        if ctx.rank == lender and own is not None:
            with shared_failure(ctx.comm, Call("batches")):
                packed = BatchPacker().pack([own.data], whole=True)
            # one message: the receivers do not know the size of a batch that they never had
            payload = torch.cat([torch.tensor([packed.header_bytes, own.rows]).view(torch.uint8), packed.buffer])
        lent = broadcast_bytes(ctx.comm, self.call, payload, source=lender)
        if own is not None:
            return own
        head = 16  # two int64
        header_bytes, rows = (int(each) for each in lent[:head].clone().view(torch.int64))
        (data,) = BatchUnpacker().unpack(PackedBatches(header_bytes, lent[head:].clone()))
        return LocalBatch(data, rows)


def _agreed_totals(reports: list[_Report], data_ranks: list[int], *, drops: bool) -> list[tuple[int, bool]]:
    """Return the steps that are known of every rank: real samples of all, and whether the epoch ends with it."""
    going = [len(report.counts) for report in reports if report.more]
    # a stream that ended has no more steps to report; one that lags reports its error in the next message
    known = min(going) if going else max(len(report.counts) for report in reports)
    firsts = {data_rank: reports[data_ranks.index(data_rank)] for data_rank in data_ranks}
    for rank, (report, data_rank) in enumerate(zip(reports, data_ranks, strict=True)):
        if report.counts[:known] != firsts[data_rank].counts[:known]:
            raise DataError(
                "ranks of one part of the data read different streams",
                expected=f"batches of {firsts[data_rank].counts[:known]} samples "
                f"as on rank {data_ranks.index(data_rank)}",
                got=f"{report.counts[:known]} on rank {rank}",
                where="batches",
            )
    agreed: list[tuple[int, bool]] = []
    for at in range(known):
        here = [(report.counts[at : at + 1] or [0])[0] for report in firsts.values()]
        more = [at + 1 < len(report.counts) or report.more for report in firsts.values()]
        if drops and not all(here):
            break
        agreed.append((sum(here), not (all if drops else any)(more)))
    return agreed


def _warn_of_equal(digests: Sequence[str], data_ranks: Sequence[int]) -> None:
    """Log a warning if two data-parallel ranks begin with the same samples, by digests of their first batches."""
    readers: dict[str, int] = {}
    for rank, (digest, data_rank) in enumerate(zip(digests, data_ranks, strict=True)):
        other = readers.setdefault(digest, rank) if digest else rank
        if data_ranks[other] != data_rank:
            logging.getLogger("accel.data").warning(
                'ranks %d and %d begin their streams with the same samples: stream="own" reads the dataset of each '
                "rank as it is, so every rank reads an undivided one in full; divide it by "
                'ctx.data_parallel, or use stream="shards", "elements" or "dispatch"',
                other,
                rank,
            )
            return


def _digest(data: object, containers: Sequence[Container]) -> str:
    """Return a short text, different for different batches; empty for one of an unknown container."""
    hashed = hashlib.blake2b(digest_size=8)
    try:
        for path, leaf in leaves(data, containers):
            hashed.update(path.encode())
            hashed.update(_leaf_bytes(leaf))
    except TreeError:
        return ""
    return hashed.hexdigest()


def _leaf_bytes(leaf: object) -> bytes:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf).encode()
    flat = leaf.detach().flatten()
    few = flat[: max(1, _DIGEST_BYTES // max(leaf.element_size(), 1))].cpu().contiguous()
    return f"{leaf.dtype} {list(leaf.shape)}".encode() + few.view(torch.uint8).numpy().tobytes()


_STREAM = "a stream"  # the `of` of a stream's cursors


class BatchStep(NamedTuple):
    """One step of a rank without its data; attributes are named as in `Batch`."""

    valid: SampleCount
    rows: int
    is_last: bool
    next: Cursor
    duplicate: bool


class _ReadMode(msgspec.Struct, frozen=True, array_like=True):
    """A rank's way of reading."""

    node: int  # its node's number
    data_rank: int  # its rank among the data-parallel ones
    limit: int  # largest number of steps in a message
    ahead: bool  # whether it has workers, so that a batch can be read and moved ahead of the one in use


def stream_steps(
    ctx: DistContext, loader: StreamLoader, state: Positioned | Cursor | None, cursor: Cursor
) -> Generator[tuple[Any, BatchStep]]:
    """Yield this rank's batches and steps from the cursor to the end of its epoch. A collective now and then."""
    site = call_site()
    with shared_failure(ctx.comm, Call("batches", site=site)):
        check_entry((ctx.rank, ctx.world_size, ctx.data_parallel), loader.prepared_for, cursor)
        if state is not None:
            loader.passes.check(state, cursor)
        if ctx.is_main_process:
            loader.passes.warn_left(cursor)
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
    at = cursor.stream.workers if cursor.stream is not None else ()
    loads = not loader.replay and any(worker.state is not None for worker in at)
    prefetcher = Prefetcher(ctx, call, read, here=reads and not loader.num_workers, loads=loads)
    if cursor.consumed:
        prefetcher.catch_up()
    # a rank that reads alone reads no step before its turn
    limit = min(mode.limit for mode in readers) if len(readers) > 1 else 1
    agreed = _agreed_steps(loader, cursor, prefetcher, sharing, limit)
    duplicate = loader.rank in data_ranks[: ctx.rank]
    steps = _with_cursors(agreed, cursor, copies, duplicate=duplicate)
    yield from moved(steps, ctx.streams, ctx.containers, ahead=all(mode.ahead for mode in readers))


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
) -> Iterator[tuple[Any, BatchStep]]:
    consumed = cursor.consumed
    for step in agreed:
        consumed += step.total
        after = Cursor(cursor.seed, cursor.epoch, consumed, _STREAM, step.position)
        if step.is_last:
            after = Cursor(cursor.seed, cursor.epoch + 1)
        valid = SampleCount(step.samples, step.total, copies)
        yield step.batch.data, BatchStep(valid, step.batch.rows, step.is_last, after, duplicate)


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
            fix="Begin the epoch again: state = state.at(Cursor(seed, epoch)).",
        )
    if at.ranks != ranks:
        raise DataError(
            "the cursor is a position in a stream that was divided in another way",
            expected=f"one {_division(ranks)}",
            got=f"one {_division(at.ranks)}",
            fix="Continue with as many ranks as before, begin the epoch again, or use a mode that reads the full "
            'stream ("elements" or "dispatch"): its cursors fit any number of ranks.',
        )
    if len(at.workers) != workers:
        raise DataError(
            "each worker reads a different part of the stream",
            expected=f"num_workers={len(at.workers)}, as when the cursor was made",
            got=f"num_workers={loader.num_workers}",
        )
    return at


def _division(ranks: int) -> str:
    return f"of {ranks} ranks that read different parts" if ranks else "in the full stream"
