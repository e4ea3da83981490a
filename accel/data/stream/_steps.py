# SPDX-License-Identifier: Apache-2.0
"""The steps of a stream on all ranks: one checked message a step, in which they agree on counts and on the end."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import msgspec
import torch

from accel.comm import Call, call_site, exchange, shared_failure
from accel.context import DistContext
from accel.data._cursor import Cursor, StreamPosition, WorkerPosition, check_entry
from accel.data._plan import SampleCount, copies_of
from accel.data._transfer import moved
from accel.data.stream._ahead import Ahead, batch_bytes, steps_after
from accel.data.stream._cut import Part
from accel.data.stream._dispatch import Parcel, Receiver, Sender
from accel.data.stream._first import digest, warn_of_equal
from accel.data.stream._handing import Handing
from accel.data.stream._loader import StreamLoader
from accel.data.stream._read import Skipped, Step, read_steps
from accel.errors import DataError
from accel.random import Key

_STREAM = "a stream"  # what a cursor's `of` says


class Given(NamedTuple):
    """What one rank gets in one step, beside the data."""

    valid: SampleCount
    rows: int
    is_last: bool
    next: Cursor
    duplicate: bool


class _Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank is: its node and its part of the data; and how it would read.

    Attributes:
        node: its number.
        part: of the data, among the data-parallel ranks.
        limit: the most steps that it puts into a message.
        ahead: whether it has workers, so that a batch can be read and moved ahead of the one that is given.
    """

    node: int
    part: int
    limit: int
    ahead: bool


class _Word(msgspec.Struct, frozen=True, array_like=True):
    """What a rank that reads for itself says about the next steps.

    Attributes:
        counts: real samples of its batches; none once its stream has ended.
        more: whether it has more after them.
        bare: whether it has neither a batch nor an older one that could stand in.
        size: bytes of the first batch.
        first: digest of the first batch of an epoch, where each rank reads a stream of its own.
    """

    counts: list[int]
    more: bool
    bare: bool
    size: int
    first: str = ""


def stream_steps(ctx: DistContext, loader: StreamLoader, cursor: Cursor) -> Generator[tuple[Any, Given]]:
    """Give this rank's batches from the cursor to the end of its epoch. A collective at the first, and now and then.

    Args and errors are those of `batches`.

    Yields:
        Batches on the context's device, and what is known about each.
    """
    site = call_site()
    with shared_failure(ctx.comm, Call("batches", site=site)):
        check_entry((ctx.rank, ctx.world_size, ctx.data_parallel), loader.prepared_for, cursor)
        loader.passes.check(cursor)
    facts = f"stream {loader.mode}, batch {loader.batch_size}, of all {loader.global_batch}, tail {loader.tail}"
    where = f"seed {cursor.seed}, epoch {cursor.epoch}, {cursor.consumed} consumed"
    opening = Call("batches", f"{where}\n{facts}\n{loader.world_size} data-parallel ranks", site)
    here = _Place(ctx.node_rank, loader.rank, loader.steps_per_message, loader.num_workers > 0)
    places = [_decode(message, _Place) for message in exchange(ctx.comm, opening, _encode(here))]
    call = Call("batches, next steps", facts, site)
    parts = [place.part for place in places]
    copies = copies_of(parts, loader.world_size)
    if loader.is_shared:
        nodes = [place.node if loader.mode == "elements" else 0 for place in places]
        handing = Handing(ctx, call, nodes, parts)
        read = _read(ctx, loader, cursor, handing.mine) if handing.reads else iter(())
        ahead = Ahead(ctx, call, read, here=handing.reads and not loader.num_workers)
        readers = [places[reader] for reader in handing.readers]
        steps = _handed_out(ctx, loader, cursor, handing, ahead, _limit(readers))
    else:
        ahead, readers = Ahead(ctx, call, _read(ctx, loader, cursor, (0,)), here=not loader.num_workers), places
        steps = _apart(ctx, loader, cursor, ahead, call, parts, _limit(readers))
    if cursor.consumed:
        ahead.catch_up()
    duplicate = loader.rank in parts[: ctx.rank]
    for data, given in moved(steps, ctx.device, ctx.containers, ahead=all(place.ahead for place in readers)):
        valid = SampleCount(given.valid, given.valid.world, copies)
        yield data, given._replace(valid=valid, duplicate=duplicate)


def _limit(readers: list[_Place]) -> int:
    """The most steps in a message; one where a rank is alone: nothing is read before its turn."""
    return min(place.limit for place in readers) if len(readers) > 1 else 1


def _apart(
    ctx: DistContext, loader: StreamLoader, cursor: Cursor, ahead: Ahead, call: Call, parts: list[int], limit: int
) -> Iterator[tuple[Any, Given]]:
    """Every rank reads; what stands in for one whose stream has ended is its last batch, or another rank's."""
    kept: Part | None = None
    position, consumed, size = cursor.stream, cursor.consumed, 1
    compared = loader.mode == "own" and not cursor.consumed
    while True:
        steps = ahead.take(size)
        mine = _word(ctx, steps, kept, compared=compared)
        words = [_decode(message, _Word) for message in exchange(ctx.comm, call, _encode(mine))]
        if compared and ctx.is_main_process:
            warn_of_equal([word.first for word in words], parts)
        compared = False
        agreed = _agreed(words, parts, drops=loader.tail == "drop")
        if not agreed:
            raise _nothing(cursor, loader)
        if any(word.bare for word in words):
            kept = _lend(ctx, call, steps[0].parts[0] if steps else kept, [word.bare for word in words])
        for at, (total, is_last) in enumerate(agreed):
            count = 0
            if at < len(steps):
                kept, position, count = steps[at].parts[0], steps[at].position, steps[at].counts[0]
            assert kept is not None  # its own, or a borrowed one
            consumed += total
            after = _after(cursor, consumed, position, is_last=is_last)
            yield kept.data, Given(SampleCount(count, total), kept.rows, is_last, after, False)
            if is_last:
                return
        size = steps_after(size, limit, max(word.size for word in words))


def _word(ctx: DistContext, steps: list[Step], kept: Part | None, *, compared: bool) -> _Word:
    batch = steps[0].parts[0].data if steps else None
    return _Word(
        counts=[step.counts[0] for step in steps],
        more=bool(steps) and steps[-1].more,
        bare=not steps and kept is None,
        size=batch_bytes(batch, ctx.containers) if steps else 0,
        first=digest(batch, ctx.containers) if steps and compared else "",
    )


def _agreed(words: list[_Word], parts: list[int], *, drops: bool) -> list[tuple[int, bool]]:
    """Return the steps that are known of every rank: real samples of all, and whether the epoch ends with it.

    Of a rank whose stream has ended, every step is known. One that has read fewer than the others, and has more, could
    not read on: it says so in the next message.

    Args:
        words: of all ranks.
        parts: which part of the data each reads; ranks of one part read the same.
        drops: whether the epoch ends where the first rank has no full batch left.
    """
    going = [len(word.counts) for word in words if word.more]
    known = min(going) if going else max(len(word.counts) for word in words)
    firsts = {part: words[parts.index(part)] for part in parts}
    for rank, (word, part) in enumerate(zip(words, parts, strict=True)):
        if word.counts[:known] != firsts[part].counts[:known]:
            raise DataError(
                "ranks of one part of the data read different streams",
                expected=f"batches of {firsts[part].counts[:known]} samples as on rank {parts.index(part)}",
                got=f"{word.counts[:known]} on rank {rank}",
                where="batches",
            )
    agreed: list[tuple[int, bool]] = []
    for at in range(known):
        here = [(word.counts[at : at + 1] or [0])[0] for word in firsts.values()]
        more = [at + 1 < len(word.counts) or word.more for word in firsts.values()]
        if drops and not all(here):
            break
        agreed.append((sum(here), not (all if drops else any)(more)))
    return agreed


def _lend(ctx: DistContext, call: Call, kept: Part | None, bare: list[bool]) -> Part:
    """Give ranks that have never had a batch the first one of a rank that has, to stand in."""
    lender = bare.index(False)
    payload, head = torch.empty(0, dtype=torch.uint8), 16
    if ctx.rank == lender and kept is not None:
        with shared_failure(ctx.comm, Call("batches")):
            parcel = Sender().pack([kept.data], whole=True)
        payload = torch.cat([torch.tensor([parcel.label, kept.rows]).view(torch.uint8), parcel.buffer])
    lent = exchange(ctx.comm, call, payload)[lender]
    if kept is not None:
        return kept
    label, rows = (int(each) for each in lent[:head].clone().view(torch.int64))
    (data,) = Receiver().unpack(Parcel(label, lent[head:].clone()))
    return Part(data, rows)


def _handed_out(
    ctx: DistContext, loader: StreamLoader, cursor: Cursor, handing: Handing, ahead: Ahead, limit: int
) -> Iterator[tuple[Any, Given]]:
    """The first rank of each node, or rank 0, reads; the others get their batches from it."""
    consumed, size = cursor.consumed, 1
    while True:
        steps = ahead.take(size)
        given = handing.hand(steps)
        if not given:
            raise _nothing(cursor, loader)
        for at, (part, note) in enumerate(given):
            consumed += sum(note.counts)
            is_last = not note.more
            after = _after(cursor, consumed, steps[at].position if steps else None, is_last=is_last)
            valid = SampleCount(note.counts[loader.rank], sum(note.counts))
            yield part.data, Given(valid, part.rows, is_last, after, False)
            if is_last:
                return
        size = steps_after(size, limit, handing.step_bytes)


def _read(ctx: DistContext, loader: StreamLoader, cursor: Cursor, mine: tuple[int, ...]) -> Iterator[Step | Skipped]:
    own = [] if loader.is_shared else [loader.rank]
    yield from read_steps(
        loader.source,
        loader.cut(mine, ctx.containers),
        loader.collate_fn,
        epoch=cursor.epoch,
        key=Key(cursor.seed).fold_in("stream", cursor.epoch, *own),
        start=_start(loader, cursor),
        replay=loader.replay,
        options={"num_workers": loader.num_workers, **loader.options},
    )


def _start(loader: StreamLoader, cursor: Cursor) -> StreamPosition:
    """Where this rank's reader begins."""
    workers, ranks = max(loader.num_workers, 1), 0 if loader.is_shared else loader.world_size
    at = cursor.stream
    if cursor.of not in ("", _STREAM):
        raise DataError("the cursor belongs to another order", expected=_STREAM, got=cursor.of, where="batches")
    if at is None and not cursor.consumed:
        return StreamPosition((WorkerPosition(),) * workers, ranks=ranks)
    if at is None and loader.is_shared and workers == 1 and loader.batch_size is not None:
        return StreamPosition((WorkerPosition(elements=cursor.consumed),))
    if at is None:
        raise DataError(
            "the cursor does not say where in the stream its reader is",
            expected="a cursor that batches gave to the rank that reads, or one at the beginning of an epoch",
            got=f"{cursor.consumed} consumed and no position",
            fix="Begin the epoch again with Cursor(seed=, epoch=).",
        )
    if at.ranks != ranks:
        raise DataError(
            "the cursor is a position in a stream that was divided in another way",
            expected=f"one {_divided(ranks)}",
            got=f"one {_divided(at.ranks)}",
            fix="Go on with as many ranks as before, begin the epoch again, or use a stream mode that reads the whole "
            'stream ("elements" or "dispatch"), whose cursors fit any number of ranks.',
        )
    if len(at.workers) != workers:
        raise DataError(
            "each worker reads a part of the stream of its own",
            expected=f"num_workers={len(at.workers)}, as where the cursor comes from",
            got=f"num_workers={loader.num_workers}",
        )
    return at


def _divided(ranks: int) -> str:
    return f"of {ranks} ranks that read parts of their own" if ranks else "in the whole stream"


def _after(cursor: Cursor, consumed: int, position: StreamPosition | None, *, is_last: bool) -> Cursor:
    if is_last:
        return Cursor(cursor.seed, cursor.epoch + 1)
    return Cursor(cursor.seed, cursor.epoch, consumed, _STREAM, position)


def _nothing(cursor: Cursor, loader: StreamLoader) -> DataError:
    """The error for an epoch that has no batch left: `while cursor.epoch < epochs` would never end."""
    full = " that is full on every rank" if loader.tail == "drop" else ""
    return DataError(
        f"the stream has no batch{full}",
        expected="at least one in each epoch",
        got=f"none in epoch {cursor.epoch} after {cursor.consumed} samples",
        where="batches",
        fix="Look at what the stream gives, and whether it starts anew each time it is iterated.",
    )


def _encode(value: msgspec.Struct) -> torch.Tensor:
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)


def _decode(message: torch.Tensor, kind: type[Any]) -> Any:
    return msgspec.msgpack.decode(message.numpy().tobytes(), type=kind)
