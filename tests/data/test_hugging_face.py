# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's streams: divided by source, read once a node or by rank 0; resumed by their state or by replay."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from torch.utils.data import DataLoader, IterableDataset

import accel
from accel import Cursor
from accel.errors import DataError


def datasets() -> Any:
    """Import the package here, so that workers that run no test of this file do not."""
    return pytest.importorskip("datasets")


def _read(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        yield from ({"id": 10 * shard + row} for row in range(10))


def _stream(shards: int = 4):
    return datasets().IterableDataset.from_generator(_read, gen_kwargs={"shards": list(range(shards))})


def _steps(ctx, loader, cursor) -> list[tuple[list[int], Cursor]]:
    found = accel.batches(ctx, loader, cursor)
    return [(accel.gather_for_metrics(ctx, batch.data["id"], batch).tolist(), batch.next) for batch in found]


MODES = ["shards", "elements", "dispatch"]
CASES = [
    pytest.param(mode, workers, shuffled, marks=[pytest.mark.slow] * (workers > 0))
    for mode, workers, shuffled in itertools.product(MODES, [0, 2], [False, True])
]


@pytest.mark.parametrize(("mode", "workers", "shuffled"), CASES)
def test_every_sample_once_and_the_rest_after_a_resume(ranks, mode, workers, shuffled):
    def rank(ctx):
        stream = _stream().shuffle(seed=1, buffer_size=5) if shuffled else _stream()
        raw = DataLoader(stream, batch_size=3, num_workers=workers)
        loader = accel.prepare_loader(ctx, raw, stream=mode)
        whole = [ids for ids, _ in _steps(ctx, loader, Cursor())]
        second = _steps(ctx, loader, Cursor(epoch=1))
        for epoch in (whole, [ids for ids, _ in second]):
            assert sorted(each for ids in epoch for each in ids) == list(range(40))
        assert ([ids for ids, _ in second] != whole) == shuffled  # its `set_epoch` was called
        for k, (_, after) in enumerate(second[:-1]):
            assert _steps(ctx, loader, after) == second[k + 1 :]
        return True

    assert all(ranks.run(rank, 2))


def test_fewer_sources_than_ranks_are_refused(ranks):
    def rank(ctx):
        with assert_raises(
            DataError, problem="there are fewer source shards than ranks", expected="at least 3", got="num_shards=2"
        ):
            accel.prepare_loader(ctx, DataLoader(_stream(2)), stream="shards")
        return True

    assert all(ranks.run(rank, 3))


def _table(start: int, stop: int):
    return datasets().Dataset.from_dict({"id": list(range(start, stop))}).to_iterable_dataset(num_shards=3)


def _same_rows(rows):
    return {"id": rows["id"]}


def _shuffled(**options):
    return _table(0, 24).shuffle(seed=3, buffer_size=6, **options)


ALL = "all_exhausted_without_replacement"
FORGETFUL = {
    "shuffled": _shuffled,
    "torch": lambda: _shuffled().with_format("torch"),
    "mapped": lambda: _shuffled().map(_same_rows),
    "mapped in batches": lambda: _shuffled().map(_same_rows, batched=True, batch_size=5),
    "filtered": lambda: _shuffled().filter(lambda row: row["id"] % 3 > 0),
    "batched": lambda: _shuffled().batch(2).map(lambda rows: {"id": rows["id"][0]}),
    "first": lambda: _shuffled().take(20),
    "interleaved": lambda: datasets().interleave_datasets([_shuffled(), _table(24, 30)], stopping_strategy=ALL),
    "drawn": lambda: datasets().interleave_datasets([_shuffled(), _table(24, 40)], probabilities=[0.5, 0.5], seed=1),
    "chained": lambda: datasets().concatenate_datasets([_table(24, 30), _shuffled()]),
    "twice": lambda: datasets().concatenate_datasets([_shuffled(), _table(24, 30)]).shuffle(seed=1, buffer_size=4),
    "in a stream": lambda: Around(_shuffled()),
    "in streams": lambda: Around([Around(_table(24, 30)), Around(_shuffled())]),
}
COMPLETE = {
    "plain": lambda: _table(0, 24),
    "mapped": lambda: _table(0, 24).map(_same_rows, batched=True, batch_size=5),
    "arrow": lambda: _table(0, 24).with_format("arrow").map(lambda table: table, batched=True).with_format("numpy"),
    "filtered": lambda: _table(0, 24).filter(lambda row: row["id"] % 3 > 0),
    "chained": lambda: datasets().concatenate_datasets([_table(0, 9), _table(9, 24)]),
    "interleaved": lambda: datasets().interleave_datasets([_table(0, 9), _table(9, 24)], stopping_strategy=ALL),
    "order of sources": lambda: _table(0, 24).shuffle(seed=3, buffer_size=1),
    "in a stream": lambda: Around(_table(0, 24)),
}


class Around(IterableDataset):
    """A stream of a user, around one or several; its state is theirs."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def _each(self) -> list:
        return self.inner if isinstance(self.inner, list) else [self.inner]

    def __iter__(self):
        return itertools.chain.from_iterable(self._each())

    def state_dict(self):
        return {"inner": [each.state_dict() for each in self._each()]}

    def load_state_dict(self, state) -> None:
        for each, inner in zip(self._each(), state["inner"], strict=True):
            each.load_state_dict(inner)


def _ids(make, cursor, workers=0, **options) -> list[tuple[list[int], Cursor]]:
    ctx = accel.single()
    raw = DataLoader(make(), batch_size=2, num_workers=workers)
    loader = accel.prepare_loader(ctx, raw, stream="dispatch", **options)
    found = accel.batches(ctx, loader, cursor)
    return [(torch.as_tensor(batch.data["id"]).flatten().tolist(), batch.next) for batch in found]


@pytest.mark.parametrize("name", ["mapped in batches", "interleaved", "in streams"])
def test_a_shuffle_buffer_anywhere_is_replayed(name):
    assert_kills(FORGETFUL[name], 0, [3, 2], replay=True)


def test_sources_in_another_order_are_not_replayed():
    assert_kills(COMPLETE["order of sources"], 1, [3], replay=False)


@pytest.mark.slow
@settings(deadline=None, max_examples=share(0.8))
@given(name=st.sampled_from(sorted(FORGETFUL)), epoch=st.integers(0, 1), kills=st.lists(st.integers(1, 4), max_size=3))
def test_a_stream_with_a_shuffle_buffer_gives_every_sample_once_over_kills(name, epoch, kills):
    assert_kills(FORGETFUL[name], epoch, kills, replay=True)


@pytest.mark.slow
@settings(deadline=None, max_examples=share(0.4))
@given(name=st.sampled_from(sorted(COMPLETE)), epoch=st.integers(0, 1), kills=st.lists(st.integers(1, 4), max_size=3))
def test_a_stream_with_a_complete_state_is_not_replayed(name, epoch, kills):
    assert_kills(COMPLETE[name], epoch, kills, replay=False)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["shuffled", "mapped in batches", "interleaved", "in a stream"])
def test_workers_replay_their_parts(kind, workers):
    assert_kills(FORGETFUL[kind], 0, [3, 2], replay=True, workers=workers)


def assert_kills(make, epoch, kills, *, replay, workers=0):
    assert accel.prepare_loader(accel.single(), DataLoader(make()), stream="dispatch").replay is replay
    cursor = Cursor(epoch=epoch)
    whole = [ids for ids, _ in _ids(make, cursor, workers)]
    read = []
    for kill in kills:
        steps = _ids(make, cursor, workers)[:kill]
        if cursor.epoch != epoch or not steps or steps[-1][1].epoch != epoch:
            break
        read += [ids for ids, _ in steps]
        cursor = steps[-1][1]
    read += [ids for ids, _ in _ids(make, cursor, workers)]
    assert read == whole


def test_samples_that_are_replayed_or_lost_are_counted(caplog):
    kept = _ids(_shuffled, Cursor(), replay=False)
    assert not caplog.records
    lost = _ids(_shuffled, kept[4][1], replay=False)
    (text,) = [record.getMessage() for record in caplog.records if record.name == "accel.data"]
    assert "up to 6 samples of IterableDataset are lost" in text
    assert "replay=True" in text
    missing = 24 - len({each for ids, _ in kept[:5] + lost for each in ids})
    assert 0 < missing <= 6
    caplog.clear()
    assert _ids(_shuffled, kept[4][1]) == [(ids, after) for ids, after in _ids(_shuffled, Cursor())[5:]]
    text = caplog.records[0].getMessage()
    assert "10 elements are skipped, because its state leaves out the samples in shuffle buffers" in text


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_state_that_does_not_fit_leads_to_replay(workers):
    class Broken(Around):
        def load_state_dict(self, state) -> None:
            raise IndexError("list index out of range")

    class Later(Broken):
        def load_state_dict(self, state) -> None:
            self.inner = self

        def _each(self) -> list:
            return [1 / 0] if self.inner is self else super()._each()

    for kind, cause in ((Broken, "IndexError"), (Later, "ZeroDivisionError")):
        make = lambda kind=kind: kind(_table(0, 24))  # noqa: E731
        steps = _ids(make, Cursor(), workers)
        with assert_raises(
            DataError, problem=f"could not continue from its state: {cause}", fix=r"pass replay=True\.$"
        ):
            _ids(make, steps[2][1], workers)
        if not workers:  # which would read their stream twice
            assert [ids for ids, _ in _ids(make, steps[2][1], replay=True)] == [ids for ids, _ in steps[3:]]


@pytest.mark.parametrize(
    ("make", "unseeded"),
    [
        (lambda: _table(0, 9).shuffle(buffer_size=3), True),
        (lambda: Around(_table(0, 9).shuffle(buffer_size=3).map(_same_rows)), True),
        (lambda: datasets().interleave_datasets([_table(0, 9), _table(9, 18)], probabilities=[0.5, 0.5]), True),
        (lambda: _table(0, 9).shuffle(seed=2**63, buffer_size=3), False),
        (
            lambda: datasets().interleave_datasets([_table(0, 9), _table(9, 18)], probabilities=[0.5, 0.5], seed=0),
            False,
        ),
        (lambda: _table(0, 9), False),
    ],
)
def test_an_order_without_a_seed_is_logged(caplog, make, unseeded):
    with caplog.at_level(logging.WARNING):
        accel.prepare_loader(accel.single(), DataLoader(make()), stream="dispatch")
    assert any("without a seed" in record.getMessage() for record in caplog.records) is unseeded
