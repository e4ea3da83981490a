# SPDX-License-Identifier: Apache-2.0
"""Datasets whose samples are there already: no sample needs random streams, and collate functions get the same ones."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import accel
from accel.data import _requests
from accel.topology import without_mesh


class Held(Dataset[Any]):
    """Another dataset, of which nobody can know that it draws nothing."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Drawing(list[int]):
    """A list that adds noise."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) + random.random()


class Own(torch.Tensor):
    """A tensor of a kind of its own."""


def noisy(samples: list[Any]) -> list[float]:
    rows = [float(sample[0] if isinstance(sample, tuple) else sample) for sample in samples]
    return [*rows, random.random(), torch.rand(()).item(), np.random.rand()]


def seeded_positions(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where streams are seeded while rank 1 of 2 reads two batches of three and two rows, of which one is padding."""
    seeded: list[int] = []
    monkeypatch.setattr(_requests, "seed_streams", lambda _base, position: seeded.append(position))
    ctx = dataclasses.replace(accel.single(), rank=1, world_size=2, position=without_mesh(1, 2))
    loader = accel.prepare_loader(ctx, DataLoader(dataset, batch_size=3), seed_samples=True, tail="pad")
    assert [batch.valid for batch in accel.batches(ctx, loader, accel.Cursor())] == [3, 2]
    return seeded


STORED = [
    [*range(11)],
    (*range(11),),
    range(11),
    torch.arange(11),
    np.arange(11),
    TensorDataset(torch.arange(11)),
    Subset(Subset(TensorDataset(torch.arange(30)), range(5, 25)), range(11)),
]
DRAWING = [Drawing(range(11)), Held([*range(11)]), TensorDataset(torch.arange(11).as_subclass(Own))]


@pytest.mark.parametrize("dataset", STORED, ids=lambda dataset: type(dataset).__name__)
def test_streams_are_seeded_once_a_batch(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seeded_positions(dataset, monkeypatch) == [5, 10]


@pytest.mark.parametrize("dataset", DRAWING, ids=lambda dataset: type(dataset).__name__)
def test_a_dataset_of_a_kind_of_its_own_may_draw(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (dataset, Subset(dataset, range(11))):
        assert seeded_positions(each, monkeypatch) == [3, 4, 5, 9, 10, 10]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_collate_function_in_a_worker_draws_as_after_a_dataset_that_draws(rank: int) -> None:
    ctx = dataclasses.replace(accel.single(), rank=rank, world_size=2)

    def read(dataset: Any) -> list[list[float]]:
        raw = DataLoader(dataset, batch_size=3, shuffle=True, num_workers=1, collate_fn=noisy)
        loader = accel.prepare_loader(ctx, raw, tail="pad")
        return [batch.data for batch in accel.batches(ctx, loader, accel.Cursor(seed=2))]

    assert read(range(11)) == read(Held(range(11)))
