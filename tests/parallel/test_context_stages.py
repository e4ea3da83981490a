# SPDX-License-Identifier: Apache-2.0
"""Stages of a pipeline along cp: hand-written models compute what one process computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from handwritten import Handwritten, named, tensors_of
from handwritten_runs import called
from steps import ByState, begin_batch
from test_context_models import LENGTH, cut
from torch import Tensor, nn

import accel
from accel.errors import PrepareError
from accel.parallel import Plan
from accel.parallel.parts import PartTensor
from accel.testing import Simulator
from accel.tree import map_tensors

MESH = "pp=2,cp=2"
ROWS = 5
QUICK = ("min_gpt", "t5")
FEW = Plan(micro_batches=2)
INTERLEAVED = Plan(schedule="Interleaved1F1B", stages_per_rank=2, micro_batches=4)


def floats(output: Any) -> list[Tensor]:
    return [each for each in tensors_of(output) if each.is_floating_point()]


def draw(out: Tensor, shape: Sequence[int], rows: Tensor, places: Tensor) -> Tensor:
    """Weights of an output by its rows and positions; `shape` is of all of them."""
    found = torch.ones((), dtype=torch.float64)
    for dim, length in enumerate(out.shape):
        at = rows if dim == 0 and shape[0] == ROWS else places if length != shape[dim] else torch.arange(length)
        found = found[..., None] * torch.sin(1.3 * at + dim + 1)
    return found


def loss_of(output: Any, rows: Tensor, places: Tensor, shapes: Sequence[Sequence[int]]) -> Tensor:
    """A weighted sum of all outputs; the ranks' sums of an output without positions add up to one."""
    losses: list[Tensor] = []
    for out, shape in zip(floats(output), shapes, strict=True):
        if out.requires_grad:
            own = out[: len(rows)] if shape[0] == ROWS else out
            share = 1.0 if any(a != b for a, b in zip(own.shape[1:], shape[1:], strict=True)) else len(places) / LENGTH
            losses.append((own * draw(own, shape, rows, places)).sum() * share)
    return torch.stack(losses).sum()


def plain(entry: Handwritten, inputs: Any, shapes: Sequence[Sequence[int]], micro_batches: int) -> dict[str, Tensor]:
    """Parameters after a step of torch alone, with micro-batches that copies of the last sample fill up."""
    model = entry.make().eval()
    size = -(-ROWS // micro_batches)
    for begin in range(0, ROWS, size):
        rows = torch.arange(begin, min(begin + size, ROWS))
        chosen = torch.arange(begin, begin + size).clamp(max=ROWS - 1)
        part = map_tensors(lambda each, chosen=chosen: each[chosen] if len(each) == ROWS else each, inputs)
        loss_of(called(model, part), rows, torch.arange(LENGTH), shapes).backward()
    named_ones = model.named_parameters()
    return {name: (each if each.grad is None else each - each.grad / ROWS).detach() for name, each in named_ones}


def off(ranks: Simulator, entry: Handwritten, mesh: str, plan: Plan, size: int = 4) -> float:
    """The largest difference of parameters after a step, as a share of the largest value."""
    inputs = entry.batch(5, ROWS, LENGTH).inputs
    shapes = [each.shape for each in floats(called(entry.make().eval(), inputs))]
    expected = plain(entry, inputs, shapes, plan.micro_batches or 1)

    def rank(ctx: accel.DistContext) -> float:
        ctx = accel.replace(ctx, mesh=mesh)
        model: Any = entry.make().eval()
        optimizer: Any = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1.0)
        model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan, example=inputs)
        places = accel.parallel.split_sequence(ctx, {"at": torch.arange(LENGTH)[None]}, shift=())["at"]
        _, state = accel.forward_backward(
            ctx,
            model,
            begin_batch(ctx),
            cut(ctx, inputs),
            targets=torch.cat([torch.arange(ROWS)[:, None], places.expand(ROWS, -1)], 1),
            loss_fn=lambda output, known: loss_of(output, known[:, 0], known[0, 1:], shapes),
            weight=ROWS / ctx.axis("cp").size,
        )
        _ = accel.optimizer_step(ctx, optimizer, state)
        after = accel.get_state_dict(ctx, model, dst=None)
        return max(
            float((after[name] - each).abs().max()) / max(1.0, float(each.abs().max()))
            for name, each in expected.items()
        )

    return max(ranks.run(rank, size, default_group=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", named(*QUICK), ids=lambda each: each.name)
def test_attention_as_written_in_stages_is_as_in_one_process(ranks: Simulator, entry: Handwritten) -> None:
    assert off(ranks, entry, MESH, FEW) < 1e-10


class Crossing(nn.Module):
    """A block of attention that crosses the ranks, or of a layer for each position."""

    def __init__(self, ctx: accel.DistContext, *, attends: bool) -> None:
        super().__init__()
        self.ctx, self.attends = ctx, attends
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if self.attends:
            q = h.unflatten(2, (2, -1)).transpose(1, 2)
            h = accel.parallel.context_attention(self.ctx, q, q, q).transpose(1, 2).flatten(2)
        return x + h


def step(ctx: accel.DistContext, model: nn.Module, inputs: Tensor) -> None:
    plan = accel.parallel.Plan(micro_batches=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spread, optimizer = accel.prepare(ctx, model, optimizer, plan=plan, example=[inputs])
    own = accel.parallel.split_sequence(ctx, {"x": inputs})["x"]
    run = ByState(ctx)
    run.begin()
    _, run.state = accel.forward_backward(
        ctx, spread, run.state, own, targets=own, loss_fn=lambda out, _: out.square().sum(), weight=len(own)
    )
    run.step(optimizer)


@pytest.mark.filterwarnings("ignore")
def test_a_stage_may_have_no_attention(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh=MESH)
        torch.manual_seed(0)
        model = nn.Sequential(*(Crossing(ctx, attends=at == 0) for at in range(4)))
        step(ctx, model, torch.randn(4, LENGTH, 8))

    _ = ranks.run(rank, 4, default_group=True)


class Wrong(nn.Module):
    """A layer that computes something else with a part of positions, or fails on one rank."""

    def __init__(self, case: str, *, fails: bool) -> None:
        super().__init__()
        self.case, self.fails = case, fails
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h = h + (h @ h.transpose(1, 2)).softmax(-1) @ h
        if not isinstance(x, PartTensor):
            return h
        if self.case == "fails" and self.fails:
            raise ValueError(self.case)
        return 1.02 * h if self.case == "values" else h


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("case", ["values", "fails"])
def test_a_stage_that_computes_something_else_is_refused_on_all_ranks(ranks: Simulator, case: str, at: int) -> None:
    def rank(ctx: accel.DistContext) -> str:
        ctx = accel.replace(ctx, mesh=MESH)
        torch.manual_seed(0)
        fails = ctx.axis("cp").rank == 1
        model = nn.Sequential(*(Wrong(case if number == at else "", fails=fails) for number in range(4)))
        with pytest.raises(PrepareError) as caught:
            step(ctx, model, torch.randn(4, LENGTH, 8))
        return caught.value.got

    said = {"values": "output 0 is off by", "fails": "ValueError: fails"}
    assert all(each.startswith(said[case]) for each in ranks.run(rank, 4, default_group=True))
