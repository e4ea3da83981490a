# SPDX-License-Identifier: Apache-2.0
"""Stages of a model that is no chain, which ranks along tp divide take the steps of one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import replayed_models
import torch
from pipelines import WIDTH, WORDS, batch_of, by_hand, differences, train
from steps import begin_batch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import accel
from accel.parallel import Plan
from accel.testing import Simulator

TENSOR: Any = {
    "embed": "embedding_rowwise",
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.sharpness": "replicated_with_grad_allreduce",
    "blocks.*.attention.output": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}
EXAMPLE = batch_of(0, 4)[0]


class Sharpness(nn.Module):
    """A factor that all heads share: ranks have summands of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(2))

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        return heads * self.factor


class Attention(nn.Module):
    """Four heads of queries, one of keys, which ranks share."""

    head_dim = 2

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_groups = 4, 4
        self.query, self.output = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)
        self.sharpness = Sharpness()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = hidden.shape
        heads = (batch, tokens, -1, self.head_dim)
        query = self.sharpness(self.query(hidden).view(heads)).transpose(1, 2)
        key, value = (
            layer(hidden).view(heads).transpose(1, 2).repeat_interleave(self.num_key_value_groups, 1)
            for layer in (self.key, self.value)
        )
        found = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(found.transpose(1, 2).reshape(batch, tokens, self.num_heads * self.head_dim))


class Block(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), nn.Dropout(drop)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.norm(hidden))
        return hidden + self.down(self.drop(torch.tanh(self.up(hidden))))


class Skips(nn.Module):
    """Work between the blocks, a skip over all of them, and a tied head of so many words that no rank has as many."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.blocks = nn.ModuleList(Block(drop) for _ in range(2))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first = hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden) * 0.9 + first * self.scale
        return self.head(self.norm(hidden))


class Chain(Skips):
    """The same modules, one behind the other."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__(drop)
        del self.scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class Reading(Skips):
    """Adds a row of a table that it reads without a call, in both stages, as DeBERTa does of its relative positions."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__(drop)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.table = nn.Embedding(4, WIDTH).double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first = hidden = self.embed(ids)
        for at, block in enumerate(self.blocks):
            hidden = block(hidden) * self.table.weight[at] + first * self.scale
        return self.head(self.norm(hidden + self.table.weight[0]))


def _plan(**options: Any) -> Plan:
    return Plan(**{"tensor": TENSOR, "micro_batches": 2, **options})


BLOCKS = (("embed",), ("blocks.1",))
TURNS = {"schedule": "Interleaved1F1B", "stages_per_rank": 2, "micro_batches": 4}


@pytest.mark.parametrize(
    ("mesh", "world", "options"),
    [
        pytest.param("pp=2,tp=2", 4, {"stages": BLOCKS}, marks=pytest.mark.slow),
        pytest.param("pp=2,tp=2", 4, {"tensor": "model"}, marks=pytest.mark.slow),  # found by the example
        pytest.param("dp=2,pp=2,tp=2", 8, {}, marks=pytest.mark.slow),
        pytest.param("pp=2,tp=2", 4, TURNS, marks=pytest.mark.slow),
        pytest.param("pp=3,tp=2", 6, {"micro_batches": 3, "schedule": "GPipe"}, marks=pytest.mark.slow),
    ],
)
def test_divided_stages_take_the_steps_of_one_process(ranks: Simulator, mesh: str, world: int, options: Any) -> None:
    make = Skips if options != TURNS else Chain  # stages of one rank share no parameters
    work = partial(train, make=make, plan=_plan(**options), mesh=mesh, accumulation=2, example=EXAMPLE)
    shares = 2 if "dp" in mesh else 1
    found = ranks.run(work, world, default_group=True)
    expected = by_hand(make, accumulation=2)
    if shares > 1:  # losses of a rank are of its own rows
        expected = expected._replace(figures=[each for at, each in enumerate(expected.figures, 1) if at % 3 == 0])
    parameters, figures = differences(found, expected)
    assert parameters < 1e-10
    assert figures < 1e-10


def test_a_table_that_two_stages_read_gets_the_sum_of_their_gradients(ranks: Simulator) -> None:
    """Where its module is divided: its attribute is a plain part then, and no parameter."""
    plan = _plan(stages=BLOCKS, tensor=TENSOR | {"table": "replicated_local"})
    work = partial(train, make=Reading, plan=plan, mesh="pp=2,tp=2", example=EXAMPLE)
    parameters, figures = differences(ranks.run(work, 4, default_group=True), by_hand(Reading))
    assert parameters < 1e-10
    assert figures < 1e-10


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # OPT's blocks return views
@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["", "tp=2", "dp=2,pp=2", "pp=2,tp=2"])
def test_a_run_of_divided_stages_goes_on_on_another_mesh(ranks: Simulator, tmp_path: Path, mesh: str) -> None:
    """Names in checkpoints are the model's own."""
    folder = tmp_path / "run"
    work = partial(replayed_models.train, name="opt", mesh="pp=2,tp=2", rows=(4, 4))
    _ = ranks.run(partial(work, save=str(folder)), 4, default_group=True)
    world = {"": 1, "tp=2": 2}.get(mesh, 4)
    more = partial(replayed_models.train, name="opt", mesh=mesh, resume=str(folder), begin=2)
    rows = (2,) if "dp" in mesh else (4,)
    found = ranks.run(partial(more, rows=rows), world, default_group=True)
    expected = replayed_models.by_hand("opt", rows=(4, 4, 4))
    for each in found:
        assert set(each.parameters) <= set(expected.parameters)
        for name, value in each.parameters.items():
            assert float((value - expected.parameters[name]).abs().max()) < 1e-10, name
    assert abs(found[0].figures[-1] - expected.figures[-1]) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["opt", "granite"])  # a tied head, and one of its own
def test_logits_of_each_rank_give_the_loss_of_all_words(
    ranks: Simulator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    replayed_models.widen(monkeypatch, name)
    made, batch_of = replayed_models.family(name)

    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh="pp=2,tp=2")
        inputs, targets = batch_of(4, 0)
        plan = Plan(head="colwise", micro_batches=2)
        model = accel.prepare_model(ctx, made(0.0), plan=plan, example=inputs)

        def loss_fn(output: Any, targets: torch.Tensor) -> torch.Tensor:
            assert output.logits.shape[-1] == replayed_models.WORDS // 2
            return accel.parallel.vocab_cross_entropy(ctx, output.logits, targets)

        loss, _ = accel.forward_backward(
            ctx, model, begin_batch(ctx), inputs, targets=targets, loss_fn=loss_fn, weight=5
        )
        alone = replayed_models.loss_sum(made(0.0)(**inputs), targets) / 5
        return float((loss - alone).detach())

    for off in ranks.run(rank, 4, default_group=True):
        assert abs(off) < 1e-10
