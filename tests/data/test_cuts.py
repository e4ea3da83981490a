# SPDX-License-Identifier: Apache-2.0
"""Batches of different sizes: dealt whole, equally many steps on every rank, the same steps on any number of ranks."""

from __future__ import annotations

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from tables import rows
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

import accel
from accel import Cursor
from accel.data import order
from accel.data._shards import BatchPlan
from accel.errors import CollectiveMismatch, ConfigError, DataError, StepError

relaxed = settings(deadline=None, max_examples=share(1.2))
DATA = list(range(60))


class Buckets:
    """A batch sampler with sizes of its own, in another order each epoch."""

    def __init__(self, sizes: list[int]) -> None:
        ends = torch.tensor(sizes).cumsum(0).tolist()
        self.batches = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        return iter([self.batches[at] for at in torch.randperm(len(self.batches)).tolist()])


sizes = st.lists(st.integers(1, 6), min_size=1, max_size=10)
token_lengths = st.lists(st.integers(0, 20), min_size=1, max_size=40)
worlds = st.integers(1, 5)


def _epoch(world, cursor, raw, **options) -> list[list[accel.Batch]]:
    """The batches of each step on all ranks, to the end of the epoch."""
    loaders = [accel.prepare_loader(accel.single(), raw(), data_parallel=(r, world), **options) for r in range(world)]
    steps = list(zip(*(accel.batches(accel.single(), each, cursor) for each in loaders), strict=True))
    for left, step in zip(range(len(steps), 0, -1), steps, strict=True):
        assert len({(b.next, b.is_last, b.valid.world, left == 1) for b in step}) == 1
        assert step[0].is_last == (left == 1)
    assert loaders[0].steps(cursor) == len(steps)
    return steps


def _ids(batch) -> list[int]:
    assert batch.rows == len(batch.data) == max(batch.valid, 1)
    return batch.data[: batch.valid].tolist()


def _joined(step) -> list[int]:
    ids = [each for batch in step for each in _ids(batch)]
    assert {batch.valid.world for batch in step} == {len(ids)}
    return ids


@relaxed
@given(sizes=sizes, world=worlds, seed=st.integers(0, 9), drop=st.booleans())
def test_batches_of_a_batch_sampler_are_dealt_whole(sizes, world, seed, drop):
    def raw():
        return DataLoader(DATA, batch_sampler=Buckets(sizes))

    if drop and len(sizes) < world:
        with assert_raises(DataError, problem="beyond the end"):
            _epoch(world, Cursor(seed=seed), raw, tail="drop")
        return
    steps = _epoch(world, Cursor(seed=seed), raw, **({"tail": "drop"} if drop else {}))
    loader = accel.prepare_loader(accel.single(), raw(), data_parallel=(0, world), tail="drop" if drop else None)
    assert len(loader) == len(steps) == (len(sizes) // world if drop else -(-len(sizes) // world))
    given = [ids for step in steps for batch in step if (ids := _ids(batch))]
    whole = Buckets(sizes).batches
    assert all(batch in whole for batch in given)
    assert len(given) == (len(steps) * world if drop else len(sizes))
    assert len({tuple(batch) for batch in given}) == len(given)
    for step in steps:
        assert all(set(b.data.tolist()) <= set(_joined(step)) for b in step)  # a stand-in is of the same step


@relaxed
@given(sizes=sizes, first=worlds, second=worlds, per_step=st.integers(1, 5), k=st.integers(0, 9))
def test_a_stated_number_of_batches_gives_the_same_steps_on_any_number_of_ranks(sizes, first, second, per_step, k):
    def raw():
        return DataLoader(DATA, batch_sampler=Buckets(sizes))

    whole = _epoch(first, Cursor(seed=1), raw, batches_per_step=per_step)
    k %= len(whole)
    cursor = whole[k - 1][0].next if k else Cursor(seed=1)
    rest = _epoch(second, cursor, raw, batches_per_step=per_step)
    assert [_joined(step) for step in rest] == [_joined(step) for step in whole[k:]]


@relaxed
@given(lengths=token_lengths, world=worlds, second=worlds, extra=st.integers(0, 30), k=st.integers(0, 40))
def test_a_token_budget_holds_and_takes_every_sample_once(lengths, world, second, extra, k):
    budget = max(*lengths, 1, 1) + extra
    options = {"batch_tokens": budget, "lengths": lengths, "batches_per_step": 3}

    def raw():
        return DataLoader(range(len(lengths)), shuffle=True)

    steps = _epoch(world, Cursor(seed=4), raw, **options)
    taken = [each for step in steps for each in _joined(step)]
    assert taken == order(4, 0, len(lengths)).at(torch.arange(len(lengths)))
    k %= len(steps)
    cursor = steps[k - 1][0].next if k else Cursor(seed=4)
    rest = _epoch(second, cursor, raw, **options)
    assert [_joined(step) for step in rest] == [_joined(step) for step in steps[k:]]
    for step in _epoch(3, Cursor(seed=4), raw, **options):
        for batch in step:
            held = [lengths[each] for each in _ids(batch)]
            assert max(held, default=0) * len(held) <= budget


def test_ranks_that_know_other_lengths_are_told_so(ranks):
    """Otherwise each would cut other batches: some samples twice, and not equally many steps."""

    def rank(ctx):
        options = {"batch_tokens": 20, "lengths": [1 + 3 * ctx.rank] * 9}
        loader = accel.prepare_loader(ctx, DataLoader(range(9)), **options)
        with assert_raises(
            CollectiveMismatch, expected="rank 0: .*1 batches, digest", got="rank 1: .*2 batches, digest"
        ):
            next(accel.batches(ctx, loader, Cursor()))
        return True

    assert ranks.run(rank, 2) == [True, True]


def test_a_budget_is_filled_and_lengths_come_in_any_form():
    lengths = [4, 4, 4, 9, 1, 1, 1]
    for form in (lengths, torch.tensor(lengths, dtype=torch.int32), lengths.__getitem__, tuple(lengths)):
        steps = _epoch(1, Cursor(), lambda: DataLoader(range(7)), batch_tokens=12, lengths=form)
        assert [_joined(step) for step in steps] == [[0, 1, 2], [3], [4, 5, 6]]


def test_another_budget_in_the_middle_of_an_epoch_goes_on_from_there():
    def raw():
        return DataLoader(range(40), shuffle=True)

    options = {"lengths": [1 + at % 7 for at in range(40)]}
    first = _epoch(2, Cursor(), raw, batch_tokens=30, **options)[:2]
    rest = _epoch(2, first[-1][0].next, raw, batch_tokens=9, **options)
    assert sorted(each for step in [*first, *rest] for each in _joined(step)) == list(range(40))


def test_ranks_without_a_batch_stand_in_and_ranks_with_several_join_them():
    def raw():
        return DataLoader(DATA, batch_sampler=[[0, 1, 2], [3], [4, 5]])

    few = _epoch(2, Cursor(), raw)
    assert [[(_ids(b), b.rows) for b in step] for step in few] == [
        [([0, 1, 2], 3), ([3], 1)],
        [([4, 5], 2), ([], 1)],
    ]
    many = _epoch(2, Cursor(), raw, batches_per_step=3)
    assert [[_ids(b) for b in step] for step in many] == [[[0, 1, 2, 3], [4, 5]]]


@pytest.mark.parametrize("where", ["batch_sampler", "sampler"])
def test_torchs_own_batch_sampler_is_a_batch_size(where):
    """Its steps are those of a loader with the same arguments."""
    ids = torch.arange(11)
    made = BatchSampler(RandomSampler(ids), 2, drop_last=True)
    options = {"batch_sampler": made} if where == "batch_sampler" else {"sampler": made, "batch_size": None}
    raw = DataLoader(ids, **options)
    plain = DataLoader(ids, batch_size=2, shuffle=True, drop_last=True)
    ours, theirs = (
        [[_ids(batch) for batch in step] for step in _epoch(2, Cursor(seed=2), lambda given=given: given)]
        for given in (raw, plain)
    )
    assert ours == theirs
    assert [len(batch) for step in ours for batch in step] == [2, 2, 2, 2]


class Rows:
    """A dataset that takes a list of positions, as memory-mapped tables do."""

    def __init__(self) -> None:
        self.asked = []

    def __len__(self) -> int:
        return 9

    def __getitem__(self, positions):
        self.asked.append(positions)
        return torch.tensor(positions)


def test_a_dataset_that_takes_lists_is_asked_once_a_batch():
    dataset = Rows()
    raw = DataLoader(dataset, sampler=BatchSampler(SequentialSampler(dataset), 4, False), batch_size=None)
    steps = _epoch(1, Cursor(), lambda: raw)
    assert dataset.asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert [_joined(step) for step in steps] == dataset.asked


def test_skipping_is_arithmetic_or_planned():
    ctx = accel.single()
    for raw, options in (
        (DataLoader(DATA, batch_size=7, shuffle=True), {}),
        (DataLoader(DATA, batch_sampler=Buckets([3, 1, 4, 1, 5])), {"batches_per_step": 2}),
        (DataLoader(DATA, shuffle=True), {"batch_tokens": 9, "lengths": [1 + at % 5 for at in DATA]}),
    ):
        loader = accel.prepare_loader(ctx, raw, **options)
        whole = [batch.next for batch in accel.batches(ctx, loader, Cursor(seed=6))]
        cursors = [accel.skip_first_batches(Cursor(seed=6), k, loader) for k in range(1, len(whole) + 1)]
        assert cursors == whole
        assert accel.skip_first_batches(whole[0], 1, loader) == whole[1]
        state = accel.skip_first_batches(accel.train_state(ctx, seed=6, accumulation=3), 1, loader)
        assert state == accel.train_state(ctx, seed=6, accumulation=3).at(whole[0])
        with assert_raises(StepError, problem="the state has no record of the backward of this batch"):
            accel.skip_first_batches(state.next(next(accel.batches(ctx, loader, state))), 1, loader)
        with assert_raises(DataError, expected=f"at most {len(whole)} steps", got=f"^{len(whole) + 1}"):
            accel.skip_first_batches(Cursor(seed=6), len(whole) + 1, loader)
        with assert_raises(ConfigError, expected="an integer from 0", got="-1"):
            accel.skip_first_batches(Cursor(), -1, loader)
        with assert_raises(DataError, expected=r"skip_first_batches\(state, steps, loader\)", got="Cursor"):
            accel.skip_first_batches(loader, 1, Cursor())
    endless = accel.prepare_loader(ctx, DataLoader(range(10**12), batch_size=32))
    assert accel.skip_first_batches(Cursor(), 10**10, endless).consumed == 32 * 10**10


@rows(
    "raw, options, error, fields",
    [
        (
            {"batch_sampler": [[1]]},
            {"global_batch": 4},
            ConfigError,
            {"problem": "batch sampler cuts", "fix": "batches_per_step"},
        ),
        (
            {"batch_sampler": [[1]]},
            {"batch_tokens": 4, "lengths": DATA},
            ConfigError,
            {"problem": "sampler cuts", "got": "batch_tokens"},
        ),
        (
            {"batch_sampler": [[1]]},
            {"tail": "pad"},
            ConfigError,
            {"problem": "unequal batches", "expected": "one of ragged, drop"},
        ),
        (
            {"batch_sampler": [[1]]},
            {"batches_per_step": 0},
            ConfigError,
            {"expected": "an integer from 1", "got": "^0$"},
        ),
        (
            {"batch_size": 2},
            {"batches_per_step": 4},
            ConfigError,
            {"problem": "batch size cuts", "fix": "global_batch"},
        ),
        (
            {"batch_size": 2},
            {"batch_tokens": 99, "lengths": DATA},
            ConfigError,
            {"got": "batch_size=2", "fix": "Leave batch_size"},
        ),
        ({}, {"batch_tokens": 99, "lengths": DATA, "global_batch": 4}, ConfigError, {"problem": "batch_tokens cuts"}),
        ({}, {"batch_tokens": 99}, ConfigError, {"problem": "need each other"}),
        ({}, {"lengths": DATA}, ConfigError, {"problem": "need each other"}),
        (
            {},
            {"batch_tokens": 50, "lengths": DATA},
            DataError,
            {"problem": "longer than", "got": "sample 59 of 59 tokens.*=50"},
        ),
        (
            {},
            {"batch_tokens": 99, "lengths": DATA[1:]},
            DataError,
            {"problem": "one integer a sample", "got": r"\[59\] for 60 samples"},
        ),
        ({}, {"batch_tokens": 99, "lengths": [0.5] * 60}, DataError, {"got": "float32"}),
        ({}, {"batch_tokens": 99, "lengths": [-1] * 60}, DataError, {"problem": "negative"}),
        (
            {},
            {"batch_tokens": 99, "lengths": [True] * 60},
            DataError,
            {"problem": "one integer a sample", "got": "torch.bool"},
        ),
        (
            {},
            {"batch_tokens": 99, "lengths": {}.__getitem__},
            DataError,
            {"problem": "lengths cannot be read", "got": "KeyError: 0"},
        ),
        (
            {},
            {"batch_tokens": 99, "lengths": ["a"] * 60},
            DataError,
            {"problem": "lengths cannot be read", "got": "ValueError"},
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(raw, options, error, fields):
    with assert_raises(error, **fields):
        accel.prepare_loader(accel.single(), DataLoader(DATA, **raw), **options)


def test_an_epoch_and_a_cursor_that_do_not_fit_are_refused():
    ctx = accel.single()
    empty = accel.prepare_loader(ctx, DataLoader(DATA, batch_sampler=[[1], [], [2]]))
    with assert_raises(DataError, problem="yields an empty batch"):
        next(accel.batches(ctx, empty, Cursor()))
    loader = accel.prepare_loader(ctx, DataLoader(DATA, batch_sampler=[[0, 1, 2], [3]]))
    with assert_raises(DataError, problem="not between two batches", expected="such as 0", got="1 consumed"):
        next(accel.batches(ctx, loader, Cursor(consumed=1)))
    with assert_raises(DataError, problem="beyond the end"):
        next(accel.batches(ctx, loader, Cursor(consumed=4)))
    dropped = accel.prepare_loader(ctx, DataLoader(DATA, batch_sampler=[[0]]), batches_per_step=2, tail="drop")
    with assert_raises(DataError, problem="beyond the end of the epoch"):
        next(accel.batches(ctx, dropped, Cursor()))
    by_tokens = accel.prepare_loader(ctx, DataLoader(DATA), batch_tokens=99, lengths=DATA)
    with assert_raises(DataError, problem="differs from epoch to epoch", fix=r"loader.steps\(state.cursor\)"):
        len(by_tokens)
    assert by_tokens.samples == 60
    assert BatchPlan(2).tail == "ragged"
