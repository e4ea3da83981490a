# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages whose layers ranks along tp share train as one process does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from pipelines import batch_of, by_hand, differences, train
from tensor_models import NORM_AND_MLP, made, plans, shares_tokens
from torch import nn

import accel
from accel.parallel.axes.tensor import _overlap
from accel.tensors import is_dtensor, split_dims

ENDS: Any = {"embedding": "embedding_rowwise", "head": "colwise_gather_output"}
MESHES = [
    ("pp=2,tp=2", "ddp", "copies", "1F1B", 1),
    ("pp=2,tp=2", "ddp", "sequence", "1F1B", 1),
    ("pp=2,dp=2,tp=2", "fsdp", "copies", "1F1B", 1),
]


def _make() -> torch.nn.Module:
    return made(heads_of_keys=2, tied=True)


def _even(step: int, rows: int) -> list[torch.Tensor]:
    """Batches of a number of tokens that two ranks can share."""
    return [each[:, :4] for each in batch_of(step, rows)]


@pytest.mark.parametrize(
    ("mesh", "strategy", "name", "schedule", "per"),
    [pytest.param(*each, marks=pytest.mark.slow if at else ()) for at, each in enumerate(MESHES)],
)
def test_stages_share_their_layers(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, mesh: str, strategy: Any, name: str, schedule: Any, per: int
) -> None:
    assert_trains_as_one_process(ranks, monkeypatch, mesh, strategy, name, schedule, per, overlap=False)


def assert_trains_as_one_process(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, mesh: str, strategy: Any, name: str, schedule: Any, per: int,
    *, overlap: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr("pipelines.batch_of", _even)
    tensor = plans(fused=False)[name] | ENDS
    sequence = shares_tokens(name)
    plan = accel.parallel.Plan(
        tensor=tensor, sequence=sequence, schedule=schedule, stages_per_rank=per, micro_batches=4, overlap=overlap
    )

    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, strategy=strategy)
        found = train(ctx, _make, plan, mesh=mesh, accumulation=2)
        # What looks at the first forward of a stage, which ends where the next stage begins, does not look any more.
        assert torch._C._len_torch_function_stack() == 0
        return found

    found = ranks.run(rank, 8 if "dp" in mesh else 4, default_group=True)
    expected = by_hand(_make, accumulation=2)
    if "dp" in mesh:
        expected = expected._replace(figures=expected.figures[2::3])
    parameters, figures = differences(found, expected)
    assert parameters < 1e-10
    assert figures < 1e-10


BESIDE = [
    ("pp=2,tp=2", "ddp", "sequence", "1F1B", 1),
    ("pp=2,tp=2", "ddp", "copies", "GPipe", 1),
    ("pp=2,dp=2,tp=2", "fsdp", "sequence", "1F1B", 1),
]


@pytest.mark.parametrize(
    ("mesh", "strategy", "name", "schedule", "per"),
    [pytest.param(*each, marks=pytest.mark.slow if at else ()) for at, each in enumerate(BESIDE)],
)
def test_stages_send_beside_their_products(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, mesh: str, strategy: Any, name: str, schedule: Any, per: int
) -> None:
    monkeypatch.setattr(_overlap, "_LEAST_ROWS", 1)
    chunks, counts = _overlap._chunks, list[int]()

    def counted(length: int, rows: int) -> Any:
        found = chunks(length, rows)
        counts.append(len(found))
        return found

    monkeypatch.setattr(_overlap, "_chunks", counted)
    assert_trains_as_one_process(ranks, monkeypatch, mesh, strategy, name, schedule, per, overlap=True)
    assert max(counts) > 1


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)) * table)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), Placed()

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x), table)


class Positions(nn.Module):
    """Makes a table of positions from the shape of its hidden states, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(11, 8)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11)
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        table = torch.arange(1, 1 + x.shape[1], dtype=x.dtype, device=x.device)[:, None] / 4
        for block in self.blocks:
            x = block(x, table)
        return self.head(self.norm(x))


class Flat(nn.Module):
    """No blocks: the layers between which ranks divide hidden features are in two stages, as are its tokens."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(11, 8)
            self.up, self.middle, self.down = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 8)
            self.first, self.last = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 1, 8))
            self.head = nn.Linear(8, 11)
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.first.expand(len(ids), -1, -1)
        up = torch.relu(self.up(x))
        x = self.down(up * torch.sigmoid(self.middle(up))) + self.last.repeat(len(ids), 1, 1)
        return self.head(x)


def test_a_plan_is_found_for_layers_of_several_stages(ranks: Any) -> None:
    plan = accel.parallel.Plan(stages=(("embedding",), ("middle",)), micro_batches=2)
    example = torch.zeros(2, 5, dtype=torch.long)

    def rank(ctx: accel.DistContext) -> Any:
        found = train(ctx, Flat, plan, mesh="pp=2,tp=2", example=example)
        model = accel.prepare_model(accel.replace(ctx, mesh="pp=2,tp=2"), Flat(), plan=plan, example=example)
        return found, {name for name, each in model.named_parameters() if is_dtensor(each) and 0 in split_dims(each)}

    found = ranks.run(rank, 4, default_group=True)
    assert max(differences([each for each, _ in found], by_hand(Flat))) < 1e-10
    shards = set[str]().union(*(each for _, each in found))
    assert shards >= {"up.weight", "middle.weight", "down.weight"}


@pytest.mark.slow
def test_a_table_of_shared_tokens_is_that_of_the_whole_sequence(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.batch_of", _even)
    plan = accel.parallel.Plan(tensor=NORM_AND_MLP, sequence=True, micro_batches=2)
    work = partial(train, make=Positions, mesh="pp=2,tp=2", rows=(4, 3))
    found = ranks.run(partial(work, plan=plan, example=_even(0, 4)[0]), 4, default_group=True)
    parameters, figures = differences(found, by_hand(Positions, rows=(4, 3)))
    assert parameters < 1e-10
    assert figures < 1e-10
