# SPDX-License-Identifier: Apache-2.0
"""Training whose ranks share sequences is that of one process: weights are tokens, and nothing idles unnoticed."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from steps import begin_batch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import accel
from accel.errors import ConfigError
from accel.testing import Simulator

VOCABULARY, LENGTH, WIDTH = 11, 16, 8


class Attention(nn.Module):
    def __init__(self, ctx: accel.DistContext, method: Any) -> None:
        super().__init__()
        self.ctx, self.method = ctx, method
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(2, (4, 2)).transpose(1, 2)
        k, v = self.kv(x).unflatten(2, (2, 2, 2)).transpose(1, 2).unbind(3)
        mixed = accel.parallel.context_attention(self.ctx, q, k, v, method=self.method)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A language model with tied embeddings, positions and two attentions."""

    def __init__(self, ctx: accel.DistContext, method: Any = None) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Attention(ctx, method), Attention(ctx, method))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(ids) + self.places(position_ids)))


class Rows(Dataset[dict[str, Tensor]]):
    """Sequences with prompts of uneven lengths, which have no label; some have no label at all."""

    def __init__(self, count: int) -> None:
        self.ids = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(count))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        labels = self.ids[at].clone()
        labels[: (5 * at) % (LENGTH + 3)] = -100
        return {"ids": self.ids[at], "labels": labels}


class Run(NamedTuple):
    """A training run: its mesh, and what must not depend on it."""

    mesh: str = "dp=1"
    method: Any = None
    strategy: Any = "ddp"
    accumulation: int = 1
    rows: int = 9


def make_model(ctx: accel.DistContext, run: Run) -> Model:
    with accel.seeding.seeded(ctx, 3):
        return Model(ctx, run.method).double()


def train(ctx: accel.DistContext, run: Run) -> tuple[dict[str, Tensor], list[float], float]:
    """Parameters, norms and the mean loss of an epoch of clipped steps."""
    ctx = accel.replace(ctx, mesh=run.mesh, strategy=run.strategy)
    model = make_model(ctx, run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = accel.prepare_loader(ctx, DataLoader(Rows(run.rows), batch_size=4, shuffle=True), global_batch=4)
    model, optimizer = accel.prepare(ctx, model, optimizer)
    state = accel.train_state(ctx, seed=1, accumulation=run.accumulation)
    norms: list[float] = []
    mean = accel.metrics.running_metrics(loss="mean")
    for batch in accel.batches(ctx, loader, state):
        state = state.next(batch)
        batch.data["labels"][int(batch.valid) :] = -100
        part = accel.parallel.split_sequence(ctx, batch.data)
        tokens = (part["labels"] != -100).sum()
        with accel.accumulate(ctx, state, model):
            logits = model(part["ids"], part["position_ids"])
            summed = cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), reduction="sum")
            loss = summed / tokens.clamp(min=1)
            state = accel.backward(ctx, loss, state, weight=tokens)
        mean = mean.add(tokens, loss=loss)
        if state.sync:
            state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.05)
            norms.append(float(state.grad_norm))  # type: ignore[arg-type]
    weights = {name: each.clone() for name, each in accel.get_state_dict(ctx, model, dst=None).items()}
    return weights, norms, mean.read(ctx)[0]["loss"]


def assert_equal(ranks: Simulator, size: int, run: Run) -> None:
    """Compare every rank of a mesh to one process."""
    alone = run._replace(mesh="dp=1", method=None, strategy="ddp")
    weights, norms, loss = ranks.run(lambda ctx: train(ctx, alone), 1, default_group=True)[0]
    for got, got_norms, got_loss in ranks.run(lambda ctx: train(ctx, run), size, default_group=True):
        assert max((got[name] - each).abs().max().item() for name, each in weights.items()) < 1e-10
        assert got_norms == pytest.approx(norms, rel=0, abs=1e-12)
        assert got_loss == pytest.approx(loss, rel=0, abs=1e-12)


@pytest.mark.parametrize(
    ("size", "run"),
    [
        (2, Run("cp=2", "gather")),
        (2, Run("cp=2", "ring", accumulation=2)),
        (4, Run("cp=4", "heads", accumulation=3)),
        (4, Run("dp=2,cp=2", "ring", accumulation=2)),
        (4, Run("dp=2,cp=2", "heads", rows=7)),
        pytest.param(8, Run("dp=4,cp=2", "gather", accumulation=2), marks=pytest.mark.slow),
        (2, Run("cp=2", "ring", "fsdp", accumulation=2)),
        (4, Run("dp=2,cp=2", "gather", "fsdp", accumulation=3)),
        (4, Run("dp=2,cp=2", "heads", "fsdp")),
        pytest.param(8, Run("dp_replicate=2,dp_shard=2,cp=2", "ring", "fsdp", accumulation=2), marks=pytest.mark.slow),
    ],
)
def test_training_equals_one_process(ranks: Simulator, size: int, run: Run) -> None:
    assert_equal(ranks, size, run)


@settings(max_examples=share(0.12))
@given(
    run=st.builds(
        Run,
        mesh=st.sampled_from(["cp=4", "dp=2,cp=2", "dp=4"]),
        method=st.sampled_from(["gather", "ring", "heads"]),
        strategy=st.just("ddp"),
        accumulation=st.integers(1, 3),
        rows=st.integers(5, 12),
    )
)
def test_training_equals_one_process_for_every_mesh_and_tail(ranks: Simulator, run: Run) -> None:
    assert_equal(ranks, 4, run)


def test_loaders_give_ranks_of_one_sequence_one_batch_and_metrics_count_it_once(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> tuple[list[Any], list[bool], list[int]]:
        ctx = accel.replace(ctx, mesh="dp=2,cp=2")
        loader = accel.prepare_loader(ctx, DataLoader(torch.arange(7)[:, None], batch_size=2))
        held: list[Any] = []
        duplicates: list[bool] = []
        counted: list[int] = []
        for batch in accel.batches(ctx, loader):
            held.append(batch.data.tolist())
            duplicates.append(batch.duplicate)
            counted += accel.gather_for_metrics(ctx, batch.data, batch).flatten().tolist()
        return held, duplicates, counted

    first, second, third, fourth = ranks.run(rank, 4, default_group=True)
    assert first[0] == second[0] != third[0] == fourth[0]
    assert not any(first[1] + third[1])
    assert all(second[1] + fourth[1])
    assert sorted(first[2]) == list(range(7))


def _step(ctx: accel.DistContext, model: nn.Module, inputs: Any) -> bool:
    loss = model(*inputs).square().mean()
    state = accel.backward(ctx, loss, begin_batch(ctx, last=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        return accel.optimizer_step(ctx, optimizer, state).stepped
    finally:
        accel.training.clear_gradients(model)


def test_a_mesh_whose_ranks_compute_the_same_is_refused(ranks: Simulator) -> None:
    ids = torch.zeros(1, LENGTH, dtype=torch.int64)

    def rank(ctx: accel.DistContext) -> bool:
        ctx = accel.replace(ctx, mesh="dp=1,cp=2")
        plain = accel.prepare_model(ctx, nn.Linear(2, 2))
        with assert_raises(ConfigError, expected="cp=2", fix=r"accel\.parallel\.split_sequence"):
            _step(ctx, plain, [torch.ones(2, 2)])
        model = accel.prepare_model(ctx, make_model(ctx, Run()))
        with assert_raises(ConfigError, got="of no sequence that was cut"):  # each rank's half is all of the sequence
            _step(ctx, model, [ids, torch.arange(LENGTH)[None]])
        return _step(accel.replace(ctx, mesh=ctx.mesh), plain, [torch.ones(2, 2)])  # of the user's own

    assert all(ranks.run(rank, 2, default_group=True))


def test_a_model_whose_positions_need_no_others_trains(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> bool:
        ctx = accel.replace(ctx, mesh="cp=2")
        part = accel.parallel.split_sequence(ctx, {"x": torch.ones(1, LENGTH, 2)})
        return _step(ctx, accel.prepare_model(ctx, nn.Linear(2, 2)), [part["x"]])

    assert all(ranks.run(rank, 2, default_group=True))


def test_places_of_the_own_positions_count_as_a_cut(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> bool:
        ctx = accel.replace(ctx, mesh="cp=2")
        own = accel.parallel.sequence_positions(ctx, LENGTH)[None]
        return _step(ctx, accel.prepare_model(ctx, make_model(ctx, Run())), [own % VOCABULARY, own])

    assert all(ranks.run(rank, 2, default_group=True))
