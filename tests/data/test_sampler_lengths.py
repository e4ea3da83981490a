# SPDX-License-Identifier: Apache-2.0
"""Epochs of a sampler may differ in length: a right `__len__` after `set_epoch` is the law, else the iterator's end."""

from __future__ import annotations

import math

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from torch.utils.data import BatchSampler, DataLoader, Sampler, SubsetRandomSampler, WeightedRandomSampler

import accel
from accel import Cursor
from accel.errors import DataError

DATA = list(range(100))


class Varying(Sampler):
    """Its length is right after `set_epoch`, once it has begun, or nowhere; it yields samples or whole batches."""

    def __init__(self, lengths, told, *, in_batches) -> None:
        self.lengths, self.told, self.in_batches = lengths, told, in_batches
        self.epoch, self.listed = 0, []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.listed = [] if self.told == "empty before it begins" else None

    def __len__(self) -> int:
        if self.told == "after set_epoch":
            return self.lengths[self.epoch]
        if self.told == "NotImplementedError":
            raise NotImplementedError
        return len(self.listed)  # of None a TypeError

    def __iter__(self):
        drawn = torch.randperm(len(DATA))[: self.lengths[self.epoch]].tolist()
        self.listed = [[each, self.epoch] for each in drawn] if self.in_batches else drawn
        yield from self.listed


class WithoutLength(Varying):
    __len__ = None


class Around(Sampler):
    """Passes on what the sampler inside it yields: `set_epoch` is inside too."""

    def __init__(self, inner) -> None:
        self.inner = [inner]

    def __len__(self) -> int:
        return len(self.inner[0])

    def __iter__(self):
        return iter(self.inner[0])


TOLD = ("after set_epoch", "empty before it begins", "TypeError before it begins", "NotImplementedError", "no __len__")


def _varying(lengths, told, *, in_batches, wrapped=False):
    kind = WithoutLength if told == "no __len__" else Varying
    sampler = kind(lengths, told, in_batches=in_batches)
    return Around(sampler) if wrapped and told != "no __len__" else sampler


@settings(deadline=None, max_examples=share(0.3))
@given(
    lengths=st.lists(st.integers(1, 12), min_size=3, max_size=3),
    told=st.sampled_from(TOLD),
    in_batches=st.booleans(),
    wrapped=st.booleans(),
    worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    seed=st.integers(0, 3),
    k=st.integers(0, 11),
)
def test_a_length_may_follow_the_epoch(lengths, told, in_batches, wrapped, worlds, seed, k):
    sampler = _varying(lengths, told, in_batches=in_batches, wrapped=wrapped)
    size = {"batches_per_step": 3} if in_batches else {"global_batch": 3}

    def loaders(world):
        plain = DataLoader(DATA, **({"batch_sampler": sampler} if in_batches else {"sampler": sampler}))
        return [
            accel.prepare_loader(accel.single(), plain, data_parallel=(rank, world), **size) for rank in range(world)
        ]

    def read(world, cursor, stop=-1):
        steps = []
        for batches in zip(*(accel.batches(accel.single(), each, cursor) for each in loaders(world)), strict=True):
            if len(steps) == stop:
                break
            steps.append([sample for batch in batches for sample in batch.data[: batch.valid].tolist()])
            (cursor,) = {batch.next for batch in batches}
        return steps, cursor

    each = 2 if in_batches else 1
    for epoch, length in enumerate(lengths):
        start = Cursor(seed=seed, epoch=epoch)
        whole, after = read(worlds[0], start)
        assert after == Cursor(seed=seed, epoch=epoch + 1)
        assert sum(map(len, whole)) == length * each
        first, middle = read(worlds[0], start, stop=k % len(whole))
        rest, _ = read(worlds[1], middle)
        assert first + rest == whole
        loader = loaders(1)[0]
        assert accel.skip_first_batches(start, k % len(whole), loader).consumed == middle.consumed
        assert loader.steps(start) == len(whole) == -(-length // 3)
    assert sampler.inner[0].epoch == 0 if isinstance(sampler, Around) else sampler.epoch == 0

    windows = sum(math.ceil(math.ceil(length / 3) / 2) for length in lengths)
    if told == "after set_epoch":
        assert accel.total_steps(loader, accumulation=2, epochs=3) == windows
        if lengths[0] == lengths[1]:
            assert len(loader) == -(-lengths[0] // 3)
        else:
            with assert_raises(DataError, problem="differs from epoch to epoch", fix=r"loader\.steps"):
                len(loader)
            assert loader.samples is None
    else:
        with assert_raises(DataError, fix=r"accel\.total_steps\(loader, steps=1000, epochs=3\)"):
            accel.total_steps(loader, accumulation=2, epochs=3)
        assert accel.total_steps(loader, steps=1000, epochs=3) == 3000  # the line of the error
        assert accel.total_steps(loader, steps=5, accumulation=2, epochs=3) == 9


class OfTheSeed(Sampler):
    """Its length is drawn with the samples."""

    def set_epoch(self, epoch: int) -> None:
        self.drawn = torch.randperm(len(DATA))[: int(torch.randint(1, 90, ()))].tolist()

    def __len__(self) -> int:
        return len(self.drawn)

    def __iter__(self):
        return iter(self.drawn)


def test_a_length_that_depends_on_the_seed_is_known_to_the_epoch_alone():
    loader = accel.prepare_loader(accel.single(), DataLoader(DATA, sampler=OfTheSeed()))
    lengths = {loader.steps(Cursor(seed=seed)) for seed in range(5)}
    assert len(lengths) > 2
    assert loader.steps(Cursor(seed=3)) == len(list(accel.batches(accel.single(), loader, Cursor(seed=3))))
    with assert_raises(DataError, expected="steps="):
        accel.total_steps(loader)


class Growing(Varying):
    """Its length is always one more than it has yielded."""

    def __iter__(self):
        self.listed = []
        while True:
            self.listed.append(0)
            yield [0] if self.in_batches else 0


class Repeating(Growing):
    __len__ = None


@pytest.mark.parametrize("in_batches", [False, True])
@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda b: Varying([9, 9], "after set_epoch", in_batches=b), None),
        (
            lambda b: Growing([9, 9], "empty before it begins", in_batches=b),
            {"expected": "at most 100 times the dataset's 100"},
        ),
        (
            lambda b: Repeating([9, 9], "no __len__", in_batches=b),
            {"expected": "at most 100 times", "fix": "Give it a __len__"},
        ),
        (
            lambda b: Wrong([9, 9], "after set_epoch", in_batches=b),
            {"problem": "more than its length", "expected": "8", "fix": "Correct __len__"},
        ),
    ],
)
def test_a_wrong_length_and_an_endless_sampler_are_refused(in_batches, make, fields):
    sampler = make(in_batches)
    plain = DataLoader(DATA, **({"batch_sampler": sampler} if in_batches else {"sampler": sampler}))
    loader = accel.prepare_loader(accel.single(), plain)
    if fields is None:
        assert len(list(accel.batches(accel.single(), loader, Cursor(epoch=1)))) == 9
        return
    with assert_raises(DataError, **fields):
        next(accel.batches(accel.single(), loader, Cursor(epoch=1)))


class Wrong(Varying):
    def __len__(self) -> int:
        return self.lengths[self.epoch] - 1


def test_positions_in_a_plain_list_are_not_copied_for_a_length():
    class Listed(SubsetRandomSampler):
        def __copy__(self):
            raise AssertionError

    loader = accel.prepare_loader(accel.single(), DataLoader(DATA, batch_size=4, sampler=Listed(range(10))))
    assert (len(loader), loader.samples, accel.total_steps(loader, epochs=5)) == (3, 10, 15)


@pytest.mark.slow
@pytest.mark.parametrize("in_batches", [False, True])
def test_workers_read_epochs_of_different_lengths(in_batches):
    sampler = Varying([3, 7, 5], "after set_epoch", in_batches=in_batches)
    cut = {"batch_sampler": sampler} if in_batches else {"sampler": sampler, "batch_size": 2}
    loader = accel.prepare_loader(accel.single(), DataLoader(DATA, num_workers=2, persistent_workers=True, **cut))
    read = [sum(b.valid for b in accel.batches(accel.single(), loader, Cursor(epoch=epoch))) for epoch in range(3)]
    assert read == [length * (1 + in_batches) for length in (3, 7, 5)]
    loader.close()


def test_ranks_read_such_epochs_together(ranks):
    def rank(ctx):
        sampler = Varying([4, 7, 1], "after set_epoch", in_batches=True)
        loader = accel.prepare_loader(ctx, DataLoader(DATA, batch_sampler=sampler))
        state, read = accel.train_state(ctx, seed=0), [0, 0, 0]
        while state.epoch < 3:
            for batch in accel.batches(ctx, loader, state):
                read[state.epoch] += batch.valid.world
                state = state.at(batch.next)
        return read

    assert ranks.run(rank, 3) == [[8, 14, 2]] * 3


class Budget(Sampler):
    """Batches of at most 20 tokens, built where they are first asked for."""

    def __init__(self) -> None:
        self.epoch, self.built = 0, None

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.built = epoch, None

    def _batches(self) -> list[list[int]]:
        if self.built is None:
            order = torch.randperm(40, generator=torch.Generator().manual_seed(self.epoch)).tolist()
            self.built = [[]]
            for position in order:
                if sum(each % 9 + 1 for each in self.built[-1]) + position % 9 + 1 > 20:
                    self.built.append([])
                self.built[-1].append(position)
        return self.built

    def __len__(self) -> int:
        return len(self._batches())

    def __iter__(self):
        return iter(self._batches())


class Curriculum(BatchSampler):
    def set_epoch(self, epoch: int) -> None:
        self.batch_size = 2 + epoch
        self.sampler = range(10 * (epoch + 1))


class MoreEachEpoch(WeightedRandomSampler):
    def set_epoch(self, epoch: int) -> None:
        self.num_samples = 10 + 5 * epoch


@pytest.mark.parametrize(
    "cut",
    [
        {"batch_sampler": Budget()},
        {"batch_sampler": Curriculum(range(10), 2, drop_last=False)},
        {"sampler": MoreEachEpoch([1.0] * 40, 10), "batch_size": 4},
    ],
    ids=["token budget", "curriculum", "weighted"],
)
def test_samplers_of_the_field_resume_in_a_later_epoch(cut):
    ctx = accel.single()
    loader = accel.prepare_loader(ctx, DataLoader(DATA, **cut))
    steps = 0
    for epoch in range(3):
        whole = list(accel.batches(ctx, loader, Cursor(seed=1, epoch=epoch)))
        rest = list(accel.batches(ctx, loader, whole[1].next))
        assert [b.data.tolist() for b in rest] == [b.data.tolist() for b in whole[2:]]
        steps += len(whole)
    assert accel.total_steps(loader, epochs=3) == steps
