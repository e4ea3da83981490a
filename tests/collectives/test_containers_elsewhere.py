# SPDX-License-Identifier: Apache-2.0
"""Containers that a context knows, in what is read, computed and measured with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from catching import assert_raises
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import accel
from accel import Cursor
from accel.errors import TreeError
from accel.tree import Container


class Encoding(Mapping[str, torch.Tensor]):
    """A mapping that no dict gives back: its values are keywords."""

    def __init__(self, **values: torch.Tensor) -> None:
        self.values_ = values

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.values_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


KNOWN = [Container(Encoding, dict, lambda old, children: type(old)(**children))]


def _collate(rows: list[int]) -> Encoding:
    return Encoding(ids=torch.tensor(rows))


def test_batches_hold_them_and_their_metrics_are_gathered(ranks):
    def rank(ctx, containers):
        ctx = accel.replace(ctx, containers=containers)
        loader = accel.prepare_loader(ctx, DataLoader(list(range(5)), batch_size=2, collate_fn=_collate))
        found = [accel.gather_for_metrics(ctx, batch.data, batch) for batch in accel.batches(ctx, loader, Cursor())]
        assert {type(each) for each in found} == {Encoding}
        return sorted(torch.cat([each["ids"] for each in found]).tolist())

    assert ranks.run(lambda ctx: rank(ctx, KNOWN), 2) == [list(range(5))] * 2
    with assert_raises(TreeError, got="Encoding"):
        rank(accel.single(), [])


class Rows(IterableDataset):
    """Gives samples, or batches of its own."""

    def __init__(self, whole: bool) -> None:
        self.whole = whole

    def __iter__(self):
        yield from [_collate([0, 1]), _collate([2])] if self.whole else range(3)


@pytest.mark.parametrize("whole", [False, True])
def test_batches_of_streams_hold_them(ranks, whole):
    def rank(ctx, containers):
        ctx = accel.replace(ctx, containers=containers)
        form = {"batch_size": None} if whole else {"batch_size": 2, "collate_fn": _collate}
        loader = accel.prepare_loader(ctx, DataLoader(Rows(whole), **form), stream="own")
        return [(batch.data["ids"].tolist(), int(batch.valid)) for batch in accel.batches(ctx, loader, Cursor())]

    assert ranks.run(lambda ctx: rank(ctx, KNOWN), 2) == [[([0, 1], 2), ([2], 1)]] * 2
    if whole:
        return  # torch's loader has made a dict of what it could not call with one
    with assert_raises(TreeError, got="Encoding"):
        rank(accel.single(), [])


def test_they_move_to_a_device():
    moved = accel.tree.send_to_device([Encoding(x=torch.ones(2))], "meta", containers=KNOWN)
    assert type(moved[0]) is Encoding
    assert moved[0]["x"].device.type == "meta"
    with assert_raises(TreeError, got="Encoding", where=r"\$\[0\]"):
        accel.tree.send_to_device([Encoding(x=torch.ones(2))], "meta")


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Encoding) -> Encoding:
        return Encoding(logits=self.inner(x["x"]).to(torch.bfloat16))


def test_outputs_and_inputs_of_converted_modules():
    ctx = accel.replace(accel.single(), precision=accel.precision.Precision(outputs="fp32"), containers=KNOWN)
    model = accel.precision.apply_precision(ctx, Answering())
    assert model(Encoding(x=torch.ones(1, 2)))["logits"].dtype == torch.float32
    outer = nn.Sequential(Answering())
    accel.precision.apply_precision(
        accel.replace(ctx, precision=accel.precision.Precision(compute="bf16", fp32_modules=("0",))), outer
    )
    assert type(outer(Encoding(x=torch.ones(1, 2, dtype=torch.bfloat16)))) is Encoding
