# SPDX-License-Identifier: Apache-2.0
"""Experts in the stages of a pipeline: ranks of a stage share them, and train as one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from pipelines import WIDTH, Trained, Words, by_hand, differences, loss_sum, train
from steps import begin_batch
from torch import Tensor, nn

import accel
from accel.testing import simulate

EXPERTS = 4


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 2)

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        every = torch.einsum("eij,nj->nei", self.weight, tokens).tanh()
        chosen = torch.zeros(len(tokens), len(self.weight), dtype=tokens.dtype)
        return (every * chosen.scatter_add(1, indices, weights)[..., None]).sum(1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, -2)
        routing = accel.parallel.route_tokens(self.router(tokens), 2)
        return hidden + self.experts(tokens, routing.indices, routing.weights).view_as(hidden)


class Loop(nn.Module):
    """A block with a list of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, -2)
        routing = accel.parallel.route_tokens(self.router(tokens), 2)
        outputs = torch.zeros_like(tokens)
        for at, expert in enumerate(self.experts):
            row, choice = torch.where(routing.indices == at)
            outputs = outputs.index_add(0, row, expert(tokens[row]) * routing.weights[row, choice, None])
        return hidden + outputs.view_as(hidden)


def mixture(block: type[nn.Module] = Block) -> Words:
    """Experts in the last two of four blocks, so that a first stage has none."""
    model = Words(4)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for at in (2, 3):
            model.blocks[at] = block().double()
    return model


@pytest.mark.filterwarnings("ignore:grad and param do not obey")  # strides of einsum's gradients; torch copies them
@pytest.mark.parametrize(
    ("ranks", "mesh", "schedule", "per", "block"),
    [
        (4, "pp=2,dp=2,ep=2", "1F1B", 1, Block),
        (4, "pp=2,dp=2,ep=2", "InterleavedZeroBubble", 2, Block),
        pytest.param(4, "pp=2,dp=2,ep=2", "1F1B", 1, Loop, marks=pytest.mark.slow),
        pytest.param(4, "pp=2,dp=2,ep=2", "InterleavedZeroBubble", 2, Loop, marks=pytest.mark.slow),
        pytest.param(8, "pp=2,dp=4,ep=2", "ZBVZeroBubble", 2, Block, marks=pytest.mark.slow),
        pytest.param(4, "pp=2,dp=2,ep=2", "DualPipeV", 2, Block, marks=pytest.mark.slow),
        pytest.param(4, "pp=2,dp=2,ep=2", "Interleaved1F1B", 2, Block, marks=pytest.mark.slow),
        pytest.param(8, "pp=2,dp=4,ep=2", "GPipe", 1, Block, marks=pytest.mark.slow),
    ],
)
def test_stages_with_experts_train_as_one_process(
    ranks: int, mesh: str, schedule: Any, per: int, block: type[nn.Module]
) -> None:
    make = functools.partial(mixture, block)
    plan = accel.parallel.Plan(schedule=schedule, stages_per_rank=per, experts={"blocks.*.experts": "dispatch"})

    def run(ctx: accel.DistContext) -> Trained:
        ctx = accel.replace(ctx, strategy="fsdp" if "dp=4" in mesh else "ddp")
        return train(ctx, make, plan, mesh=mesh)

    found = simulate(run, ranks, default_group=True)
    expected = by_hand(make)
    norms = expected.figures[1::2]  # ranks have losses of their own rows
    parameters, figures = differences(found, expected._replace(figures=norms))
    assert parameters < 1e-10
    assert figures < 1e-12


def test_each_stage_counts_the_tokens_of_its_experts() -> None:
    plan = accel.parallel.Plan(experts={"blocks.*.experts": "dispatch"}, micro_batches=2)

    def run(ctx: accel.DistContext) -> dict[str, int]:
        ctx = accel.replace(ctx, mesh="pp=2,dp=2,ep=2", strategy="ddp")
        net = mixture()
        model, optimizer = accel.prepare(ctx, net, torch.optim.SGD(net.parameters(), lr=0.1), plan=plan)
        load = accel.training.ExpertLoad(model, experts={"blocks.*.experts": EXPERTS})
        state = begin_batch(ctx)
        ids = torch.arange(12).reshape(4, 3) % 5
        with load.counting(state):
            _, state = accel.forward_backward(
                ctx, model, state, (ids,), targets=ids, loss_fn=loss_sum, weight=ids.numel()
            )
        state = accel.optimizer_step(ctx, optimizer, state)
        return {path: int(each.sum()) for path, each in load.update_(ctx, state).layers.items()}

    second = {"blocks.2.experts": 48, "blocks.3.experts": 48}  # two ranks, 12 tokens, two experts each
    found = simulate(run, 4, default_group=True)
    assert sorted(found, key=len) == [{}, {}, second, second]
