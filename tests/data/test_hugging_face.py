# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's streams: divided by source, read once a node or by rank 0; resumed by their state or by replay."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from torch.utils.data import DataLoader

import accel
from accel import Cursor
from accel.errors import DataError

datasets = pytest.importorskip("datasets")


def _read(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        yield from ({"id": 10 * shard + row} for row in range(10))


def _stream(shards: int = 4):
    return datasets.IterableDataset.from_generator(_read, gen_kwargs={"shards": list(range(shards))})


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
        loader = accel.prepare_loader(ctx, raw, stream=mode, replay=shuffled)
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
        with pytest.raises(DataError, match=r"fewer source shards than ranks: expected at least 3, got num_shards=2"):
            accel.prepare_loader(ctx, DataLoader(_stream(2)), stream="shards")
        return True

    assert all(ranks.run(rank, 3))
