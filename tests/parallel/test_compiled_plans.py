# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks and stages beside found plans, replicas, shards and recomputation: steps are those of one process, no
graph breaks, and each kind of batch has one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from pipelines import Trained, differences
from torch import nn
from torch.nn import functional

import accel
from accel.parallel import Plan
from accel.testing import Simulator

WIDTH, WORDS, TOKENS, ROWS = 16, 22, 6, (8, 5, 8)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # torch's own, of a trace
]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Chain(nn.Module):
    """A language model of float64 whose head is tied to its embedding, without a plan of its own."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body, self.head = Body().double(), nn.Linear(WIDTH, WORDS, bias=False).double()
        self.head.weight = self.body.embed.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(ids))


class Between(Chain):
    """The same with work between its modules."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(ids)) * 2) * 0.9


class Case(NamedTuple):
    """A mesh, a plan and what is compiled.

    Attributes:
        graphs: the most graphs of all ranks.
    """

    mesh: str
    plan: Plan
    graphs: int
    strategy: Any = "ddp"
    regions: Any = None
    again: bool = False

    @property
    def make(self) -> Callable[[], nn.Module]:
        return Between if self.plan.cut == "trace" else Chain


def _traced(**options: Any) -> Plan:
    return Plan(cut="trace", micro_batches=2, **options)


CASES = {  # two kinds of rows, on ranks that share no graphs where their groups differ
    "tp, shared tokens": Case("tp=2", Plan(sequence=True), 8, regions="repeated"),
    "tp, words": Case("tp=2", Plan(head="colwise"), 8),
    "stages, both": Case("pp=2,tp=2", Plan(sequence=True, head="colwise", micro_batches=2), 20),
    "blocks of stages, both": Case(
        "pp=2,tp=2", Plan(sequence=True, head="colwise", micro_batches=2), 8, regions="repeated"
    ),
    "traced, shared tokens": Case("pp=2,tp=2", _traced(sequence=True), 8),
    "traced, words": Case("pp=2,tp=2", _traced(head="colwise"), 8),
    "traced, both": Case("pp=2,tp=2", _traced(sequence=True, head="colwise"), 8),
    "traced, replicas": Case("dp=2,pp=2", _traced(), 8),
    "traced, shards": Case("dp=2,pp=2", _traced(), 8, "fsdp"),
    "traced, shards, recomputed": Case("dp=2,pp=2", _traced(), 8, "fsdp", again=True),
}


@pytest.fixture(autouse=True)
def _own_graphs() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def _batch(step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    ids, targets = (torch.randint(WORDS, (rows, TOKENS), generator=draw) for _ in range(2))
    return ids, targets.masked_fill(torch.rand(rows, TOKENS, generator=draw) < 0.3, -100)


def _train(ctx: accel.DistContext, case: Case, *, backend: str = "", rows: tuple[int, ...] = ROWS) -> Trained:
    """Windows of three batches, by AdamW with clipping; without a backend nothing is compiled or recomputed."""
    if ctx.world_size > 1:
        ctx = accel.replace(ctx, mesh=case.mesh, strategy=case.strategy)
    model: Any = case.make().train()
    if backend and case.again:
        accel.checkpoint_activations(model)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=case.plan, example=_batch(0, 4)[0])
    if backend:
        accel.compile_model(model, case.regions, backend=backend, fullgraph=True)  # raises where a graph breaks
    scaler, accum = accel.loss_scale(ctx), accel.Accumulation(3)
    share, shares = ctx.data_parallel

    def loss_of(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if case.plan.head == "colwise":
            return accel.parallel.vocab_cross_entropy(ctx, output, targets)
        return functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")

    figures: list[float] = []
    for step, size in enumerate(rows):
        sums: list[torch.Tensor] = []
        for micro in range(3):
            ids, targets = (each[share::shares] for each in _batch(100 * step + micro, size))
            accum = accum.next()
            weight = (targets != -100).sum()
            given = (scaler, accum, ids)
            loss, accum = accel.forward_backward(ctx, model, *given, targets=targets, loss_fn=loss_of, weight=weight)
            sums.append(torch.stack([loss.double() * weight, weight.double()]))
        result = accel.optimizer_step(ctx, optimizer, scaler, accum, max_norm=0.5)
        accum, scaler = result.accum, result.scaler
        total = accel.reduce(ctx, torch.stack(sums).sum(0))
        assert result.grad_norm is not None
        figures += [float(total[0] / total[1]), float(result.grad_norm)]
    return Trained(accel.get_state_dict(ctx, model, dst=None) or {}, figures)


@pytest.mark.parametrize("name", CASES)
def test_compiled_plans_take_the_steps_of_one_process(ranks: Simulator, name: str) -> None:
    case = CASES[name]
    alone = _train(accel.single(), case)
    world = 4 if "," in case.mesh else 2
    found = ranks.run(lambda ctx: _train(ctx, case, backend="aot_eager"), world, default_group=True, timeout_s=300)
    parameters, figures = differences(found, alone)
    assert parameters < 1e-10
    assert figures < 1e-10
    assert not torch._dynamo.utils.counters["graph_break"]
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= case.graphs


SWITCHED = {  # by the kinds of batches of a rank
    "replicas": Case("dp=2", Plan(), 0),
    "shards": Case("dp=2", Plan(), 0, "fsdp", "repeated"),
    "tp": Case("tp=2", Plan(), 0, regions="repeated"),
    "blocks of stages": Case("pp=2", Plan(micro_batches=2), 0, regions="repeated"),
    "stages": Case("pp=2", Plan(micro_batches=2), 0),
    "traced": Case("pp=2", _traced(), 0),
}


@pytest.mark.parametrize("name", SWITCHED)
def test_each_kind_of_batch_has_one_graph(ranks: Simulator, name: str) -> None:
    """Rows in any number, one row, training and evaluation: a second round compiles nothing."""
    case = SWITCHED[name]
    kinds = [2, 4, 6, 10, 14]  # a rank of two has one row of the first

    def rank(ctx: accel.DistContext) -> list[int]:
        ctx = accel.replace(ctx, mesh=case.mesh, strategy=case.strategy)
        model = accel.prepare_model(ctx, case.make().train(), plan=case.plan, example=_batch(0, 4)[0])
        accel.compile_model(model, case.regions, backend="aot_eager", fullgraph=True)
        counts: list[int] = []
        scaler = accel.loss_scale(ctx)
        for step in range(3 * len(kinds)):
            ids = _batch(step, kinds[step % len(kinds)])[0][ctx.data_parallel[0] :: ctx.data_parallel[1]]
            _ = accel.forward_backward(
                ctx, model, scaler, None, ids, loss_fn=lambda out: out.square().sum(), weight=len(ids)
            )
            model.zero_grad()
            with torch.no_grad(), accel.evaluating(model):
                _ = accel.training.forward(ctx, model, ids)
            accel.wait_for_everyone(ctx)
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            accel.wait_for_everyone(ctx)
        return counts[len(kinds) - 1 :]

    for counts in ranks.run(rank, 2, default_group=True, timeout_s=300):
        assert counts[0] > 0
        assert len(set(counts)) == 1
    assert not torch._dynamo.utils.counters["graph_break"]
