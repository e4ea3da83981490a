# SPDX-License-Identifier: Apache-2.0
"""Stages of a pipeline along cp: hand-written models compute what one process computes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from handwritten import Handwritten, named, tensors_of
from handwritten_runs import called
from steps import ByState, begin_batch
from test_context_models import LENGTH, SEQUENCES, cut
from test_context_outputs import WORDS, Loop
from torch import Tensor, nn

import accel
from accel.errors import PrepareError
from accel.parallel import Plan
from accel.parallel.parts import PartTensor
from accel.testing import Simulator
from accel.tree import map_tensors

MESH = "pp=2,cp=2"
ROWS = 5
QUICK = ("min_gpt", "t5", "reward", "checkpointed", "hooked_features", "frozen_end")
# refused with units of fsdp in stages: a part of a unit is called, or a result of a unit is changed in place; a loss in
# the forward compares the samples of a batch, which micro-batches divide
NOT_IN_STAGES = ("called_by_parts", "in_place", "through_views", "clip")
FEW = Plan(micro_batches=2)


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
@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(each, marks=pytest.mark.slow if each.name in QUICK else pytest.mark.nightly)
        for each in SEQUENCES
        if each.name not in NOT_IN_STAGES
    ],
    ids=lambda each: each.name,
)
def test_attention_as_written_in_stages_is_as_in_one_process(ranks: Simulator, entry: Handwritten) -> None:
    assert off(ranks, entry, MESH, FEW) < 1e-10


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", named("min_gpt", "moe", "checkpointed"), ids=lambda each: each.name)
@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [(MESH, "Interleaved1F1B"), (MESH, "ZBVZeroBubble"), ("pp=2,cp=4", ""), ("pp=2,cp=2,tp=2", "")],
)
def test_stages_compute_the_same_on_other_meshes_and_schedules(
    ranks: Simulator, entry: Handwritten, mesh: str, schedule: str
) -> None:
    plan = Plan(schedule=schedule, stages_per_rank=2, micro_batches=4) if schedule else FEW
    assert off(ranks, entry, mesh, plan, 4 if mesh == MESH else 8) < 1e-10


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


@pytest.mark.slow
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


def gated(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.7 * x)


class Losing(nn.Module):
    """Attention behind a function of torch.jit, which loses positions."""

    def __init__(self, *, loses: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.repeated = torch.ones(1).expand(8)  # of one element in memory
        self.gate = torch.jit.script(gated) if loses else gated

    def forward(self, x: Tensor) -> Tensor:
        h = self.gate(self.linear(x)) * self.repeated
        return h + (h @ h.transpose(1, 2)).softmax(-1) @ h


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loses", [True, False])
def test_a_stage_that_loses_positions_is_refused(ranks: Simulator, *, loses: bool) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh=MESH)
        model = nn.Sequential(*(Losing(loses=loses and at == 3) for at in range(4)))
        with pytest.raises(PrepareError) if loses else contextlib.nullcontext():
            step(ctx, model, torch.randn(4, LENGTH, 8))

    _ = ranks.run(rank, 4, default_group=True)


class Numbers(nn.Module):
    """Makes numbers of positions and a mask with -inf, which the last layer reads."""

    def __init__(self, *, is_wrong: bool) -> None:
        super().__init__()
        self.is_wrong = is_wrong
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        numbers = (x.sum(-1) > 0).long()
        mask = torch.zeros_like(x[..., 0]).masked_fill(numbers == 0, -torch.inf)
        if self.is_wrong and isinstance(x, PartTensor):
            numbers = 1 - numbers
        return self.linear(x), numbers, mask


class Between(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(given[0]), given[1], given[2]


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 8)

    def forward(self, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        h = given[0] + self.table(given[1])
        return h + (h @ h.transpose(1, 2) + given[2][:, None]).softmax(-1) @ h


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_wrong", [False, True])
def test_numbers_and_masks_that_stages_pass_on_are_proved(ranks: Simulator, *, is_wrong: bool) -> None:
    def rank(ctx: accel.DistContext) -> str:
        ctx = accel.replace(ctx, mesh=MESH)
        torch.manual_seed(0)
        model = nn.Sequential(Numbers(is_wrong=is_wrong), Between(), Between(), Reads())
        try:
            step(ctx, model, torch.randn(4, LENGTH, 8))
        except PrepareError as error:
            return str(error.got)
        return ""

    found = ranks.run(rank, 4, default_group=True)
    assert all("is off by" in each if is_wrong else not each for each in found), found


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_own_positions_of_a_full_output_leave_the_last_stage(ranks: Simulator) -> None:
    """The forward puts its output together from single positions."""
    ids = torch.randint(WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    expected = Loop(lambda each: torch.stack(each, 1)).double()
    start = {name: each.clone() for name, each in expected.state_dict().items()}
    whole = expected(ids)
    whole.square().sum().backward()

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh=MESH)
        model: Any = Loop(lambda each: torch.stack(each, 1)).double()
        _ = model.load_state_dict(start)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = accel.prepare(ctx, model, optimizer, plan=FEW, example=[ids])
        own = accel.parallel.split_sequence(ctx, {"ids": ids, "out": whole.detach()}, shift=())
        with accel.evaluating(model):
            torch.testing.assert_close(accel.training.forward(ctx, model, own["ids"]), own["out"])
        _, state = accel.forward_backward(
            ctx,
            model,
            begin_batch(ctx),
            own["ids"],
            targets=own["out"],
            loss_fn=lambda out, known: (2 * out * known).sum(),
            weight=len(ids) / 2,
        )
        _ = accel.optimizer_step(ctx, optimizer, state)
        after = accel.get_state_dict(ctx, model, dst=None)
        for name, each in expected.named_parameters():
            torch.testing.assert_close(after[name], each.detach() - each.grad / len(ids))

    _ = ranks.run(rank, 4, default_group=True)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gather", "ring"])
def test_a_model_of_transformers_with_padding_and_its_cache_is_as_in_one_process(
    ranks: Simulator, method: Literal["gather", "ring"]
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs accel-torch[transformers]")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes)
    ids = torch.randint(32, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[::2, 5:] = 0

    def rank(ctx: accel.DistContext, mesh: str) -> Tensor:
        torch.manual_seed(0)
        ctx = accel.replace(ctx, mesh=mesh, plan=Plan(context=method) if mesh else None)
        batch = {"input_ids": ids, "attention_mask": mask}
        model = transformers.LlamaForCausalLM(config).double()
        model = accel.prepare_model(ctx, model, example=batch)
        part = accel.parallel.split_sequence(ctx, batch, shift=())
        targets = part["attention_mask"]
        del part["position_ids"]
        loss, _ = accel.forward_backward(
            ctx,
            model,
            begin_batch(ctx),
            part,
            targets=targets,
            loss_fn=lambda output, kept: (output.logits.logsumexp(-1) * kept).sum(),
            weight=targets.sum(),
        )
        return accel.reduce(ctx, loss * targets.sum()) / accel.reduce(ctx, targets.sum())

    want = rank(accel.single(), "")
    for got in ranks.run(lambda ctx: rank(ctx, MESH), 4, default_group=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
