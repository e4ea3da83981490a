# SPDX-License-Identifier: Apache-2.0
"""`split_between_processes` gives datasets as datasets, or refuses them, and its errors name the way through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from catching import assert_raises
from hypothesis import given, strategies as st
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

import accel
from accel.errors import ConfigError, TreeError


class Squares(Dataset[int]):
    """Squares of positions; a slice of it is no sample."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return range(self.size)[index] ** 2


class Stream(IterableDataset[int]):
    def __iter__(self):
        return iter(range(4))


def _table(size: int) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict(
        {"id": list(range(size)), "text": [f"row {at}" for at in range(size)]}
    )


KINDS = {
    "Hugging Face": (_table, "Dataset", lambda row: row["id"]),
    "tensors": (lambda size: TensorDataset(torch.arange(size)), "TensorDataset", lambda row: int(row[0])),
    "any": (Squares, "Subset", lambda row: round(row**0.5)),
    "subset": (lambda size: Subset(Squares(size + 1), range(size)), "Subset", lambda row: round(row**0.5)),
    "concatenated": (lambda size: ConcatDataset([Squares(size)]), "Subset", lambda row: round(row**0.5)),
}


@pytest.mark.parametrize("kind", KINDS)
@given(size=st.integers(1, 9), world=st.integers(1, 4), pad=st.booleans(), nested=st.booleans())
def test_parts_are_datasets_that_divide_the_samples(ranks, kind, size, world, pad, nested):
    make, name, read = KINDS[kind]

    def rank(ctx: accel.DistContext) -> list[int]:
        whole = make(size)
        if nested:
            part = accel.split_between_processes(ctx, {"data": whole, "at": list(range(size))}, pad=pad)["data"]
        else:
            part = accel.split_between_processes(ctx, whole, pad=pad)
        assert type(part).__name__ == name
        assert len(whole) == size
        return [read(part[at]) for at in range(len(part))]

    parts = ranks.run(rank, world)
    if pad:
        assert {len(part) for part in parts} == {-(-size // world)}
        assert sorted({each for part in parts for each in part}) == list(range(size))
    else:
        assert [each for part in parts for each in part] == list(range(size))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


class Columns:
    """A table whose slice is a dict of columns."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, rows: slice) -> dict[str, list[int]]:
        return {"a": list(range(4))[rows]}


@pytest.mark.parametrize(
    ("inputs", "kind", "way"),
    [
        (Columns(), ConfigError, "Split range"),
        (Stream(), ConfigError, "accel.prepare_loader"),
        ("a text", ConfigError, "a list of texts"),
        (7, ConfigError, "Pass a list"),
        ({1, 2}, TreeError, r"list\(\.\.\.\) of it"),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_way_through(ranks, inputs, kind, way):
    def rank(ctx: accel.DistContext) -> str:
        with assert_raises(kind, fix=way) as caught:
            accel.split_between_processes(ctx, inputs)
        return str(caught.value)

    first, second = ranks.run(rank, 2)
    assert first == second
