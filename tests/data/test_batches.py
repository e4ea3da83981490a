# SPDX-License-Identifier: Apache-2.0
"""Batches of real loaders: what the plan says, from any cursor, with and without workers."""

from __future__ import annotations

import dataclasses
import random
from typing import Any, NamedTuple

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from tables import rows
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler

import accel
from accel import Cursor
from accel.data import order
from accel.errors import ConfigError, DataError
from accel.topology import without_mesh

relaxed = settings(deadline=None, max_examples=share(1.2))


def _context(rank: int = 0, world: int = 1) -> accel.DistContext:
    """A rank that talks to nobody: reading data needs no communication."""
    return dataclasses.replace(accel.single(), rank=rank, world_size=world, position=without_mesh(rank, world))


class Augmented(Dataset):
    """Samples with what the global streams give."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[int, float, float]:
        return index, random.random(), torch.rand(()).item()


class Fetching(Augmented):
    """A dataset that reads several samples at once."""

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float, float]]:
        return [(-1 - index, random.random(), torch.rand(()).item()) for index in indices]


@st.composite
def cases(draw):
    n, world, size = draw(st.integers(1, 60)), draw(st.integers(1, 5)), draw(st.integers(1, 12))
    tail = draw(st.sampled_from(["ragged", "pad", "drop"]))
    if tail == "drop":
        size = max(1, min(size, n // world))
        world = min(world, n)
    return n, world, size, tail, draw(st.booleans())


def _run(case, cursor: Cursor, **options: Any) -> list[list[accel.Batch]]:
    """The batches of every rank, until the end of the cursor's epoch."""
    n, world, size, tail, shuffle = case
    loader = DataLoader(range(n), batch_size=size, shuffle=shuffle)
    contexts = [_context(rank, world) for rank in range(world)]
    return [
        list(accel.batches(ctx, accel.prepare_loader(ctx, loader, tail=tail, **options), cursor)) for ctx in contexts
    ]


def _real(step: tuple[accel.Batch, ...]) -> list[int]:
    return [sample for batch in step for sample in batch.data[: batch.valid].tolist()]


@relaxed
@given(case=cases(), seed=st.integers(0, 99), epoch=st.integers(0, 3))
def test_an_epoch_over_ranks_is_the_order_of_the_dataset(case, seed, epoch):
    n, _world, size, tail, shuffle = case
    by_rank = _run(case, Cursor(seed=seed, epoch=epoch))
    assert len({len(each) for each in by_rank}) == 1
    steps = list(zip(*by_rank, strict=True))
    taken = [sample for step in steps for sample in _real(step)]
    whole = order(seed, epoch, n, shuffle=shuffle).at(torch.arange(n))
    assert taken == whole[: len(taken)]
    assert tail == "drop" or len(taken) == n
    for step in steps:
        assert len({batch.next for batch in step}) == 1
        assert {batch.valid.world for batch in step} == {len(_real(step))}
        for batch in step:
            assert batch.rows == len(batch.data) >= 1
            assert batch.mask.tolist() == [row < batch.valid for row in range(batch.rows)]
            assert set(batch.data.tolist()) <= set(_real(step))  # stand-ins repeat the step's own samples
            if tail != "ragged":
                assert batch.rows == size
            elif batch.valid:
                assert batch.rows == batch.valid
    assert [batch.is_last for batch in by_rank[0]] == [False] * (len(steps) - 1) + [True]
    assert by_rank[0][-1].next == Cursor(seed=seed, epoch=epoch + 1)


@relaxed
@given(case=cases(), other=st.integers(1, 5), seed=st.integers(0, 99), data=st.data())
def test_resuming_at_any_batch_on_any_number_of_ranks_gives_the_rest(case, other, seed, data):
    n, world, size, tail, shuffle = case
    by_rank = _run(case, Cursor(seed=seed))
    steps = list(zip(*by_rank, strict=True))
    k = data.draw(st.integers(0, len(steps) - 1))
    cursor = by_rank[0][k - 1].next if k else Cursor(seed=seed)
    again = _run(case, cursor)
    for rank in range(world):
        expected = [(batch.data.tolist(), batch.valid, batch.rows, batch.next) for batch in by_rank[rank][k:]]
        assert [(batch.data.tolist(), batch.valid, batch.rows, batch.next) for batch in again[rank]] == expected
    moved = _run((n, other, size, tail, shuffle), cursor, global_batch=size * world)
    assert [_real(step) for step in zip(*moved, strict=True)] == [_real(step) for step in steps[k:]]


def test_a_rank_left_without_samples_gets_a_stand_in():
    by_rank = _run((5, 4, 1, "ragged", False), Cursor())
    last = [each[-1] for each in by_rank]
    assert [(int(batch.valid), batch.rows, batch.data.tolist()) for batch in last] == [(1, 1, [4])] + [(0, 1, [4])] * 3
    assert [batch.mask.tolist() for batch in last] == [[True]] + [[False]] * 3


def test_padding_keeps_the_shape_and_marks_itself():
    by_rank = _run((5, 2, 2, "pad", False), Cursor())
    got = [[(batch.data.tolist(), batch.mask.tolist()) for batch in each] for each in by_rank]
    assert got == [
        [([0, 1], [True, True]), ([4, 4], [True, False])],
        [([2, 3], [True, True]), ([4, 4], [False, False])],
    ]


def test_a_start_in_the_middle_reads_nothing_before_it():
    class Watched(Augmented):
        def __init__(self) -> None:
            super().__init__(10**9)
            self.read: list[int] = []

        def __getitem__(self, index: int) -> int:
            self.read.append(index)
            return index

    dataset = Watched()
    ctx = _context()
    loader = accel.prepare_loader(ctx, DataLoader(dataset, batch_size=4))
    assert len(loader) == 250_000_000
    batch = next(accel.batches(ctx, loader, Cursor(consumed=888_888_888)))
    assert dataset.read == list(range(888_888_888, 888_888_892))
    assert batch.next == Cursor(consumed=888_888_892, of="1000000000 samples in sequence")


def test_epochs_and_seeds_are_shuffled_anew_and_the_same_cursor_repeats():
    def ids(**fields: int) -> list[int]:
        return [
            sample for batch in _run((50, 1, 8, "ragged", True), Cursor(**fields))[0] for sample in batch.data.tolist()
        ]

    assert ids(seed=1) == ids(seed=1)
    assert ids(seed=1) != ids(seed=1, epoch=1)
    assert ids(seed=1) != ids(seed=2)


def test_breaking_off_and_nesting_loaders_leave_each_other_alone():
    ctx = _context()
    outer, inner = (accel.prepare_loader(ctx, DataLoader(range(n), batch_size=2, shuffle=True)) for n in (10, 6))
    alone = [[b.data.tolist() for b in accel.batches(ctx, each, Cursor(seed=3))] for each in (outer, inner)]
    cursor, seen = Cursor(seed=3), []
    while cursor.epoch == 0:
        for batch in accel.batches(ctx, outer, cursor):
            seen.append(batch.data.tolist())
            cursor = batch.next
            evaluated = [b.data.tolist() for b in accel.batches(ctx, inner, Cursor(seed=3))]
            assert evaluated == alone[1]
            if len(seen) % 2:
                break  # and go on from the cursor
    assert seen == alone[0]


@pytest.mark.parametrize("workers", [0, 1])
def test_reading_draws_nothing_from_the_global_streams(workers):
    ctx = _context()
    loader = accel.prepare_loader(ctx, DataLoader(range(20), batch_size=3, shuffle=True, num_workers=workers))
    before = torch.get_rng_state(), random.getstate()
    assert sum(batch.rows for batch in accel.batches(ctx, loader, Cursor())) == 20
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def _augmented(dataset: Dataset, cursor: Cursor, workers: int, ctx: accel.DistContext) -> list[tuple]:
    raw = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers)
    loader = accel.prepare_loader(ctx, raw)
    return [(batch.next, *(column.tolist() for column in batch.data)) for batch in accel.batches(ctx, loader, cursor)]


@pytest.mark.parametrize("dataset", [Augmented(21), Fetching(21)], ids=["items", "getitems"])
def test_workers_augment_the_same_after_a_resume_and_whichever_worker_reads(dataset):
    ctx = _context()
    torch.manual_seed(1)
    whole = _augmented(dataset, Cursor(seed=5), 2, ctx)
    torch.manual_seed(2)  # the caller's streams have no part in it
    random.seed(2)
    assert _augmented(dataset, whole[2][0], 2, ctx) == whole[3:]
    assert _augmented(dataset, Cursor(seed=5), 1, ctx) == whole
    draws = [value for _, _, first, second in whole for value in (*first, *second)]
    assert len(set(draws)) == len(draws)  # no two samples were augmented alike
    assert _augmented(dataset, Cursor(seed=5, epoch=1), 2, ctx)[0][2] != whole[0][2]
    first, second = (_augmented(dataset, Cursor(seed=5), 1, _context(rank, 2)) for rank in range(2))
    assert not {value for row in first for value in row[2]} & {value for row in second for value in row[2]}


def test_without_workers_and_with_them_the_samples_are_the_same():
    ctx = _context(1, 2)
    raw = [DataLoader(range(23), batch_size=3, shuffle=True, num_workers=workers) for workers in (0, 2)]
    none, two = (list(accel.batches(ctx, accel.prepare_loader(ctx, each), Cursor(seed=4))) for each in raw)
    assert [(b.data.tolist(), b.valid, b.next) for b in none] == [(b.data.tolist(), b.valid, b.next) for b in two]


class Sample(NamedTuple):
    image: torch.Tensor
    label: int


def test_collating_and_options_are_the_users():
    def collate(samples: list[int]) -> dict[str, Any]:
        return {"sum": sum(samples), "of": Sample(torch.tensor(samples), len(samples))}

    ctx = _context()
    raw = DataLoader(range(5), batch_size=2, collate_fn=collate, drop_last=True)
    loader = accel.prepare_loader(ctx, raw)
    got = [batch.data for batch in accel.batches(ctx, loader, Cursor())]
    assert [each["sum"] for each in got] == [1, 5]
    assert [each["of"].image.tolist() for each in got] == [[0, 1], [2, 3]]
    assert loader.source.plan.tail == "drop"
    assert [each["sum"] for each in raw] == [1, 5]  # the user's loader is as it was


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Filtering(DataLoader):
    def __iter__(self):
        return (batch for batch in super().__iter__() if batch[0] % 2)


class Counting(DataLoader):
    def _get_iterator(self):
        return enumerate(super()._get_iterator())


class Unsized(Dataset):
    def __getitem__(self, index: int) -> int:
        return index


class Begun(DataLoader):
    """As a StatefulDataLoader that has loaded a state."""

    next_iter_state = {"_snapshot": 3}  # noqa: RUF012


DATA = list(range(10))
REFUSED = {
    "stream": (lambda: DataLoader(Stream()), {"problem": "no positions to shard", "expected": "stream="}),
    "no batch": (lambda: DataLoader(DATA, batch_size=None), {"fix": "batch_size=1 and a collate_fn"}),
    "sharded": (
        lambda: DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0)),
        {"problem": "shards already", "fix": "shuffle="},
    ),
    "one pass": (lambda: DataLoader(DATA, sampler=iter(DATA)), {"problem": "only once", "got": "list_iterator"}),
    "one pass of batches": (lambda: DataLoader(DATA, batch_sampler=iter([[1]])), {"problem": "only once"}),
    "sampler beyond": (lambda: DataLoader(DATA, sampler=SequentialSampler(range(11))), {"got": "11 positions"}),
    "any order": (lambda: DataLoader(DATA, num_workers=1, in_order=False), {"got": "in_order=False"}),
    "no length": (lambda: DataLoader(Unsized()), {"got": "no __len__"}),
    "empty": (lambda: DataLoader([]), {"problem": "empty"}),
    "all dropped": (lambda: DataLoader(DATA, batch_size=11, drop_last=True), {"problem": "drops the full epoch"}),
    "own iteration": (
        lambda: Filtering(DATA),
        {"problem": "changes what is iterated", "got": "Filtering", "fix": "collate_fn"},
    ),
    "own iterator": (lambda: Counting(DATA), {"problem": "changes what is iterated"}),
    "begun": (lambda: Begun(DATA), {"problem": "a cursor marks the start of a pass", "got": "a loaded state_dict"}),
    "no loader": (lambda: DATA, {"problem": "DataLoader", "got": "list"}),
}


@rows("name", REFUSED)
def test_a_loader_that_cannot_be_sharded_exactly_is_refused(name):
    make, fields = REFUSED[name]
    with assert_raises(DataError, **fields):
        accel.prepare_loader(_context(), make())


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"global_batch": 0}, {"expected": "an integer from 1"}),
        ({"tail": "keep"}, {"expected": "ragged, pad, drop"}),
        ({"tail": "pad"}, {"got": "drop_last=True and tail='pad'"}),
    ],
)
def test_options_that_contradict_are_refused(options, fields):
    raw = DataLoader(DATA, batch_size=2, drop_last=options.get("tail") == "pad")
    with assert_raises(ConfigError, **fields):
        accel.prepare_loader(_context(), raw, **options)


def test_the_global_batch_is_the_loaders_batch_on_every_rank_unless_it_is_given():
    raw = DataLoader(DATA, batch_size=2)
    assert accel.prepare_loader(_context(0, 3), raw).source.plan.global_batch == 6
    assert accel.prepare_loader(_context(0, 3), raw, global_batch=4).source.plan.global_batch == 4


def test_iterating_what_is_not_meant_to_be_is_refused_with_the_way_out():
    ctx = _context()
    loader = accel.prepare_loader(ctx, DataLoader(DATA))
    with assert_raises(DataError, problem="accel.batches"):
        iter(loader)
    with assert_raises(DataError, got="DataLoader", fix="prepare_loader"):
        next(accel.batches(ctx, DataLoader(DATA), Cursor()))
    with assert_raises(DataError, expected="rank 1 of 2", got="rank 0 of 1"):
        next(accel.batches(_context(1, 2), loader, Cursor()))
    with assert_raises(
        DataError, problem="the cursor is not valid", expected=r"accel.Cursor\(seed=, epoch=\)", got="3"
    ):
        next(accel.batches(ctx, loader, 3))
    with assert_raises(DataError, got="10 consumed"):
        next(accel.batches(ctx, loader, Cursor(consumed=10)))


@pytest.mark.parametrize("odd", ["seed", "position", "batch size", "length"])
def test_ranks_that_disagree_about_the_data_are_told_so(ranks, odd):
    """Otherwise each would read another order, and some samples twice."""

    def rank(ctx):
        here = ctx.rank == 1
        dataset = list(range(21 if here and odd == "length" else 20))
        loader = DataLoader(dataset, batch_size=3 if here and odd == "batch size" else 2, shuffle=True)
        cursor = accel.Cursor(seed=int(here and odd == "seed"), consumed=4 * (here and odd == "position"))
        with assert_raises(accel.errors.CollectiveMismatch, expected="batches"):
            next(accel.batches(ctx, accel.prepare_loader(ctx, loader), cursor))
        return True

    assert all(ranks.run(rank, 2))


class Opened(Dataset):
    """Needs a handle that each worker opens for itself."""

    def __init__(self):
        self.root, self.handle = "folder", None

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return f"{self.handle} {index}"


def _open(worker):
    dataset = torch.utils.data.get_worker_info().dataset
    assert (len(dataset), dataset[3]) == (4, "None 3")
    dataset.handle = f"{dataset.root}/{worker}"


def test_a_worker_init_fn_finds_the_users_dataset():
    ctx = accel.single()
    loader = accel.prepare_loader(ctx, DataLoader(Opened(), batch_size=2, num_workers=2, worker_init_fn=_open))
    got = [batch.data for batch in accel.batches(ctx, loader, accel.Cursor())]
    assert got == [["folder/0 0", "folder/0 1"], ["folder/1 2", "folder/1 3"]]


@pytest.mark.parametrize(
    ("slip", "told"),
    [
        (lambda batch: [*batch], "inputs, targets = batch.data"),
        (lambda batch: batch["labels"], r"batch.data\['labels'\]"),
        (lambda batch: batch[0], r"batch.data\[0\]"),
        (lambda batch: dict(**batch), r"model\(\*\*batch.data\)"),
        (lambda batch: torch.nn.Identity()(**batch), r"model\(\*\*batch.data\)"),
        (lambda batch: torch.nn.Identity()(*batch), "inputs, targets = batch.data"),
    ],
)
def test_a_batch_that_is_taken_for_its_data_names_the_field(slip, told):
    ctx = accel.single()
    loader = accel.prepare_loader(ctx, DataLoader(range(4), batch_size=2))
    with assert_raises(accel.errors.DataError, expected=told):
        slip(next(accel.batches(ctx, loader)))
