# SPDX-License-Identifier: Apache-2.0
"""Compiled models and blocks on each axis of a mesh: no graph breaks, and gradients are those without torch.compile."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from catching import assert_raises
from planned_parts import Recomputed, is_compiled, split_batch
from steps import begin_batch
from tensor_models import NORM_AND_MLP
from torch import nn
from torch.distributed.fsdp import FSDPModule

import accel
from accel.errors import PrepareError
from accel.parallel._modules import is_elsewhere
from accel.tensors import full_tensor
from accel.testing import Simulator

TOLERANCE = {"rtol": 0, "atol": 1e-10}
Plan = accel.parallel.Plan
# torch makes a function of autograd while it traces one, and warns of it
pytestmark = [
    pytest.mark.usefixtures("own_graphs"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Case(NamedTuple):
    """A mesh, what is compiled, and the number of regions of all ranks."""

    mesh: str
    strategy: Any
    regions: Any
    count: int
    sequence: bool = False


CASES = {
    "ddp, whole": Case("dp=2", "ddp", None, 2),
    "fsdp": Case("dp=2", "fsdp", "repeated", 4),
    "tp": Case("tp=2", "ddp", "repeated", 4),
    "tp, shared tokens": Case("tp=2", "ddp", "repeated", 4, sequence=True),
    "pp": Case("pp=2", "ddp", "repeated", 2),
    "pp, whole stages": Case("pp=2", "ddp", None, 4),
    "fsdp x tp, shared tokens": Case("dp=2,tp=2", "fsdp", "repeated", 8, sequence=True),
    "pp x tp": Case("pp=2,tp=2", "ddp", None, 8),
}
QUICK = ("tp", "pp")  # compiled replicas and shards have tests beside their own laws


def trained(ctx: accel.DistContext, case: Case, backend: str | None) -> tuple[list[Any], int, list[int]]:
    """Gradients of three passes, the number of compiled modules, and that of graphs after each pass."""
    ctx = accel.replace(ctx, mesh=case.mesh, strategy=case.strategy)
    torch.manual_seed(0)
    plan = Plan(tensor=NORM_AND_MLP, sequence=case.sequence, micro_batches=2)
    model = accel.prepare_model(ctx, Net().double(), plan=plan)
    if backend is not None:
        accel.compile_model(model, case.regions, backend=backend, fullgraph=True)  # raises where a graph breaks
    compiled = sum(map(is_compiled, accel.unwrap_model(model).modules()))
    found, graphs = list[Any](), list[int]()
    state = accel.train_state(ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.linspace(-1, 1 + step, 64, dtype=torch.float64).view(4, 4, 4) * (1 + ctx.data_parallel[0])
        state = begin_batch(ctx, state)
        _, state = accel.forward_backward(ctx, model, state, x, loss_fn=lambda y: y.square().sum(), weight=4)
        named = accel.unwrap_model(model).named_parameters()
        found.append({name: full_tensor(each.grad) for name, each in named if each.grad is not None})
        state = accel.optimizer_step(ctx, optimizer, state)
        accel.wait_for_everyone(ctx)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return found, compiled, graphs


def assert_law(ranks: Simulator, case: Case, backend: str) -> None:
    size = 4 if "," in case.mesh else 2
    eager = ranks.run(lambda ctx: trained(ctx, case, None), size, default_group=True)
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled = ranks.run(lambda ctx: trained(ctx, case, backend), size, default_group=True)
    torch.testing.assert_close([each for each, *_ in compiled], [each for each, *_ in eager], **TOLERANCE)
    assert sum(count for _, count, _ in compiled) == case.count
    assert not torch._dynamo.utils.counters["graph_break"]
    graphs = compiled[0][2]
    assert graphs[0] > 0
    assert graphs[0] == graphs[2]  # later steps compile nothing


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_no_graph_breaks_and_gradients_are_the_same(ranks, name):
    assert_law(ranks, CASES[name], "aot_eager")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of modules that Inductor imports
@pytest.mark.parametrize("name", ["ddp, whole", "tp"])
def test_inductor_gives_the_same_gradients(ranks, name):
    assert_law(ranks, CASES[name], "inductor")


def test_micro_batches_of_any_number_of_rows_take_two_graphs():
    """One for the first number, and one for all: of filled rows too."""
    model = accel.compile_model(Mlp(), backend="aot_eager", fullgraph=True)
    counts = list[int]()
    for rows in (8, 5, 8, 6):
        for each in split_batch(torch.ones(rows, 8), None, 2, equal=True):
            model(*each.args).sum().backward()
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts == [1, 2, 2, 2]


def test_a_model_that_is_compiled_whole_is_not_cut_into_stages(ranks):
    def rank(ctx: accel.DistContext) -> None:
        model = accel.compile_model(Net(), backend="aot_eager")
        with assert_raises(
            PrepareError, problem="cannot be cut into stages", fix=r"accel\.compile_model\(model\) after prepare"
        ):
            accel.prepare_model(accel.replace(ctx, mesh="pp=2"), model)

    ranks.run(rank, 2, default_group=True)


def test_the_first_block_that_shares_tokens_is_one_of_the_repeated(ranks):
    """It has a class before its own that the others lack."""

    def rank(ctx: accel.DistContext) -> list[bool]:
        ctx = accel.replace(ctx, mesh="dp=2,tp=2", strategy="fsdp")
        model = accel.prepare_model(ctx, Net(), plan=Plan(tensor=NORM_AND_MLP, sequence=True))
        recomputed = accel.checkpoint_activations(model).blocks
        return [isinstance(each, FSDPModule) and isinstance(each, Recomputed) for each in recomputed]

    assert ranks.run(rank, 4, default_group=True) == [[True, True]] * 4


@pytest.mark.parametrize("choose", [accel.checkpoint_activations, partial(accel.compile_model, backend="aot_eager")])
def test_a_block_that_is_alone_on_its_stage_is_one_of_the_repeated(ranks, choose):
    def rank(ctx: accel.DistContext) -> list[str]:
        model = accel.prepare_model(accel.replace(ctx, mesh="pp=2"), Net())
        choose(model, "repeated")
        chosen = [each for each in model.blocks if isinstance(each, Recomputed) or is_compiled(each)]
        return ["elsewhere" if is_elsewhere(each) else type(each).__name__ for each in chosen]

    assert ranks.run(rank, 2, default_group=True) == [["Block"], ["Block"]]
