# SPDX-License-Identifier: Apache-2.0
"""A map-style dataset with `set_epoch` reads each epoch as its own; a batch sampler's `drop_last` ends the epoch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

import accel
from accel import Cursor


class Epochs(Dataset[int]):
    """Positions, and 100 times the epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 99

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return 100 * self.epoch + index


@pytest.mark.parametrize("workers", [0, 1, "persistent"])
@pytest.mark.parametrize("subset", [False, True])
def test_each_epoch_is_read_as_its_own_on_every_rank(ranks, workers, subset):
    def rank(ctx):
        kept = Epochs(6)
        dataset = Subset(kept, range(6)) if subset else kept
        raw = DataLoader(
            dataset, batch_size=1, num_workers=int(workers != 0), persistent_workers=workers == "persistent"
        )
        loader = accel.prepare_loader(ctx, raw)
        read = [
            [batch.data.tolist() for batch in accel.batches(ctx, loader, Cursor(epoch=epoch))] for epoch in (0, 1, 5, 0)
        ]
        loader.close()
        assert kept.epoch == 99  # the user's own stays as it is
        return read

    for at, read in enumerate(ranks.run(rank, 2)):
        assert read == [[[100 * epoch + position] for position in range(at, 6, 2)] for epoch in (0, 1, 5, 0)]


def test_a_pass_in_the_middle_of_another_leaves_its_epoch_alone():
    ctx = accel.single("cpu")
    loader = accel.prepare_loader(ctx, DataLoader(Epochs(3), batch_size=1))
    read = []
    for batch in accel.batches(ctx, loader, Cursor(epoch=2)):
        read.append(int(batch.data))
        assert [int(each.data) for each in accel.batches(ctx, loader, Cursor())] == [0, 1, 2]
    assert read == [200, 201, 202]


class Pairs:
    """A batch sampler of pairs."""

    def __init__(self, count: int, drop_last: bool) -> None:
        self.count, self.drop_last = count, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[2 * at, 2 * at + 1] for at in range(self.count)])

    def __len__(self) -> int:
        return self.count


@pytest.mark.parametrize(
    ("drop_last", "tail", "steps"), [(True, None, 1), (False, None, 2), (True, "ragged", 2), (False, "drop", 1)]
)
def test_a_batch_sampler_says_whether_a_last_step_is_dropped(ranks, drop_last, tail, steps):
    def rank(ctx):
        raw = DataLoader(torch.arange(6), batch_sampler=Pairs(3, drop_last))
        loader = accel.prepare_loader(ctx, raw, tail=tail)
        batches = list(accel.batches(ctx, loader, Cursor()))
        return len(batches), len(loader), [int(batch.valid) for batch in batches]

    for counted, length, valid in ranks.run(rank, 2):
        assert counted == length == steps
        assert valid[0] == 2
