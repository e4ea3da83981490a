# SPDX-License-Identifier: Apache-2.0
"""Datasets of every kind are read as they are: lists, arrays, memory-mapped files, tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, TensorDataset

import accel
from accel import Cursor


def _memory_mapped(folder: Path) -> Any:
    path = folder / "tokens.bin"
    numpy.arange(23, dtype=numpy.int64).tofile(path)
    return numpy.memmap(path, dtype=numpy.int64, mode="r")


def _table(folder: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"id": list(range(23))}).with_format("torch")


KINDS = {
    "list": lambda _: list(range(23)),
    "array": lambda _: numpy.arange(23),
    "memory-mapped": _memory_mapped,
    "tensor": lambda _: torch.arange(23),
    "tensors": lambda _: TensorDataset(torch.arange(23)),
    "joined": lambda _: ConcatDataset([list(range(9)), list(range(9, 23))]),
    "stacked": lambda _: StackDataset(id=range(23)),
    "table": _table,
}


def _ids(data: Any) -> list[int]:
    data = data["id"] if isinstance(data, dict) else data[0] if isinstance(data, list) else data
    return data.tolist()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", KINDS)
def test_every_sample_once_and_the_rest_after_a_resume(tmp_path: Path, name: str, workers: int) -> None:
    ctx = accel.single()
    raw = DataLoader(KINDS[name](tmp_path), batch_size=4, shuffle=True, num_workers=workers)
    loader = accel.prepare_loader(ctx, raw)
    batches = list(accel.batches(ctx, loader, Cursor()))
    steps = [_ids(batch.data) for batch in batches]
    assert sorted(each for step in steps for each in step) == list(range(23))
    assert [_ids(batch.data) for batch in accel.batches(ctx, loader, batches[2].next)] == steps[3:]
