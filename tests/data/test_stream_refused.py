# SPDX-License-Identifier: Apache-2.0
"""Streams that go wrong: the same typed error on every rank, at once."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import os
import signal
from collections import deque

import pytest
import torch
from catching import assert_raises
from stream_helpers import Stream, make_loader, on_nodes
from torch.utils.data import DataLoader, IterableDataset

import accel
from accel import Cursor
from accel.errors import ConfigError, DataError, PrepareError, TreeError

MODES = ["shards", "elements", "dispatch"]


def assert_refused(ranks, make, error, *, world=3, per_node=2, steps=0, **fields):
    """Every rank raises the same, after so many batches, and can talk to the others afterwards."""

    def rank(ctx):
        ctx = on_nodes(ctx, per_node)
        batches = accel.batches(ctx, make(ctx), Cursor())
        for _ in range(steps):
            next(batches)
        with assert_raises(error, **fields) as caught:
            next(batches)
        accel.wait_for_everyone(ctx)
        return str(caught.value)

    assert len(set(ranks.run(rank, world))) == 1


class Broken(IterableDataset):
    """Raises in the middle, if asked to."""

    def __init__(self, n, wrong=True):
        self.n, self.wrong = n, wrong

    def __iter__(self):
        yield from range(self.n)
        if self.wrong:
            raise OSError("the disk is gone")


@pytest.mark.parametrize("mode", ["own", "elements", "dispatch"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 5, 6])
def test_a_reader_that_raises_in_the_middle(ranks, mode, steps):
    """Whatever was read before it is given first."""
    culprit = 1 if mode == "own" else 2 if mode == "elements" else 0
    each = 2 if mode == "own" else 6

    def make(ctx):
        breaks = ctx.rank == culprit
        return make_loader(ctx, Broken(each * steps + breaks if breaks else 99, breaks), mode, 2)

    problem = f"rank {culprit}: reading the stream failed: OSError: the disk is gone"
    assert_refused(ranks, make, DataError, problem=problem, steps=steps)


def test_alone_the_readers_own_error_is_the_cause():
    ctx = accel.single()
    with assert_raises(DataError, problem="the disk is gone") as caught:
        list(accel.batches(ctx, make_loader(ctx, Broken(3), "own", 2), Cursor()))
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("how", ["an error", "a break"])
def test_a_loop_that_is_left_leaves_no_worker_behind(how):
    gc.collect()  # what tests before this one left
    ctx, before = accel.single(), multiprocessing.active_children()
    batches = accel.batches(ctx, make_loader(ctx, Broken(99), "own", 2, num_workers=2), Cursor())
    for _ in range(3):
        _ = next(batches)
    assert len(set(multiprocessing.active_children()) - set(before)) == 2
    if how == "a break":
        batches.close()
    else:
        with assert_raises(DataError, problem="the disk is gone") as caught:
            list(batches)
        assert caught.value.__cause__ is not None
    assert set(multiprocessing.active_children()) <= set(before)


class Dying(IterableDataset):
    """Its worker is killed."""

    def __iter__(self):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("mode", ["own", "dispatch"])
def test_a_worker_that_dies(ranks, mode):
    def make(ctx):
        dies = ctx.rank == 0
        return make_loader(ctx, Dying() if dies else Stream(100), mode, 1, num_workers=int(dies), timeout=dies)

    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises in the main thread, which is no rank's here
    try:
        problem = "rank 0: reading the stream failed: RuntimeError: DataLoader worker"
        assert_refused(ranks, make, DataError, problem=problem, world=2)
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("mode", [*MODES, "own"])
@pytest.mark.parametrize("options", [{}, {"drop_last": True}])
def test_an_epoch_without_a_batch(ranks, mode, options):
    make = lambda ctx: make_loader(ctx, Stream(0), mode, 2, **options)  # noqa: E731
    assert_refused(ranks, make, DataError, problem="the stream has no batch")


@pytest.mark.parametrize("mode", MODES)
def test_an_epoch_that_drops_everything(ranks, mode):
    make = lambda ctx: make_loader(ctx, Stream(5), mode, 2, drop_last=True)  # noqa: E731
    assert_refused(ranks, make, DataError, problem="no batch that is full on every rank")


def test_nodes_that_read_different_streams(ranks):
    make = lambda ctx: make_loader(ctx, Stream(9 + ctx.node_rank), "elements", 1, steps_per_message=1)  # noqa: E731
    fields = {"expected": r"rank 0: \[1, 1, 1\], the end", "got": r"^on rank 2: \[1, 1, 1\], more follows"}
    assert_refused(ranks, make, DataError, problem="nodes read different streams", **fields, steps=2)


def test_a_node_whose_stream_is_empty(ranks):
    make = lambda ctx: make_loader(ctx, Stream(9 * ctx.node_rank), "elements", 1)  # noqa: E731
    fields = {"expected": "rank 0: nothing", "got": r"^on rank 2: \[1, 1, 1\], more follows"}
    assert_refused(ranks, make, DataError, problem="different streams", **fields)


def test_ranks_of_one_part_that_read_different_streams(ranks):
    def make(ctx):
        stream, place = Stream(5 + (ctx.rank == 2)), (ctx.rank // 2, 2)
        return make_loader(ctx, stream, "own", 2, data_parallel=place, steps_per_message=1)

    fields = {"expected": r"^batches of \[2\] samples as on rank 2", "got": r"^\[1\] on rank 3"}
    assert_refused(ranks, make, DataError, problem="ranks of one part", **fields, world=4, steps=2)


@pytest.mark.parametrize("odd", ["mode", "size", "tail", "cursor"])
def test_ranks_that_read_in_different_ways(ranks, odd):
    def rank(ctx):
        here = ctx.rank == 1
        mode = "own" if here and odd == "mode" else "dispatch"
        tail = "pad" if here and odd == "tail" else "ragged"
        loader = make_loader(ctx, Stream(9), mode, 3 if here and odd == "size" else 2, tail=tail)
        with assert_raises(accel.errors.CollectiveMismatch, expected=r"batches at test_stream_refused\.py"):
            next(accel.batches(ctx, loader, Cursor(seed=int(here and odd == "cursor"))))
        return True

    assert all(ranks.run(rank, 2))


def test_a_rank_that_calls_something_else_meanwhile(ranks):
    def rank(ctx):
        batches = accel.batches(ctx, make_loader(ctx, Stream(9), "dispatch", 2), Cursor())
        batch = next(batches)
        with assert_raises(accel.errors.CollectiveMismatch, got=r"batches, next steps at test_stream_refused\.py"):
            _ = next(batches) if ctx.rank else accel.gather(ctx, batch.data[0])
        return True

    assert all(ranks.run(rank, 2))


@pytest.mark.parametrize(
    ("leaf", "fields"),
    [
        (torch.Generator(), {"problem": "rank 0: .*cannot be sent to another rank", "got": "Generator"}),
        (2**70, {"expected": "numbers up to 64 bits", "got": "int"}),
        (os.fsdecode(b"\xff.png"), {"expected": "Unicode text", "got": r"str '\\udcff\.png'"}),
        ({2**70: 1}, {"problem": "rank 0: .*cannot be sent to another rank", "got": "dict"}),
        (torch.ones(2).to_sparse(), {"problem": "rank 0: .*cannot be sent"}),
    ],
)
def test_what_cannot_be_handed_over(ranks, leaf, fields):
    make = lambda ctx: make_loader(ctx, Stream(9), "dispatch", 2, collate_fn=lambda _: {"x": leaf})  # noqa: E731
    assert_refused(ranks, make, TreeError, **({"problem": "^rank 0: "} | fields), where=r"\$\.x")


@pytest.mark.parametrize("mode", MODES)
def test_a_container_that_cannot_be_taken_apart(ranks, mode):
    def make(ctx):
        odd = mode == "dispatch" or ctx.rank == 2
        return make_loader(ctx, Stream(9), mode, 2, collate_fn=lambda _: {"x": deque() if odd else 1})

    fields = {"problem": r"rank \d: .*cannot be flattened", "got": "deque", "where": r"\$\.x"}
    assert_refused(ranks, make, TreeError, **fields)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_container_that_cannot_be_taken_apart_in_a_later_batch(ranks, mode, workers):
    def collate(samples):
        return deque() if samples[0][0] >= 6 else torch.tensor(samples)

    make = lambda ctx: make_loader(ctx, Stream(40), mode, 2, collate_fn=collate, num_workers=workers)  # noqa: E731
    assert_refused(ranks, make, TreeError, problem="cannot be flattened", got="deque", steps=1)


@pytest.mark.parametrize("mode", [*MODES, "own"])
def test_places_that_leave_a_part_to_no_rank(ranks, mode):
    """Otherwise half of the samples would be read and dropped."""
    make = lambda ctx: make_loader(ctx, Stream(9), mode, 2, data_parallel=(0, 2))  # noqa: E731
    fields = {"problem": "read by no rank", "expected": "^indices 0 to 1, equally often", "got": r"^\[0, 0\] by rank"}
    assert_refused(ranks, make, DataError, **fields, world=2)


@pytest.mark.parametrize("wrong", [{1}, {0, 1}])
def test_what_is_no_cursor(ranks, wrong):
    def rank(ctx):
        loader = make_loader(ctx, Stream(9), "dispatch", 2)
        with assert_raises(DataError, problem="the cursor is not valid", got="3"):
            next(accel.batches(ctx, loader, 3 if ctx.rank in wrong else Cursor()))
        accel.wait_for_everyone(ctx)
        return True

    assert all(ranks.run(rank, 2))


def test_a_class_that_other_ranks_cannot_import(ranks):
    class Local(accel.Cursor, frozen=True):
        pass

    make = lambda ctx: make_loader(ctx, Stream(9), "dispatch", 2, collate_fn=lambda _: [Local()])  # noqa: E731
    fields = {"problem": "cannot import the class by its name", "got": "Local", "where": r"\$\[0\]"}
    assert_refused(ranks, make, TreeError, **fields)


class Shapes(IterableDataset):
    """Ready batches whose samples cannot be counted."""

    def __init__(self, batch):
        self.batch = batch

    def __iter__(self):
        yield from [self.batch] * 4


@pytest.mark.parametrize(
    ("batch", "fields"),
    [
        (
            {"a": torch.ones(2), "b": torch.ones(3)},
            {"got": r"\$\.a of \[2\], \$\.b of \[3\]", "fix": "batch_size="},
        ),
        ({"a": torch.tensor(1.0)}, {"got": r"\$\.a of \[\]"}),
        (["text"], {"got": "^list"}),
        (torch.ones(0, 3), {"got": r"\$ of \[0, 3\]"}),
    ],
)
def test_ready_batches_that_cannot_be_counted(ranks, batch, fields):
    make = lambda ctx: accel.prepare_loader(ctx, DataLoader(Shapes(batch), batch_size=None), stream="dispatch")  # noqa: E731
    problem = "rank 0: the samples in a batch of the stream cannot be counted"
    assert_refused(ranks, make, DataError, problem=problem, **fields)


class Files(Stream):
    """A dataset of few source shards."""

    num_shards = 2


REFUSED = {
    "no mode": (
        DataLoader(Stream(9)),
        {},
        DataError,
        {"problem": "no positions", "fix": 'stream="shards".*"own".*"elements".*"dispatch"'},
    ),
    "no mode, no DataLoader": (Files, {}, DataError, {"problem": "the loader is not a DataLoader"}),
    "unknown mode": (DataLoader(Stream(9)), {"stream": "dispatched"}, ConfigError, {"fix": "Did you mean `dispatch`"}),
    "unknown tail": (
        DataLoader(Stream(9)),
        {"stream": "own", "tail": "fill"},
        ConfigError,
        {"expected": "ragged, pad, drop"},
    ),
    "positions": (DataLoader(range(9)), {"stream": "own"}, DataError, {"problem": "has positions|with positions"}),
    "no shard": (
        DataLoader(Broken(9)),
        {"stream": "shards"},
        DataError,
        {"expected": r"shard\(num_shards, index\)", "got": "Broken"},
    ),
    "few shards": (
        DataLoader(Files(9)),
        {"stream": "shards"},
        DataError,
        {"expected": "at least 3", "got": "num_shards=2"},
    ),
    "once": (
        (i for i in range(3)),
        {"stream": "own"},
        DataError,
        {"problem": "the loader is not a DataLoader", "got": "generator"},
    ),
    "nothing": (7, {"stream": "own"}, DataError, {"problem": "the loader is not a DataLoader", "got": "int"}),
    "generator": (
        DataLoader(Stream(9), generator=torch.Generator()),
        {"stream": "own"},
        DataError,
        {"problem": "seed decides", "got": "a generator"},
    ),
    "two ends": (
        DataLoader(Stream(9), batch_size=2, drop_last=True),
        {"stream": "own", "tail": "pad"},
        ConfigError,
        {"problem": "two arguments"},
    ),
    "padding batches": (
        DataLoader(Stream(9), batch_size=None),
        {"stream": "own", "tail": "pad"},
        ConfigError,
        {"problem": "cannot be padded"},
    ),
    "no batch": (
        DataLoader(Stream(9), batch_size=None),
        {"stream": "own", "global_batch": 6},
        ConfigError,
        {"problem": "yields batches"},
    ),
    "no multiple": (
        DataLoader(Stream(9), batch_size=2),
        {"stream": "own", "global_batch": 7},
        ConfigError,
        {"expected": "multiple of 3"},
    ),
    "tokens": (
        DataLoader(Stream(9)),
        {"stream": "own", "batch_tokens": 7},
        ConfigError,
        {"problem": "batch_tokens has no effect on a stream"},
    ),
    "no steps": (
        DataLoader(Stream(9)),
        {"stream": "own", "steps_per_message": 0},
        ConfigError,
        {"expected": "from 1", "got": "^0$"},
    ),
    "messages of positions": (
        DataLoader(range(9)),
        {"steps_per_message": 2},
        ConfigError,
        {"problem": "has an effect on streams only"},
    ),
    "replaying positions": (
        DataLoader(range(9)),
        {"replay": True},
        ConfigError,
        {"problem": "replay has an effect on streams only"},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_prepared_says_why_and_what_to_do(ranks, name):
    loader, options, error, fields = REFUSED[name]

    def rank(ctx):
        with assert_raises(error, **fields):
            accel.prepare_loader(ctx, loader, **options)
        return True

    assert all(ranks.run(rank, 3))


def test_prepared_streams_go_through_prepare_and_torchs_loaders_of_streams_do_not():
    ctx = accel.single()
    loader = make_loader(ctx, Stream(9), "own", 2)
    assert accel.prepare(ctx, loader) is loader
    with assert_raises(DataError, fix='stream="dispatch"'):
        accel.prepare(ctx, DataLoader(Stream(9)))
    with assert_raises(PrepareError, problem="cannot prepare this"):
        accel.prepare(ctx, Stream(9))


def test_iterating_what_is_not_meant_to_be():
    ctx = accel.single()
    with assert_raises(DataError, problem="accel.batches"):
        iter(make_loader(ctx, Stream(9), "own", 2))
    elsewhere = make_loader(dataclasses.replace(ctx, rank=1, world_size=2), Stream(9), "own", 2)
    with assert_raises(DataError, expected="rank 0 of 1", got="rank 1 of 2"):
        next(accel.batches(ctx, elsewhere, Cursor()))
