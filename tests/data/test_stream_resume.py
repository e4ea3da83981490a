# SPDX-License-Identifier: Apache-2.0
"""A stream goes on from any cursor as if it had never stopped: in memory, through a checkpoint, by replay."""

from __future__ import annotations

import dataclasses
import enum
import random
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from stream_helpers import Stateful, Stream, make_loader, on_nodes, seen
from torch.utils.data import ChainDataset, DataLoader, IterableDataset

import accel
from accel import Cursor
from accel.comm import reduce_ints
from accel.errors import CheckpointError, ConfigError, DataError
from accel.loop_state import StreamPosition, WorkerPosition

MODES = ["shards", "elements", "dispatch"]
relaxed = settings(deadline=None, max_examples=share(0.8))


def _run(ctx, cursor, kind=Stateful, *, n=23, mode="dispatch", size=2, **options):
    loader = make_loader(ctx, kind(n), mode, size, **options)
    return list(accel.batches(ctx, loader, cursor))


def _same(batches, expected):
    """Whether batches are the same; those that weigh nothing may hold other data."""
    counts = [[(int(b.valid), b.valid.world, b.is_last, b.next.consumed) for b in each] for each in (batches, expected)]
    pairs = zip(batches, expected, strict=True)
    return counts[0] == counts[1] and all(seen(got) == seen(other) for got, other in pairs if other.valid)


@relaxed
@given(
    n=st.integers(4, 40),
    world=st.integers(1, 4),
    size=st.integers(1, 4),
    mode=st.sampled_from(MODES),
    kind=st.sampled_from([Stateful, Stream]),
    tail=st.sampled_from(["ragged", "pad", "drop"]),
    data=st.data(),
)
def test_the_rest_of_an_epoch_is_the_same_from_every_cursor(ranks, n, world, size, mode, kind, tail, data):
    n = max(n, world * size)
    options = {"n": n, "mode": mode, "size": size, "tail": tail, "steps_per_message": data.draw(st.integers(1, 4))}
    steps = len(ranks.run(lambda ctx: _run(on_nodes(ctx, 2), Cursor(seed=1), kind, **options), world)[0])
    k = data.draw(st.integers(0, steps - 1))

    def rank(ctx):
        ctx = on_nodes(ctx, 2)
        whole = _run(ctx, Cursor(seed=1), kind, **options)
        rest = _run(ctx, whole[k].next, kind, **options) if k < steps - 1 else []
        return _same(rest, whole[k + 1 :])

    assert all(ranks.run(rank, world))


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize(
    ("mode", "kind", "every"),
    [
        ("shards", Stateful, 5),
        ("elements", Stream, 5),
        ("dispatch", Stateful, 5),
        *(pytest.param(mode, kind, 1, marks=pytest.mark.slow) for mode in MODES for kind in (Stateful, Stream)),
    ],
)
def test_workers_go_on_where_each_of_them_was(ranks, mode, kind, every):
    def rank(ctx):
        whole = _run(ctx, Cursor(seed=1), kind, mode=mode, num_workers=3, n=31)
        for k in range(0, len(whole) - 1, every):
            rest = _run(ctx, whole[k].next, kind, mode=mode, num_workers=3, n=31)
            assert _same(rest, whole[k + 1 :])
        return True

    assert all(ranks.run(rank, 2))


@relaxed
@given(world=st.integers(1, 4), other=st.integers(1, 4), kind=st.sampled_from([Stateful, Stream]), k=st.integers(0, 3))
def test_a_position_in_the_whole_stream_fits_any_number_of_ranks(ranks, world, other, kind, k):
    def ids(ctx, cursor, mode):
        given, cursors = [], []
        for batch in _run(ctx, cursor, kind, n=40, mode=mode, global_batch=8):
            columns = accel.gather_for_metrics(ctx, batch.data, batch)
            given.append([column.tolist() for column in columns])
            cursors.append(batch.next)
        return given, cursors

    whole, cursors = ranks.run(lambda ctx: ids(ctx, Cursor(), "dispatch"), world)[0]
    for mode in ("dispatch", "elements"):
        for rest, _ in ranks.run(lambda ctx, mode=mode: ids(on_nodes(ctx, 2), cursors[k], mode), other):
            assert rest == whole[k + 1 :]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_checkpoint_keeps_where_every_rank_is(ranks, tmp_path, mode, workers):
    options = {"mode": mode, "num_workers": workers, "n": 29}

    def save(ctx):
        whole = _run(ctx, Cursor(seed=2), **options)
        accel.save_state(ctx, tmp_path, {"cursor": whole[1].next}, step=1)
        return [seen(batch) for batch in whole[2:]]

    def load(ctx):
        cursor = accel.load_state(ctx, accel.latest_checkpoint(tmp_path), {"cursor": Cursor()})["cursor"]
        return [seen(batch) for batch in _run(ctx, cursor, **options)]

    def load_elsewhere(ctx):
        cursor = accel.load_state(ctx, accel.latest_checkpoint(tmp_path), {"cursor": Cursor()})["cursor"]
        options_there = {**options, **({} if mode == "shards" else {"global_batch": 4})}
        ids = []
        for batch in _run(ctx, cursor, **options_there):
            ids += accel.gather_for_metrics(ctx, batch.data[0], batch).tolist()
        return ids

    assert ranks.run(save, 2) == ranks.run(load, 2)
    if mode == "shards":
        with assert_raises(DataError, got="2 ranks that read different parts", fix="as many ranks as before"):
            ranks.run(load_elsewhere, 3)
    else:
        ids = ranks.run(load_elsewhere, 3)[0]
        assert len(ids) == len(set(ids)) == 29 - 8


def test_a_rank_whose_stream_had_ended_resumes_without_any_batch_of_its_own(ranks):
    class Uneven(Stateful):
        def shard(self, num_shards, index):
            return type(self)([9, 2][index])

    def rank(ctx):
        whole = _run(ctx, Cursor(), Uneven, mode="shards")
        rest = _run(ctx, whole[2].next, Uneven, mode="shards")
        assert [(int(b.valid), b.valid.world) for b in rest] == [(int(b.valid), b.valid.world) for b in whole[3:]]
        return [b.data[0].tolist() for b in rest]

    assert ranks.run(rank, 2) == [[[6, 7], [8]], [[6, 7], [6, 7]]]


def test_a_stream_that_can_only_be_replayed_says_so_and_how_far_it_is(caplog, monkeypatch):
    monkeypatch.setattr("accel.data.stream._reader._REPORT_S", -1.0)
    ctx = accel.single()
    whole = _run(ctx, Cursor(), Stream, size=4)
    assert not caplog.records
    rest = _run(ctx, whole[2].next, Stream, size=4)
    assert [seen(b) for b in rest] == [seen(b) for b in whole[3:]]
    texts = [record.getMessage() for record in caplog.records]
    assert "Stream is read again from its beginning and 12 elements are skipped" in texts[0]
    assert "no state_dict" in texts[0]
    assert texts[1:] == [f"skipped {at} of 12 elements (worker 0)" for at in (1, 4, 5, 8, 9, 12)]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_wait_for_a_long_replay_hear_of_it(ranks, monkeypatch, mode, workers):
    """Otherwise they would give up on the one that reads, at the time-out of a message."""
    heard = []

    def counting(comm, call, numbers, op):
        heard.extend(map(bool, numbers))
        return reduce_ints(comm, call, numbers, op)

    def rank(ctx):
        options = {"n": 31, "mode": mode, "num_workers": workers}
        whole = _run(ctx, Cursor(seed=1), Stream, **options)
        heard.clear()
        accel.wait_for_everyone(ctx)
        assert _same(_run(ctx, whole[3].next, Stream, **options), whole[4:])
        return True

    monkeypatch.setattr("accel.data.stream._reader._REPORT_S", -1.0)
    monkeypatch.setattr("accel.data.stream._prefetch.reduce_ints", counting)
    assert all(ranks.run(rank, 2))
    assert heard.count(True) >= (4 if workers == 0 else 2)
    assert heard[-2:] == [False, False]


class Forgetful(Stateful):
    """As a shuffle buffer: what it holds is not in its state."""

    def __iter__(self):
        held = []
        for sample in super().__iter__():
            held.append(sample)
            if len(held) == 3:
                yield held.pop(0)
        yield from held


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_that_forgets_can_be_left_alone(caplog, workers):
    ctx = accel.single()
    whole, kept = (_run(ctx, Cursor(), Forgetful, num_workers=workers, replay=replay) for replay in (True, False))
    assert [seen(b)[1:] for b in whole] == [seen(b)[1:] for b in kept]
    lost = [i for b in _run(ctx, kept[2].next, Forgetful, num_workers=workers) for i in b.data[0].tolist()]
    assert len(lost) < 23 - 6
    for cursor in (whole[2].next, kept[2].next):
        caplog.clear()
        rest = _run(ctx, cursor, Forgetful, num_workers=workers, replay=True)
        assert [seen(b) for b in rest] == [seen(b) for b in whole[3:]]
        assert "6 elements are skipped, because replay=True" in caplog.records[0].getMessage()


class Asking(Stateful):
    """As Mosaic's: its state needs the number of samples."""

    def state_dict(self, num_samples: int, *, from_beginning: bool) -> dict[str, int]:
        raise AssertionError


class Unable(Stateful):
    """As a base class whose subclasses may have a state."""

    def state_dict(self) -> dict[str, int]:
        raise NotImplementedError


@pytest.mark.parametrize("kind", [Asking, Unable])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stream_that_cannot_give_its_state_is_replayed(caplog, kind, workers):
    ctx = accel.single()
    whole = _run(ctx, Cursor(), kind, num_workers=workers)
    assert not caplog.records
    rest = _run(ctx, whole[2].next, kind, num_workers=workers)
    assert [seen(b) for b in rest] == [seen(b) for b in whole[3:]]
    assert "6 elements are skipped" in caplog.records[0].getMessage()


@pytest.mark.slow
def test_persistent_workers_read_each_epoch_anew():
    ctx = accel.single()
    raw = DataLoader(Stateful(23), batch_size=3, num_workers=2, persistent_workers=True)
    loader = accel.prepare_loader(ctx, raw, stream="own")
    for epoch in range(2):
        whole = list(accel.batches(ctx, loader, Cursor(epoch=epoch)))
        assert sorted(i for batch in whole for i in batch.data[0].tolist()) == list(range(23))
        assert _same(list(accel.batches(ctx, loader, whole[2].next)), whole[3:])


def test_a_count_alone_is_a_position_where_one_reader_reads_all():
    """As `Cursor(consumed=)` of data with positions; only that it must read what it skips."""
    ctx = accel.single()
    whole = _run(ctx, Cursor(), Stateful, size=4)
    rest = _run(ctx, Cursor(consumed=12), Stateful, size=4)
    assert [seen(b) for b in rest] == [seen(b) for b in whole[3:]]


class Iterating(IterableDataset):
    """It is the iterator that has a state."""

    def __iter__(self):
        return _Iterator()


class _Iterator:
    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == 11:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_with_a_state_resumes_too(caplog, workers):
    ctx = accel.single()
    loader = make_loader(ctx, Iterating(), "own", 2, num_workers=workers)
    whole = list(accel.batches(ctx, loader, Cursor()))
    rest = list(accel.batches(ctx, loader, whole[1].next))
    assert [b.data.tolist() for b in rest] == [b.data.tolist() for b in whole[2:]]
    assert not caplog.records


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_of_torchdata_resumes(workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    ctx = accel.single()
    raw = stateful(Stateful(23), batch_size=3, num_workers=workers)
    loader = accel.prepare_loader(ctx, raw, stream="own")
    whole = list(accel.batches(ctx, loader, Cursor()))
    assert sorted(i for batch in whole for i in batch.data[0].tolist()) == list(range(23))
    for k in range(len(whole) - 1):
        rest = list(accel.batches(ctx, loader, whole[k].next))
        assert [seen(b) for b in rest] == [seen(b) for b in whole[k + 1 :]]
    begun = stateful(Stateful(23), batch_size=3)
    begun.load_state_dict({"_iterator_finished": False})
    with assert_raises(DataError, got="a loaded state_dict"):
        accel.prepare_loader(ctx, begun, stream="own")


def _position(ranks_=0, workers=1, state=None):
    return StreamPosition((WorkerPosition(3, state),) * workers, ranks=ranks_)


@pytest.mark.parametrize(
    ("mode", "cursor", "fields"),
    [
        ("shards", Cursor(consumed=3), {"problem": "has no position"}),
        (
            "dispatch",
            Cursor(consumed=3, stream=_position(ranks_=2)),
            {"problem": "divided in another way", "expected": "full stream"},
        ),
        (
            "shards",
            Cursor(consumed=3, stream=_position()),
            {"problem": "divided in another way", "expected": "2 ranks that read different parts"},
        ),
        (
            "dispatch",
            Cursor(consumed=3, stream=_position(workers=2)),
            {"expected": "num_workers=2, as when", "got": "num_workers=0"},
        ),
        ("dispatch", Cursor(consumed=3, of="9 samples in sequence"), {"problem": "belongs to another order"}),
        ("dispatch", Cursor(consumed=99), {"problem": "ended before the cursor's position", "got": "^9$"}),
        (
            "dispatch",
            Cursor(consumed=3, stream=_position(state={"at": 3})),
            {"problem": "cannot take it", "expected": "load_state_dict"},
        ),
    ],
)
def test_a_cursor_of_something_else_is_refused_on_every_rank(ranks, mode, cursor, fields):
    def rank(ctx):
        with assert_raises(DataError, **fields):
            _run(ctx, cursor, Stream, n=9, mode=mode)
        accel.wait_for_everyone(ctx)
        return True

    assert all(ranks.run(rank, 2))


def test_a_cursor_of_a_stream_fits_no_data_with_positions():
    ctx = accel.single()
    cursor = _run(ctx, Cursor())[0].next
    loader = accel.prepare_loader(ctx, DataLoader(range(23), batch_size=2))
    with assert_raises(DataError, got="a stream"):
        next(accel.batches(ctx, loader, cursor))


def test_a_state_that_cannot_be_stored_is_named_when_it_is_saved(ranks, tmp_path):
    class Odd(Stream):
        def state_dict(self):
            return {"seen": object()}

        def load_state_dict(self, state):
            pass

    def rank(ctx):
        cursor = _run(ctx, Cursor(), Odd, mode="shards")[0].next
        with assert_raises(CheckpointError, problem="cannot be stored", where=r"cursor\.stream.*state\.seen"):
            accel.save_state(ctx, tmp_path, {"cursor": cursor}, step=1)
        return accel.latest_checkpoint(tmp_path) is None

    assert all(ranks.run(rank, 2))


GENERATORS = {
    "torch": (lambda: torch.Generator().manual_seed(5), lambda own: int(torch.randint(2**30, (), generator=own))),
    "python": (lambda: random.Random(5), random.Random.random),
    "numpy": (lambda: np.random.default_rng(5), lambda own: own.random()),
    "legacy": (lambda: np.random.RandomState(5), lambda own: own.random_sample()),
}


class Shuffled(Stream):
    """Shuffles with a generator that its epochs share."""

    def __init__(self, kind):
        super().__init__(11)
        make, self.draw = GENERATORS[kind]
        self.generator = make()

    def __iter__(self):
        return ((number, 0.0, 0.0) for number in sorted(self.numbers(), key=lambda _: self.draw(self.generator)))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_that_a_stream_holds_is_seeded_in_each_epoch(kind, nested):
    def made():
        stream = Shuffled(kind)
        return stream, make_loader(ctx, ChainDataset([stream, Stream(2)]) if nested else stream, "dispatch", 3)

    ctx = accel.single()
    stream, loader = made()
    whole = [[seen(batch) for batch in accel.batches(ctx, loader, Cursor(seed=1, epoch=epoch))] for epoch in range(3)]
    assert whole[0] != whole[1]
    again = made()[1]  # as another process makes it
    second = list(accel.batches(ctx, again, Cursor(seed=1, epoch=1)))
    assert [seen(batch) for batch in second] == whole[1]
    assert [seen(batch) for batch in accel.batches(ctx, again, second[1].next)] == whole[1][2:]
    assert stream.draw(stream.generator) == stream.draw(GENERATORS[kind][0]())  # the user's generator stays as it is


class Dice(random.Random):
    """A generator with a method and an attribute that `random.Random` lacks."""

    def __init__(self, sides, seed):
        super().__init__(seed)
        self.sides = sides

    def roll(self):
        return self.randrange(self.sides)


def test_a_generator_of_a_subclass_is_seeded_with_its_methods_and_one_without_a_seed_stays(monkeypatch):
    monkeypatch.setitem(GENERATORS, "dice", (lambda: Dice(2**30, 5), Dice.roll))
    monkeypatch.setitem(GENERATORS, "system", (random.SystemRandom, lambda own: own.random()))
    bits = (lambda: np.random.RandomState(np.random.PCG64(5)), lambda own: own.random_sample())
    monkeypatch.setitem(GENERATORS, "bits", bits)
    ctx = accel.single()

    def read(kind):
        loader = make_loader(ctx, Shuffled(kind), "dispatch", 3)
        return [seen(batch) for batch in accel.batches(ctx, loader, Cursor(seed=1))]

    assert read("dice") == read("dice")
    assert read("system") != read("system")
    assert len(read("bits")) == len(read("dice"))


class Place(msgspec.Struct, frozen=True):
    at: int


@dataclasses.dataclass
class Spot:
    at: int


class Pair(NamedTuple):
    at: int


class Phase(enum.Enum):
    READING = 1


@pytest.mark.parametrize("record", [Place(3), Spot(3), Pair(3), Phase.READING])
@pytest.mark.parametrize("mode", ["own", "dispatch"])
def test_a_record_in_the_state_of_a_stream_is_refused_when_it_is_saved(ranks, tmp_path, mode, record):
    class Recording(Stream):
        def state_dict(self):
            return {"seen": [record]}

        def load_state_dict(self, state):
            assert state == {"seen": [record]}

    def rank(ctx):
        loader = make_loader(ctx, Recording(99), mode, 2)
        state = accel.train_state(ctx)
        state = state.next(next(accel.batches(ctx, loader, state)))
        name = type(record).__name__
        place = {"got": rf"^{name} at \$\.seen\[0\]", "where": r"item cursor\.stream\.workers\[0\]"}
        with assert_raises(ConfigError, problem="holds a record", **place, fix="Return plain values"):
            accel.save_state(ctx, tmp_path, {"cursor": state.cursor}, step=1)
        assert next(accel.batches(ctx, loader, state.cursor)).start == state.cursor  # in this process it is fine
        return accel.latest_checkpoint(tmp_path) is None

    assert all(ranks.run(rank, 2))
