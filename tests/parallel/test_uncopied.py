# SPDX-License-Identifier: Apache-2.0
"""Models that `copy.deepcopy` refuses train in stages and along tp as in one process."""

from __future__ import annotations

import copy
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
from accel.parallel._copies import copied_model
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
        self.blocks = nn.ModuleList(Drawing() if kind == "attributes" else Sized(WIDTH) for _ in range(4))

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


class Queue:
    """Rows of former batches, and a lock, which cannot be copied."""

    def __init__(self) -> None:
        self.rows, self.lock = [torch.zeros(1)], Lock()


def test_what_a_forward_changes_is_copied_next_to_what_cannot_be() -> None:
    """A trial would leave its rows in the model's queue."""
    model: Any = Drawing()
    model.queue = Queue()
    model.last = model(torch.ones(1, WIDTH)).sum()

    found: Any = copied_model(model, {})

    assert found.draws is model.draws
    assert found.queue.lock is model.queue.lock
    assert found.queue.rows is not model.queue.rows
    assert found.last.grad_fn is None
