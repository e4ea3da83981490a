# SPDX-License-Identifier: Apache-2.0
"""A user's own sampler is taken as it is: once an epoch, the same on every rank, and again after a resume."""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter

import numpy
import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import accel
from accel import Cursor
from accel.errors import CollectiveMismatch, DataError

relaxed = settings(deadline=None, max_examples=share(0.8))
DATA = list(range(100))


class Backwards(SequentialSampler):
    def __iter__(self):
        return reversed(range(len(self.data_source)))


class Drawing(Sampler):
    """Draws from everything there is, and remembers that it has been asked."""

    def __init__(self, seed: int = 0) -> None:
        self.epoch = 0
        self.asked = 0
        self.torch = torch.Generator().manual_seed(seed)
        self.python = random.Random(seed)
        self.numpy = numpy.random.default_rng(seed)
        self.legacy = numpy.random.RandomState(seed)

    def __len__(self) -> int:
        return 13

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        self.asked += 1
        yield self.epoch
        yield self.asked
        for _ in range(2):
            yield int(torch.randint(100, (), generator=self.torch))
            yield self.python.randrange(100)
            yield self.numpy.integers(100)  # numpy's integers, and tensors, are positions too
            yield torch.randint(100, ())
            yield random.randrange(100)
        yield self.legacy.randint(100)


SAMPLERS = {
    "subset": lambda: SubsetRandomSampler(range(3, 40)),
    "subset with a generator": lambda: SubsetRandomSampler(range(3, 40), torch.Generator().manual_seed(3)),
    "weighted": lambda: WeightedRandomSampler([1.0, 2.0, 7.0], 24),
    "replacement": lambda: RandomSampler(DATA, replacement=True, num_samples=33),
    "fewer": lambda: RandomSampler(DATA, num_samples=16),
    "more": lambda: RandomSampler(range(9), num_samples=21),
    "backwards": lambda: Backwards(range(17)),
    "drawing": Drawing,
    "list": lambda: [5, 5, 1, 99],
    "tensor": lambda: torch.tensor([4, 3, 3]),
}


def _steps(make, world, cursor, *, stop=-1, **options) -> tuple[list[list[int]], Cursor]:
    """The real samples of each step on all ranks together, and the cursor after the last."""
    loaders = [
        accel.prepare_loader(
            accel.single(), DataLoader(DATA, batch_size=2, sampler=make()), data_parallel=(rank, world), **options
        )
        for rank in range(world)
    ]
    steps = []
    for batches in zip(*(accel.batches(accel.single(), loader, cursor) for loader in loaders), strict=True):
        if len(steps) == stop:
            break
        steps.append([sample for batch in batches for sample in batch.data[: batch.valid].tolist()])
        (cursor,) = {batch.next for batch in batches}
    return steps, cursor


@pytest.mark.parametrize("name", SAMPLERS)
@settings(deadline=None, max_examples=share(0.24))
@given(worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)), seed=st.integers(0, 9), k=st.integers(0, 9))
def test_what_it_draws_follows_from_seed_and_epoch_at_any_number_of_ranks(name, worlds, seed, k):
    make = SAMPLERS[name]
    torch.manual_seed(k)  # no part of it
    whole, after = _steps(make, worlds[0], Cursor(seed=seed, epoch=2), global_batch=5)
    assert after == Cursor(seed=seed, epoch=3)
    assert sum(map(len, whole)) == len(make())
    first, cursor = _steps(make, worlds[0], Cursor(seed=seed, epoch=2), global_batch=5, stop=k % len(whole))
    rest, _ = _steps(make, worlds[1], cursor, global_batch=5)
    assert first + rest == whole


def _epoch(sampler, **cursor) -> list[int]:
    steps, _ = _steps(lambda: sampler, 1, Cursor(**cursor))
    return [sample for step in steps for sample in step]


def test_each_kind_gives_what_it_is_for():
    assert sorted(_epoch(SAMPLERS["subset"]())) == list(range(3, 40))
    assert _epoch(SAMPLERS["backwards"]()) == list(range(17))[::-1]
    assert _epoch([5, 5, 1, 99]) == [5, 5, 1, 99]
    counts = Counter(_epoch(WeightedRandomSampler([1.0, 0.0, 9.0], 600)))
    assert set(counts) == {0, 2}
    assert 30 < counts[0] < 90  # 60 in expectation, six standard deviations
    assert Counter(_epoch(SAMPLERS["more"]())).most_common()[-1][1] == 2


@pytest.mark.parametrize("name", ["subset", "subset with a generator", "weighted", "replacement", "fewer", "drawing"])
def test_seeds_and_epochs_draw_anew(name):
    make = SAMPLERS[name]
    drawn = [_epoch(make(), seed=seed, epoch=epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert len({tuple(each) for each in drawn}) == 3


def test_the_users_generator_keeps_its_say():
    """Its seed takes part, as a second one beside the cursor's."""

    def subset(seed):
        return SubsetRandomSampler(range(50), torch.Generator().manual_seed(seed))

    def shuffled(seed):
        raw = DataLoader(DATA, batch_size=100, shuffle=True, generator=torch.Generator().manual_seed(seed))
        ctx = accel.single()
        return next(accel.batches(ctx, accel.prepare_loader(ctx, raw), Cursor())).data.tolist()

    assert _epoch(subset(1)) == _epoch(subset(1)) != _epoch(subset(2))
    assert shuffled(1) == shuffled(1) != shuffled(2)
    assert sorted(shuffled(2)) == DATA
    for attribute in ("torch", "python", "numpy", "legacy"):
        other = Drawing()
        setattr(other, attribute, getattr(Drawing(1), attribute))
        assert _epoch(other) != _epoch(Drawing())


def test_neither_the_sampler_nor_the_global_streams_change():
    sampler, generator = Drawing(5), torch.Generator().manual_seed(5)
    inner = SubsetRandomSampler(range(30), generator)
    raw = DataLoader(DATA, batch_sampler=BatchSampler(sampler, 4, False))
    other = DataLoader(DATA, batch_size=4, sampler=inner)
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    before = copy.deepcopy(sampler.__dict__ | {"own": generator})
    streams = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    for each in (raw, other):
        ctx = accel.single()
        loader = accel.prepare_loader(ctx, each)
        for epoch in range(2):
            assert sum(b.valid for b in accel.batches(ctx, loader, Cursor(epoch=epoch))) == len(loader.source.sampler)
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == streams[1:]
    assert (sampler.epoch, sampler.asked) == (0, 0)
    assert torch.equal(sampler.torch.get_state(), before["torch"].get_state())
    assert torch.equal(generator.get_state(), before["own"].get_state())
    assert sampler.python.getstate() == before["python"].getstate()
    assert sampler.numpy.bit_generator.state == before["numpy"].bit_generator.state
    assert inner.generator is generator


class Faulty(Sampler):
    def __init__(self, *given: object, length: int | None = None) -> None:
        self.given, self.length = given, len(given) if length is None else length

    def __len__(self) -> int:
        return self.length

    def __iter__(self):
        for each in self.given:
            if each is KeyError:
                raise KeyError("lost")
            yield each


@pytest.mark.parametrize(
    ("sampler", "problem", "fields"),
    [
        (Faulty(length=3), "yields nothing.*would never end", {}),
        (Faulty(1, 2, 3, length=2), "yields more than its length", {"expected": "2 samples", "fix": "__len__"}),
        (Faulty(1, "a"), "failed: TypeError", {}),
        (Faulty(1, KeyError), "failed: KeyError: 'lost'", {"where": "Faulty"}),
        (Faulty(1, 100), "yields a position outside", {"expected": "0 to 99", "got": "^100$"}),
        (Faulty(-1), "yields a position outside", {"got": "^-1$"}),
    ],
)
def test_what_a_sampler_does_wrong_is_raised_on_every_rank(ranks, sampler, problem, fields):
    def rank(ctx):
        given = sampler if ctx.rank == 1 else Faulty(1, 2, 3)
        loader = accel.prepare_loader(ctx, DataLoader(DATA, batch_size=2, sampler=given))
        with assert_raises(DataError, problem=f"rank 1: the sampler {problem}", **fields):
            next(accel.batches(ctx, loader, Cursor()))
        return True

    assert ranks.run(rank, 3) == [True] * 3


class Reordering(Sampler):
    """Shuffles what it holds where it lies, in every way that is common."""

    def __init__(self) -> None:
        self.buckets = {"short": [0, 1, 2, 3], "long": [4, 5, 6, 7]}
        self.array = numpy.arange(8, 20)
        self.generators = [random.Random(1), torch.Generator().manual_seed(1)]
        self.inner = [SubsetRandomSampler(range(20, 30), self.generators[1])]

    def __len__(self) -> int:
        return 30

    def __iter__(self):
        for bucket in self.buckets.values():
            self.generators[0].shuffle(bucket)
            yield from bucket
        numpy.random.shuffle(self.array)
        yield from self.array
        yield from self.inner[0]


def test_a_sampler_that_shuffles_what_it_holds_keeps_it():
    """So an epoch does not depend on those before it, and can be resumed."""
    sampler = Reordering()
    before = torch.Generator().manual_seed(1).get_state(), random.Random(1).getstate()
    first, second = (_epoch(sampler, epoch=epoch) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != second
    assert _epoch(sampler, epoch=1) == second == _epoch(Reordering(), epoch=1)
    assert sampler.buckets == Reordering().buckets
    assert sampler.array.tolist() == list(range(8, 20))
    assert torch.equal(sampler.generators[1].get_state(), before[0])
    assert sampler.generators[0].getstate() == before[1]


class Shared(Sampler):
    """Shuffles a list that the sampler inside it reads, and leaves the dataset alone."""

    def __init__(self, dataset) -> None:
        self.dataset = dataset
        self.positions = list(range(10))
        self.inner = Faulty()
        self.inner.given, self.inner.length = self.positions, 10

    def __len__(self) -> int:
        return 10

    def __iter__(self):
        assert self.dataset is DATA
        random.shuffle(self.positions)
        return iter(self.inner)


def test_what_parts_of_a_sampler_share_stays_shared_and_the_dataset_is_not_copied():
    drawn = _epoch(Shared(DATA))
    assert sorted(drawn) == list(range(10)) != drawn


class Endless(Sampler):
    def __len__(self) -> int:
        return 3

    def __iter__(self):
        return itertools.repeat([1])


class Unknowing(Sampler):
    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self):
        return iter([[1], [2]])


def test_batches_without_a_length_are_taken():
    loader = accel.prepare_loader(accel.single(), DataLoader(DATA, batch_sampler=Unknowing()))
    assert loader.steps(Cursor()) == 2


def test_batches_without_end_are_found():
    loader = accel.prepare_loader(accel.single(), DataLoader(DATA, batch_sampler=Endless()))
    with assert_raises(DataError, problem="yields more than its length", expected="3 batches"):
        next(accel.batches(accel.single(), loader, Cursor()))


def test_a_shorter_epoch_than_announced_is_an_epoch():
    assert _epoch(Faulty(1, 2, 3, length=50)) == [1, 2, 3]


@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
def test_ranks_whose_samplers_disagree_are_told_of_both(ranks, kind):
    def rank(ctx):
        given = {
            "sampler": {"sampler": [1, 2, 3 + ctx.rank // 2], "batch_size": 2},
            "batch_sampler": {"batch_sampler": [[1, 2], [3]] if ctx.rank < 2 else [[1], [2, 3]]},
        }
        loader = accel.prepare_loader(ctx, DataLoader(DATA, **given[kind]))
        with assert_raises(CollectiveMismatch, expected=r"rank 0: .*digest \w+", got=r"rank 2: .*digest \w+"):
            next(accel.batches(ctx, loader, Cursor()))
        return True

    assert ranks.run(rank, 3) == [True] * 3


def test_a_cursor_of_another_draw_is_refused():
    _, cursor = _steps(SAMPLERS["weighted"], 1, Cursor(), stop=2)
    with assert_raises(DataError, problem="another order", expected="24 samples drawn", got="24 samples drawn"):
        _steps(lambda: WeightedRandomSampler([7.0, 2.0, 1.0], 24), 1, cursor)
    with assert_raises(DataError, expected="37 samples drawn by Subset", got="24 samples drawn by Weighted"):
        _steps(SAMPLERS["subset"], 1, cursor)
