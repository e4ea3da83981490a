# SPDX-License-Identifier: Apache-2.0
"""Streams over ranks: every sample once, equally many steps, whoever reads."""

from __future__ import annotations

import random
import time
from collections import UserDict

import pytest
import torch
from hypothesis import given, settings, strategies as st
from profiles import share
from stream_helpers import Stateful, Stream, make_loader, on_nodes
from torch.utils.data import DataLoader, IterableDataset

import accel
from accel import Cursor

MODES = ["shards", "elements", "dispatch"]
relaxed = settings(deadline=None, max_examples=share(0.8))


@relaxed
@given(
    n=st.integers(1, 40),
    world=st.integers(1, 5),
    size=st.integers(1, 5),
    per_node=st.integers(1, 3),
    mode=st.sampled_from(MODES),
    tail=st.sampled_from(["ragged", "pad"]),
    limit=st.sampled_from([None, 1, 3]),
)
def test_every_sample_is_given_once_in_equally_many_steps(ranks, n, world, size, per_node, mode, tail, limit):
    def rank(ctx):
        ctx = on_nodes(ctx, per_node)
        loader = make_loader(ctx, Stream(n), mode, size, tail=tail, steps_per_message=limit)
        gathered, steps = [], []
        for batch in accel.batches(ctx, loader, Cursor()):
            ids = batch.data[0]
            assert len(ids) == batch.rows >= max(batch.valid, 1)
            assert tail == "ragged" or batch.rows == size
            assert batch.mask.tolist() == [row < batch.valid for row in range(batch.rows)]
            got = accel.gather_for_metrics(ctx, {"ids": ids}, batch)["ids"].tolist()
            assert len(got) == batch.valid.world
            gathered += got
            steps.append((batch.is_last, batch.next.consumed, batch.next.epoch, batch.valid.world))
        assert batch.next == Cursor(epoch=1)
        assert [last for last, *_ in steps] == [False] * (len(steps) - 1) + [True]
        return gathered, steps

    results = ranks.run(rank, world)
    assert all(result == results[0] for result in results)
    gathered, steps = results[0]
    assert sorted(gathered) == list(range(n))
    if mode != "shards":  # the order of the stream, cut into global batches, whatever the ranks
        assert gathered == list(range(n))
        assert [count for *_, count in steps] == [min(world * size, n - at) for at in range(0, n, world * size)]


@relaxed
@given(
    n=st.integers(1, 40), world=st.integers(1, 4), size=st.integers(1, 4), mode=st.sampled_from(MODES), data=st.data()
)
def test_dropping_ends_all_ranks_with_the_last_step_that_is_full(ranks, n, world, size, mode, data):
    if n < world * size:
        n = world * size + data.draw(st.integers(0, 5))

    def rank(ctx):
        loader = make_loader(ctx, Stream(n), mode, size, drop_last=True)
        return [(b.data[0].tolist(), int(b.valid), b.is_last) for b in accel.batches(ctx, loader, Cursor())]

    results = ranks.run(rank, world)
    for result in results:
        assert [last for *_, last in result] == [False] * (n // (world * size) - 1) + [True]
        assert all(len(ids) == valid == size for ids, valid, _ in result)
    ids = [each for result in results for step, *_ in result for each in step]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_divide_a_stream_that_looks_for_them(ranks, mode, workers):
    def rank(ctx):
        ctx = on_nodes(ctx, 2)
        stream = Stateful(23)
        options = {"num_workers": workers, "worker_init_fn": _note} if workers else {}
        given = []
        for batch in accel.batches(ctx, make_loader(ctx, stream, mode, 2, **options), Cursor()):
            given += accel.gather_for_metrics(ctx, batch.data[0], batch).tolist()
        return given

    for ids in ranks.run(rank, 3):
        assert sorted(ids) == list(range(23))
        assert workers or mode == "shards" or ids == list(range(23))


def _note(worker):
    stream = torch.utils.data.get_worker_info().dataset
    assert (stream.n, stream.at) == (23, 0)  # the user's, as torch gives it
    stream.noted = worker


class Counted(IterableDataset):
    """Counts what is read of it in a list that the test holds."""

    def __init__(self, n, log):
        self.n, self.log = n, log

    def __iter__(self):
        for number in range(self.n):
            self.log.append(number)
            yield number


@pytest.mark.parametrize(("mode", "readers"), [("dispatch", {0}), ("elements", {0, 2})])
def test_other_ranks_read_nothing(ranks, mode, readers):
    def rank(ctx):
        ctx, log = on_nodes(ctx, 2), []
        batches = list(accel.batches(ctx, make_loader(ctx, Counted(17, log), mode, 2), Cursor()))
        assert len(batches) == 3
        return log

    logs = ranks.run(rank, 4)
    assert [log == list(range(17)) for log in logs] == [rank in readers for rank in range(4)]
    assert [bool(log) for log in logs] == [rank in readers for rank in range(4)]


@pytest.mark.parametrize("mode", ["own", "dispatch"])
@pytest.mark.parametrize(
    ("limit", "read"), [(1, [1, 2, 3, 4, 5, 6]), (3, [1, 3, 3, 6, 6, 6]), (None, [1, 3, 3, 7, 7, 7])]
)
def test_the_first_batch_waits_for_one_element_more_and_later_ones_come_in_twice_as_many(ranks, mode, limit, read):
    def rank(ctx):
        log, read = [], []
        loader = make_loader(ctx, Counted(100, log), mode, 4, steps_per_message=limit)
        batches = accel.batches(ctx, loader, Cursor())
        for _ in range(6):
            _ = next(batches)
            read.append(len(log))
        return read

    size = 8 if mode == "dispatch" else 4
    assert ranks.run(rank, 2)[0] == [1 + steps * size for steps in read]


def test_alone_nothing_is_read_before_its_turn():
    log = []
    batches = accel.batches(accel.single(), make_loader(accel.single(), Counted(100, log), "dispatch", 4), Cursor())
    for _ in range(5):
        _ = next(batches)
    assert len(log) == 21


class Wide(Counted):
    """Gives vectors of one number."""

    width = 1

    def __iter__(self):
        return (torch.full((self.width,), number) for number in super().__iter__())


@relaxed
@given(
    n=st.integers(1, 30),
    world=st.integers(2, 4),
    size=st.integers(1, 4),
    per_node=st.integers(1, 4),
    width=st.sampled_from([1, 60, 500, 20_000]),
    mode=st.sampled_from(["elements", "dispatch"]),
)
def test_what_arrives_is_what_was_read_whichever_way_it_travels(ranks, n, world, size, per_node, width, mode):
    def rank(ctx):
        stream = Wide(n, [])
        stream.width = width
        loader = make_loader(on_nodes(ctx, per_node), stream, mode, size)
        ids = []
        for batch in accel.batches(on_nodes(ctx, per_node), loader, Cursor()):
            assert batch.data.shape == (batch.rows, width)
            assert torch.equal(batch.data, batch.data[:, :1].expand(-1, width))
            ids += accel.gather_for_metrics(ctx, batch.data[:, 0], batch).tolist()
        return ids

    assert ranks.run(rank, world) == [list(range(n))] * world


def test_large_steps_travel_one_by_one(ranks):
    class Large(Wide):
        width = 600_000

    def rank(ctx):
        log = []
        batches = accel.batches(ctx, make_loader(ctx, Large(40, log), "dispatch", 1), Cursor())
        assert [next(batches).data[0, 0].item() for _ in range(4)] == [ctx.rank + 2 * step for step in range(4)]
        return len(log)

    assert ranks.run(rank, 2) == [9, 0]


def test_a_rank_that_never_had_a_batch_borrows_one_to_stand_in(ranks):
    """It has nothing to give to the model otherwise; what it borrows does not count."""

    def rank(ctx):
        loader = make_loader(ctx, Stream(2), "shards", 4)
        (batch,) = accel.batches(ctx, loader, Cursor())
        return batch.data[0].tolist(), int(batch.valid), batch.valid.world, batch.rows, batch.is_last

    assert ranks.run(rank, 3) == [([0], 1, 2, 1, True), ([1], 1, 2, 1, True), ([0], 0, 2, 1, True)]


def test_a_rank_whose_stream_has_ended_repeats_its_last_batch_until_all_have(ranks):
    def rank(ctx):
        stream = Counted([5, 1][ctx.rank], [])
        loader = make_loader(ctx, stream, "own", 2)
        return [(b.data.tolist(), int(b.valid), b.valid.world, b.is_last) for b in accel.batches(ctx, loader, Cursor())]

    assert ranks.run(rank, 2) == [
        [([0, 1], 2, 3, False), ([2, 3], 2, 2, False), ([4], 1, 1, True)],
        [([0], 1, 3, False), ([0], 0, 2, False), ([0], 0, 1, True)],
    ]


class Encoding(UserDict):
    """What tokenizers return: no container that could be taken apart, but it moves itself."""

    def to(self, device):
        return self


@pytest.mark.parametrize("mode", ["shards", "own"])
def test_batches_that_move_themselves_need_no_container(ranks, mode):
    def rank(ctx):
        loader = make_loader(ctx, Stream(9), mode, 2, collate_fn=lambda rows: Encoding(id=[row[0] for row in rows]))
        return [batch.data["id"] for batch in accel.batches(ctx, loader, Cursor())]

    whole = [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    assert ranks.run(rank, 2) == [whole] * 2 if mode == "own" else [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7], [5, 7]]]


@pytest.mark.parametrize(("mode", "ahead"), [("dispatch", True), ("own", False)])
def test_all_ranks_read_ahead_or_none(ranks, monkeypatch, mode, ahead):
    """A batch that one rank alone asks for ahead of its turn would meet the others in another call."""
    asked = []

    def watch(items, device, containers, *, ahead):
        asked.append(ahead)
        return items

    def rank(ctx):
        loader = make_loader(ctx, Stream(9), mode, 2, num_workers=int(ctx.rank == 0))
        return len(list(accel.batches(ctx, loader, Cursor())))

    monkeypatch.setattr("accel.data.stream._batches.moved", watch)
    assert set(ranks.run(rank, 2)) == {3 if mode == "dispatch" else 5}
    assert asked == [ahead] * 2


class Ready(IterableDataset):
    """Gives batches of its own, of different sizes."""

    def __iter__(self):
        at = 0
        for size in (3, 1, 2, 4, 1):
            yield {"id": torch.arange(at, at + size), "text": [str(i) for i in range(at, at + size)]}
            at += size


@pytest.mark.parametrize("mode", ["dispatch", "elements"])
@pytest.mark.parametrize("tail", ["ragged", "drop"])
def test_batches_that_the_stream_makes_go_to_one_rank_each(ranks, mode, tail):
    def rank(ctx):
        loader = accel.prepare_loader(ctx, DataLoader(Ready(), batch_size=None), stream=mode, tail=tail)
        result = []
        for batch in accel.batches(ctx, loader, Cursor()):
            assert batch.data["text"] == [str(i) for i in batch.data["id"].tolist()]
            assert len(batch.data["id"]) == batch.rows
            result += accel.gather_for_metrics(ctx, batch.data["id"], batch).tolist()
        return result

    assert ranks.run(rank, 2) == [list(range(11 if tail == "ragged" else 10))] * 2


class Shelf:
    """A loader of another library: not torch's, iterable once an epoch, with a state."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 5:
            self.at += 1
            yield torch.tensor([2 * self.at - 2, 2 * self.at - 1])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("mode", ["own", "dispatch"])
def test_any_object_that_gives_batches_can_be_a_loader(ranks, mode):
    def rank(ctx):
        shelf = Shelf()
        loader = accel.prepare_loader(ctx, shelf, stream=mode)
        whole = list(accel.batches(ctx, loader, Cursor()))
        again = list(accel.batches(ctx, loader, whole[0].next))
        assert shelf.at == 0  # the user's object has not moved
        assert [b.data.tolist() for b in again] == [b.data.tolist() for b in whole[1:]]
        return [b.data.tolist() for b in whole]

    every = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert ranks.run(rank, 2) == ([every] * 2 if mode == "own" else [every[::2], [*every[1::2], [8, 9]]])


@pytest.mark.parametrize("mode", [*MODES, "own"])
def test_ranks_of_one_tensor_parallel_group_get_the_same(ranks, mode):
    def rank(ctx):
        stream = Stream(11, ((2, ctx.rank // 2),)) if mode == "own" else Stream(11)
        loader = make_loader(ctx, stream, mode, 2, data_parallel=(ctx.rank // 2, 2))
        given, gathered = [], []
        for batch in accel.batches(ctx, loader, Cursor()):
            given.append((batch.data[0].tolist(), int(batch.valid), batch.valid.world, batch.duplicate))
            gathered += accel.gather_for_metrics(ctx, batch.data[0], batch).tolist()
        assert sorted(gathered) == list(range(11))
        assert {duplicate for *_, duplicate in given} == {ctx.rank % 2 == 1}
        return [each[:3] for each in given]

    first, second, third, fourth = ranks.run(rank, 4)
    assert first == second
    assert third == fourth
    assert first != third


@pytest.mark.parametrize("mode", MODES)
def test_epochs_are_told_to_the_stream_and_reading_draws_nothing_from_the_global_streams(ranks, mode):
    class Shuffled(Stream):
        epoch = -1

        def set_epoch(self, epoch):
            self.epoch = epoch

        def shard(self, num_shards, index):
            return self

        def numbers(self):
            return [self.epoch]

    def rank(ctx):
        loader = make_loader(ctx, Shuffled(1), mode, 1)
        before = torch.get_rng_state(), random.getstate()
        batches = [next(accel.batches(ctx, loader, Cursor(epoch=epoch))) for epoch in (0, 3)]
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        assert batches[0].data[1:] != batches[1].data[1:]
        return [batch.data[0].tolist() for batch in batches]

    assert ranks.run(rank, 2) == [[[0], [3]]] * 2


class OneNumber(IterableDataset):
    """Keeps its epoch as Hugging Face's streams do: workers share it, and changing it takes two steps."""

    def __init__(self):
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch):
        change = epoch - int(self.epoch)
        time.sleep(0.1)
        self.epoch += change

    def __iter__(self):
        time.sleep(0.3)
        yield int(self.epoch)


def test_workers_that_share_the_number_of_the_epoch_read_that_epoch():
    ctx = accel.single()
    loader = accel.prepare_loader(ctx, DataLoader(OneNumber(), batch_size=1, num_workers=2), stream="own")
    for epoch in (3, 1):
        read = [batch.data.tolist() for batch in accel.batches(ctx, loader, Cursor(epoch=epoch))]
        assert read == [[epoch]] * 2


@relaxed
@given(n=st.integers(1, 30), world=st.integers(1, 4), per_node=st.integers(1, 2), size=st.integers(1, 4))
def test_augmentation_is_that_of_one_process_whoever_reads_for_whom(ranks, n, world, per_node, size):
    def draws(world, mode):
        def rank(ctx):
            ctx = on_nodes(ctx, per_node)
            loader = make_loader(ctx, Stream(n), mode, 1, global_batch=size)
            steps = []
            for batch in accel.batches(ctx, loader, Cursor(seed=3)):
                steps += zip(
                    *(accel.gather_for_metrics(ctx, column, batch).tolist() for column in batch.data), strict=True
                )
            return steps

        return ranks.run(rank, world)[0]

    alone = draws(1, "dispatch")
    assert len(set(alone)) == n
    assert draws(world, "dispatch") == draws(world, "elements") == alone


def test_a_stream_and_an_evaluation_within_it_leave_each_other_alone(ranks):
    def rank(ctx):
        outer = make_loader(ctx, Stateful(9), "dispatch", 2)
        inner = make_loader(ctx, Stateful(5), "shards", 2)
        ids, cursor = [], Cursor()
        while cursor.epoch == 0:
            for batch in accel.batches(ctx, outer, cursor):
                ids += accel.gather_for_metrics(ctx, batch.data[0], batch).tolist()
                evaluated = []
                for each in accel.batches(ctx, inner, Cursor()):
                    evaluated += accel.gather_for_metrics(ctx, each.data[0], each).tolist()
                assert sorted(evaluated) == list(range(5))
                cursor = batch.next
                break  # leave early each time, and go on from the cursor
        return ids

    assert ranks.run(rank, 2) == [list(range(9))] * 2
