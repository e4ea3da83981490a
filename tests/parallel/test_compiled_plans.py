# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks and stages beside found plans, replicas, shards and recomputation: steps are those of one process, no
graph breaks, and each kind of batch has one graph."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from compiled_models import WIDTH, Between, Case, Mlp, batch_of, train
from pipelines import differences
from steps import begin_batch
from torch import nn

import accel
from accel.parallel import Plan
from accel.testing import Simulator

pytestmark = [
    pytest.mark.usefixtures("own_graphs"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # torch's own, of a trace
]

CASES = {  # two kinds of rows, on ranks that share no graphs where their groups differ
    "tp, shared tokens": Case("tp=2", Plan(sequence=True), 8, regions="repeated"),
    "tp, words": Case("tp=2", Plan(head="colwise"), 8),
    "stages, both": Case("pp=2,tp=2", Plan(sequence=True, head="colwise", micro_batches=2), 20),
    "blocks of stages, both": Case(
        "pp=2,tp=2", Plan(sequence=True, head="colwise", micro_batches=2), 8, regions="repeated"
    ),
    "between, shared tokens": Case("pp=2,tp=2", Plan(micro_batches=2, sequence=True), 20, make=Between),
    "between, words": Case("pp=2,tp=2", Plan(micro_batches=2, head="colwise"), 20, make=Between),
    "between, both": Case("pp=2,tp=2", Plan(micro_batches=2, sequence=True, head="colwise"), 20, make=Between),
    "between, replicas": Case("dp=2,pp=2", Plan(micro_batches=2), 16, make=Between),
    "between, shards": Case("dp=2,pp=2", Plan(micro_batches=2), 16, "fsdp", make=Between),
    "between, shards, recomputed": Case("dp=2,pp=2", Plan(micro_batches=2), 16, "fsdp", again=True, make=Between),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_compiled_plans_take_the_steps_of_one_process(ranks: Simulator, name: str) -> None:
    case = CASES[name]
    alone = train(accel.single(), case)
    world = 4 if "," in case.mesh else 2
    found = ranks.run(lambda ctx: train(ctx, case, backend="aot_eager"), world, default_group=True, timeout_s=300)
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
    "between": Case("pp=2", Plan(micro_batches=2), 0, make=Between),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.kept("slow") if name == "shards" else ()) for name in SWITCHED],
)
def test_each_kind_of_batch_has_one_graph(ranks: Simulator, name: str) -> None:
    """Rows in any number, one row, training and evaluation: a second round compiles nothing."""
    case = SWITCHED[name]
    kinds = [2, 4, 6, 10, 14]  # a rank of two has one row of the first

    def rank(ctx: accel.DistContext) -> list[int]:
        ctx = accel.replace(ctx, mesh=case.mesh, strategy=case.strategy)
        model = accel.prepare_model(ctx, case.make().train(), plan=case.plan, example=batch_of(0, 4)[0])
        accel.compile_model(model, case.regions, backend="aot_eager", fullgraph=True)
        counts: list[int] = []
        state = accel.train_state(ctx)
        for step in range(3 * len(kinds)):
            ids = batch_of(step, kinds[step % len(kinds)])[0][ctx.data_parallel[0] :: ctx.data_parallel[1]]
            _ = accel.forward_backward(
                ctx, model, begin_batch(ctx, state), ids, loss_fn=lambda out: out.square().sum(), weight=len(ids)
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


class Convolutions(nn.Module):
    """A norm of channels that ranks divide, with statistics of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8), nn.Conv1d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(self.up(x)).relu())


def test_a_batch_norm_in_a_graph_changes_its_statistics(ranks: Simulator) -> None:
    x = torch.linspace(-1, 1, 60, dtype=torch.float64).sin().view(3, 4, 5)

    def rank(ctx: accel.DistContext) -> Any:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(Convolutions()).double()
        if ctx.world_size > 1:
            model = accel.prepare_model(accel.replace(ctx, mesh="tp=2"), model, example=[x])
            accel.compile_model(model, backend="aot_eager", fullgraph=True)
        outputs = [model(x * scale).detach() for scale in (1, 3)]
        norm = cast(Any, model)[0].norm
        return outputs, norm.running_mean.clone(), norm.running_var.clone()

    want = rank(accel.single())
    for got in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


class Normed(Mlp):
    """A layer with norms, a spread and an extreme of rows that ranks divide."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        sizes = hidden.norm(dim=-1, keepdim=True) + hidden.std(-1, keepdim=True) + hidden.max(-1, True).values
        return self.down(hidden / (1 + sizes.abs()))


def test_reductions_of_divided_rows_are_part_of_a_graph(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> torch.Tensor:
        ctx = accel.replace(ctx, mesh="tp=2")
        torch.manual_seed(0)
        net, x = nn.Sequential(Normed()).double(), torch.randn(3, WIDTH, dtype=torch.float64)
        expected = net(x)
        model = accel.prepare_model(ctx, net, plan=Plan(tensor={"0.up": "colwise", "0.down": "rowwise"}))
        accel.compile_model(model, backend="aot_eager", fullgraph=True)
        return model(x) - expected

    for difference in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(difference, torch.zeros_like(difference), rtol=0, atol=1e-12)
