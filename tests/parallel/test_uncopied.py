# SPDX-License-Identifier: Apache-2.0
"""Models that `copy.deepcopy` refuses train in stages and along tp as in one process."""

from __future__ import annotations

import copy
from functools import partial
from threading import Lock
from typing import Any

import pytest
import torch
from handwritten import Handwritten
from handwritten._entry import cross_entropy, ids
from handwritten_runs import compare, piped, plain
from torch import Tensor, nn

import accel
from accel.parallel import Plan
from accel.testing import Simulator

WIDTH = 8


class Drawing(nn.Module):
    """Has a generator among its attributes, and one in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.draws, self.kept = (each for each in ()), [(each for each in ())]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Queue:
    """Rows of former batches, and a lock, which cannot be copied."""

    def __init__(self) -> None:
        self.rows, self.lock = [torch.zeros(1)], Lock()


class Queueing(Drawing):
    """Keeps the rows of its forwards in a queue, and the last of its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.last = Queue(), None

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.queue.rows.append(x.detach())
        self.last = x.sum()
        return x


class Sized(nn.Module):
    """Chooses its class by an argument, as a copy does not pass it."""

    def __new__(cls, rank: int) -> Any:
        assert rank > 0
        return super().__new__(cls)

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * rank), nn.Linear(4 * rank, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Words(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        made = {"attributes": Drawing, "queues": Queueing, "classes": partial(Sized, WIDTH)}[kind]
        self.blocks = nn.ModuleList(made() for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _entry(kind: str) -> Handwritten:
    def make() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Words(kind).double()

    return Handwritten(kind, make, ids, cross_entropy)


@pytest.mark.parametrize("kind", ["attributes", "classes"])
def test_a_model_that_cannot_be_copied_trains_in_stages(ranks: Simulator, kind: str) -> None:
    entry = _entry(kind)
    with pytest.raises(TypeError):
        _ = copy.deepcopy(entry.make())
    found = ranks.run(lambda ctx: piped(ctx, entry, "pp=2", Plan(micro_batches=2), rows=4), 2, default_group=True)
    assert compare(found, plain(entry, 2, rows=4)) == []


@pytest.mark.parametrize("kind", ["attributes", "classes"])
def test_a_plan_is_found_for_a_model_that_cannot_be_copied(kind: str) -> None:
    model = _entry(kind).make()
    styles = accel.parallel.tensor_plan(model, example=[torch.zeros(2, 5, dtype=torch.long)])
    assert styles["blocks.*.up"] == "colwise"
    assert styles["blocks.*.down"] == "rowwise"


def test_a_trial_leaves_no_rows_in_a_queue_with_a_lock() -> None:
    model, example = _entry("queues").make(), [torch.zeros(2, 5, dtype=torch.long)]
    _ = model(*example)
    assert "blocks.*.up" in accel.parallel.tensor_plan(model, example=example)
    assert [len(each.queue.rows) for each in model.modules() if isinstance(each, Queueing)] == [2] * 4
