# SPDX-License-Identifier: Apache-2.0
"""Ranks that read the same stream as their own are warned of at its first batch."""

from __future__ import annotations

import logging

import pytest
import torch
from stream_helpers import Stream, make_loader
from torch.utils.data import IterableDataset

import accel
from accel import Cursor


class Texts(IterableDataset[dict[str, object]]):
    """Samples of a text and a number, from a position on."""

    def __init__(self, start: int) -> None:
        self.start = start

    def __iter__(self):
        return ({"text": f"number {at}", "number": torch.tensor(at)} for at in range(self.start, self.start + 6))


def _warnings(ranks, caplog, make, world_size=2, **options) -> list[str]:
    def rank(ctx):
        loader = make_loader(ctx, make(ctx), "own", 2, **options)
        first = next(iter(accel.batches(ctx, loader, Cursor()))).next
        for _ in accel.batches(ctx, loader, Cursor(epoch=1)):
            pass
        return first

    caplog.clear()
    with caplog.at_level(logging.WARNING, "accel.data"):
        ranks.run(rank, world_size)
    return [record.getMessage() for record in caplog.records if "same samples" in record.getMessage()]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_does_not_divide_itself_is_named_once_an_epoch(ranks, caplog, workers):
    said = _warnings(ranks, caplog, lambda ctx: Texts(0), num_workers=workers)
    assert len(said) == 2
    for each in said:
        assert each.startswith("ranks 0 and 1 begin")
        assert 'stream="shards"' in each


def test_one_pair_of_equal_ranks_is_enough(ranks, caplog):
    (first, _) = _warnings(ranks, caplog, lambda ctx: Texts(100 * min(ctx.rank, 2)), 4)
    assert first.startswith("ranks 2 and 3 begin")


def test_streams_that_are_divided_and_ranks_of_one_part_are_quiet(ranks, caplog):
    assert _warnings(ranks, caplog, lambda ctx: Texts(100 * ctx.rank)) == []
    assert _warnings(ranks, caplog, lambda ctx: Stream(12, ((2, ctx.rank),))) == []

    def of_one_part(ctx):
        stream = Texts(100 * (ctx.rank // 2))
        loader = make_loader(ctx, stream, "own", 2, data_parallel=(ctx.rank // 2, 2))
        return [int(batch.valid) for batch in accel.batches(ctx, loader, Cursor())]

    with caplog.at_level(logging.WARNING, "accel.data"):
        ranks.run(of_one_part, 4)
    assert "same samples" not in caplog.text


def test_an_empty_stream_beside_a_full_one_is_no_warning(ranks, caplog):
    class Empty(Texts):
        def __iter__(self):
            return iter(())

    assert _warnings(ranks, caplog, lambda ctx: Texts(0) if ctx.rank else Empty(0)) == []
