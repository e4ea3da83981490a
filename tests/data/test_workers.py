# SPDX-License-Identifier: Apache-2.0
"""Workers: samples augmented alike whoever reads them, processes that persist and end, errors that say what failed."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import subprocess
import sys
import textwrap
from collections import deque

import numpy
import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from processes import patience
from profiles import share
from torch.utils.data import DataLoader, Dataset, Subset

import accel
from accel import Cursor
from accel.errors import DataError


class Augmented(Dataset):
    """Samples with what every global stream gives, and the process that read them."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[int, float, float, float, int]:
        return index, random.random(), numpy.random.rand(), torch.rand(()).item(), os.getpid()


class Fetching(Augmented):
    def __getitems__(self, indices: list[int]) -> list[tuple]:
        return [Augmented.__getitem__(self, index) for index in indices]


def _loader(dataset, workers, place=(0, 1), **options) -> accel.Loader:
    persistent = options.pop("persistent_workers", False)
    raw = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers, persistent_workers=persistent)
    return accel.prepare_loader(accel.single(), raw, data_parallel=place, **options)


def _read(loader, cursor=None) -> list[tuple[int, float, float, float]]:
    """The real samples in order, without who read them."""
    ctx = accel.single()
    columns = [
        [column[: batch.valid].tolist() for column in batch.data[:4]]
        for batch in accel.batches(ctx, loader, cursor or Cursor(seed=5))
    ]
    return [sample for batch in columns for sample in zip(*batch, strict=True)]


def test_augmentation_depends_on_neither_workers_nor_ranks_nor_where_the_run_was_resumed():
    whole = _read(_loader(Augmented(), 2))
    torch.manual_seed(7)  # the caller's streams have no part in it
    assert _read(_loader(Augmented(), 1)) == whole
    assert _read(_loader(Augmented(), 0, seed_samples=True)) == whole
    split = [sample for rank in range(2) for sample in _read(_loader(Augmented(), 1, (rank, 2), global_batch=4))]
    assert sorted(split) == sorted(whole)
    assert _read(_loader(Augmented(), 2), Cursor(seed=5, consumed=8)) == whole[8:]
    assert len({value for sample in whole for value in sample[1:]}) == 3 * 23
    assert not {sample[1] for sample in whole} & {sample[1] for sample in _read(_loader(Augmented(), 1), Cursor(5, 1))}


@settings(deadline=None, max_examples=share(0.08))
@given(
    n=st.integers(1, 40),
    worlds=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    size=st.integers(1, 12),
    tail=st.sampled_from(["ragged", "pad", "drop"]),
    workers=st.tuples(st.sampled_from([0, 2]), st.sampled_from([0, 2])),
    k=st.integers(0, 40),
)
def test_a_run_of_two_epochs_resumes_with_other_workers_on_other_ranks(n, worlds, size, tail, workers, k):
    size = min(size, n) if tail == "drop" else size

    def steps(world, workers, cursor, stop) -> tuple[list[list[int]], Cursor]:
        raw = DataLoader(range(n), shuffle=True, num_workers=workers)
        options = {"global_batch": size, "tail": tail}
        places = [(rank, world) for rank in range(world)]
        loaders = [accel.prepare_loader(accel.single(), raw, data_parallel=place, **options) for place in places]
        done = []
        while cursor.epoch < 2:
            for batches in zip(*(accel.batches(accel.single(), each, cursor) for each in loaders), strict=True):
                if len(done) == stop:
                    return done, cursor
                done.append([sample for batch in batches for sample in batch.data[: batch.valid].tolist()])
                (cursor,) = {batch.next for batch in batches}
        return done, cursor

    whole, _ = steps(worlds[0], workers[0], Cursor(seed=1), -1)
    k %= len(whole)
    first, cursor = steps(worlds[0], workers[0], Cursor(seed=1), k)
    rest, _ = steps(worlds[1], workers[1], cursor, -1)
    assert first + rest == whole
    half = len(whole) // 2
    epochs = [[sample for step in part for sample in step] for part in (whole[:half], whole[half:])]
    used = n - n % size if tail == "drop" else n
    assert all(len(set(epoch)) == len(epoch) == used for epoch in epochs)
    assert n < 20 or tail == "drop" or epochs[0] != epochs[1]


def test_a_dataset_that_reads_whole_batches_is_seeded_once_for_each():
    assert _read(_loader(Subset(Fetching(), range(23)), 1)) == _read(_loader(Fetching(), 2))
    assert _read(_loader(Subset(Augmented(), range(23)), 1)) == _read(_loader(Augmented(), 2))
    assert len({value for sample in _read(_loader(Fetching(), 1)) for value in sample[1:]}) == 3 * 23


def test_without_workers_the_callers_streams_are_drawn_from_unless_samples_have_their_own():
    streams = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    _read(_loader(Augmented(), 0, seed_samples=True))
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == streams[1:]
    torch.manual_seed(1)
    first = _read(_loader(Augmented(), 0))
    torch.manual_seed(1)
    again = _read(_loader(Augmented(), 0))
    assert [sample[3] for sample in first] == [sample[3] for sample in again]


def test_workers_that_seed_no_samples_repeat_on_the_same_number_of_workers():
    def read():
        return _read(_loader(Augmented(), 2, seed_samples=False))

    assert read() == read() != _read(_loader(Augmented(), 2))


def _pids(loader, cursor, stop=-1) -> set[int]:
    seen = set()
    for step, batch in enumerate(accel.batches(accel.single(), loader, cursor)):
        seen |= set(batch.data[4].tolist())
        if step == stop:
            break
    return seen


def _children() -> set[int]:
    gc.collect()
    return {child.pid for child in multiprocessing.active_children()}


def test_persistent_workers_live_as_long_as_their_loader_and_resume_exactly():
    whole, before = _read(_loader(Augmented(), 2)), _children()
    loader = _loader(Augmented(), 2, persistent_workers=True)
    first = _pids(loader, Cursor(seed=5), stop=1)  # left in the middle, with batches on their way
    assert _pids(loader, Cursor(epoch=1)) == first == _children() - before
    assert _read(loader) == whole
    assert _read(loader, Cursor(seed=5, consumed=8)) == whole[8:]
    loader.close()
    assert _children() == before
    again = _pids(loader, Cursor())
    assert again.isdisjoint(first)
    del loader
    assert _children() == before


def test_persistent_workers_serve_one_epoch_at_a_time_and_others_get_their_own():
    loader = _loader(Augmented(), 1, persistent_workers=True)
    ctx, whole = accel.single(), _read(loader)
    outer = []
    for batch in accel.batches(ctx, loader, Cursor(seed=5)):
        outer += batch.data[0].tolist()
        assert _read(loader) == whole
    assert outer == [sample[0] for sample in whole]
    zipped = zip(accel.batches(ctx, loader, Cursor(5)), accel.batches(ctx, loader, Cursor(5)), strict=True)
    assert all(torch.equal(one.data[0], other.data[0]) for one, other in zipped)
    loader.close()


def test_a_process_that_ends_leaves_no_persistent_worker_behind(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, accel
        from torch.utils.data import DataLoader, Dataset

        class Pids(Dataset):
            def __len__(self): return 8
            def __getitem__(self, index): return os.getpid()

        ctx = accel.single()
        raw = DataLoader(Pids(), num_workers=2, persistent_workers=True)
        loader = accel.prepare_loader(ctx, raw)
        print(*{int(b.data) for b in accel.batches(ctx, loader, accel.Cursor())})
        batches = accel.batches(ctx, loader, accel.Cursor())
        next(batches)
        """)
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=patience(60), check=True)
    assert done.stderr == ""
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


class Faulty(Dataset):
    """Fails at one sample."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise {"key": KeyError("lost"), "stop": StopIteration()}[self.how]
        return index


@pytest.mark.parametrize(
    ("how", "workers", "got", "where"),
    [
        ("key", 0, "^KeyError: 'lost'", "rank 0, epoch 2, positions 4 to 5"),
        ("key", 1, "^KeyError", "worker process 0.*positions 4 to 5"),
        ("stop", 0, "^StopIteration", "positions 4 to 5"),
    ],
)
@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_fails_while_reading_is_a_data_error_that_says_where(how, workers, got, where, persistent):
    ctx = accel.single()
    raw = DataLoader(Faulty(how), batch_size=2, num_workers=workers, persistent_workers=persistent and workers > 0)
    loader = accel.prepare_loader(ctx, raw)
    seen, before = [], _children()
    with assert_raises(DataError, problem="could not be read", got=got, where=where) as caught:
        seen.extend(batch.data.tolist() for batch in accel.batches(ctx, loader, Cursor(epoch=2)))
    assert seen == [[0, 1], [2, 3]]
    assert persistent or {child.pid for child in multiprocessing.active_children()} <= before
    assert how == "stop" or caught.value.__cause__ is not None
    rest = next(accel.batches(ctx, loader, Cursor(epoch=2, consumed=6)))  # the loader can still be used
    assert rest.data.tolist() == [6, 7]
    loader.close()


def test_a_container_that_cannot_be_taken_apart_is_refused_at_the_first_batch():
    ctx = accel.single()
    raw = DataLoader(range(4), collate_fn=lambda samples: {"inputs": deque([torch.tensor(samples)])})
    with assert_raises(accel.errors.TreeError, got="deque", where=r"\$\.inputs"):
        next(accel.batches(ctx, accel.prepare_loader(ctx, raw), Cursor()))


def test_a_dataset_that_grows_is_refused_on_every_rank(ranks):
    def rank(ctx):
        data = list(range(8))
        loader = accel.prepare_loader(ctx, DataLoader(data, batch_size=2))
        assert sum(batch.valid for batch in accel.batches(ctx, loader, Cursor())) == 4
        if ctx.rank == 1:
            data.append(8)
        with assert_raises(
            DataError, problem="rank 1: the length of the dataset has changed", expected="8 samples", got="9"
        ):
            next(accel.batches(ctx, loader, Cursor(epoch=1)))
        return True

    assert ranks.run(rank, 2) == [True, True]
