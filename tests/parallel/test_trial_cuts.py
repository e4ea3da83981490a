# SPDX-License-Identifier: Apache-2.0
"""The refusal of a model that is no chain names a cut by tracing where a trial works, and else what the trace met."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accel.parallel.axes.pipeline._trial import skeleton_of
from catching import caught
from pipelines import Words, batch_of, loss_sum
from torch import nn

import accel
from accel.errors import PrepareError, StageError
from accel.parallel import Plan
from accel.testing import Simulator

OFFER = 'works in a trial: accel.prepare(ctx, model, optimizer, plan=accel.parallel.Plan(cut="trace"'


class Scaled(Words):
    """Computes behind its head, in each stage."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 2


class Chosen(Words):
    """The same, by a path that depends on values."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = super().forward(ids)
        return logits * 2 if logits.sum() != 0 else logits  # the line that the error names


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Two(nn.Module):
    """Two lists of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.ModuleList(Layer() for _ in range(2)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one, other in zip(self.first, self.second, strict=True):
            x = x + one(x) * other(x)
        return x


def _gradients(ctx: accel.DistContext, make: Any, plan: Plan | None, **prepare: Any) -> dict[str, torch.Tensor]:
    ctx = accel.replace(ctx, mesh="pp=2") if ctx.world_size > 1 else ctx
    model = accel.prepare_model(ctx, make(), plan=plan, **prepare)
    ids, targets = batch_of(0, 4)
    given = (accel.loss_scale(ctx), None, ids)
    _ = accel.forward_backward(ctx, model, *given, targets=targets, loss_fn=loss_sum, weight=1)
    named = accel.unwrap_model(model).named_parameters()
    return {name: each.grad for name, each in named if each.grad is not None}


def test_the_first_batch_offers_the_line_and_the_line_computes_as_one_process(ranks: Simulator) -> None:
    def refused(ctx: accel.DistContext) -> Any:
        return caught(lambda: _gradients(ctx, Scaled, Plan(micro_batches=2)))

    for error in ranks.run(refused, 2, default_group=True):
        assert isinstance(error, StageError)
        assert "the forward changes what the last module of a stage returns" in error.problem
        assert OFFER + ", micro_batches=2), example=batch)." in error.fix
    offered = Plan(cut="trace", micro_batches=2)
    expected = _gradients(accel.single(), Scaled, None)
    every = ranks.run(lambda ctx: _gradients(ctx, Scaled, offered, example=batch_of(0, 4)[0]), 2, default_group=True)
    assert {name for own in every for name in own} == set(expected)
    for own in every:
        torch.testing.assert_close(own, {name: expected[name] for name in own}, rtol=0, atol=1e-12)


TENSOR: Any = {"blocks.*.linear": "colwise_gather_output"}
STAGES = (("embed", "blocks.0", "blocks.1"), (*(f"blocks.{at}" for at in range(2, 8)), "norm", "head"))


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (Plan(tensor=TENSOR, stages=STAGES), OFFER + f", tensor={TENSOR!r}, stages={STAGES!r}), example=batch)."),
        (
            Plan(tensor=TENSOR, overlap=True),
            'called, got cut="trace". Leave overlap out: plan=accel.parallel.Plan(cut="trace", overlap=False).',
        ),
    ],
)
def test_the_first_batch_of_divided_stages_offers_the_whole_plan(ranks: Simulator, plan: Plan, told: str) -> None:
    def refused(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh="pp=2,tp=2")
        model = accel.prepare_model(ctx, Scaled(), plan=plan)
        ids, targets = batch_of(0, 4)
        given = (accel.loss_scale(ctx), None, ids)
        run = accel.forward_backward
        return caught(lambda: run(ctx, model, *given, targets=targets, loss_fn=loss_sum, weight=1))

    for error in ranks.run(refused, 4, default_group=True):
        assert isinstance(error, StageError)
        assert told in error.fix


def test_the_first_batch_says_what_a_trace_met(ranks: Simulator) -> None:
    for error in ranks.run(lambda ctx: caught(lambda: _gradients(ctx, Chosen, None)), 2, default_group=True):
        assert isinstance(error, StageError)
        assert "A trial cut by tracing met this: the path of the forward depends on the values" in error.fix
        assert 'cut="trace"' not in error.fix


def _prepared(ctx: accel.DistContext, mesh: str, example: Any, plan: Plan | None = None) -> Any:
    return caught(lambda: accel.prepare_model(accel.replace(ctx, mesh=mesh), Two(), example=example, plan=plan))


@pytest.mark.parametrize(
    ("mesh", "example", "plan", "told"),
    [
        ("pp=2", torch.ones(3, 4), None, OFFER + "), example=batch)."),
        ("pp=2", torch.ones(3, 5), None, "A trial cut by tracing met this: torch cannot export the model"),
        ("pp=2", None, None, "With prepare(..., example=batch), a batch as the model takes it, this error tries a cut"),
        ("pp=2,tp=2", torch.ones(3, 4), Plan(tensor={}), OFFER + ", tensor={}), example=batch)."),
        (
            "pp=2,tp=2",
            torch.ones(3, 4),
            Plan(tensor={"first.*.linear": "colwise_gather_output"}, prefetch=1),
            OFFER + ", tensor={'first.*.linear': 'colwise_gather_output'}, prefetch=1), example=batch).",
        ),
        (
            "dp=2,pp=2",
            torch.ones(3, 4),
            Plan(units=["first.*"]),
            "A cut by tracing is refused, too: a traced stage is sharded as one unit",
        ),
    ],
)
def test_prepare_offers_the_line_where_a_trial_works(
    ranks: Simulator, mesh: str, example: Any, plan: Plan | None, told: str
) -> None:
    world = 2 if mesh == "pp=2" else 4
    for error in ranks.run(lambda ctx: _prepared(ctx, mesh, example, plan), world, default_group=True):
        assert isinstance(error, PrepareError)
        assert "the model has several lists of blocks" in error.problem
        assert told in str(error)
        assert (OFFER in error.fix) == (OFFER in told)


@pytest.mark.slow
def test_a_model_of_transformers_needs_no_example_for_a_trial(ranks: Simulator) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": 60, "d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64}

    def rank(ctx: accel.DistContext) -> Any:
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).double()
        return caught(lambda: accel.prepare_model(accel.replace(ctx, mesh="pp=2"), model))

    for error in ranks.run(rank, 2, default_group=True):
        assert isinstance(error, PrepareError)
        assert OFFER in error.fix


def test_a_skeleton_has_the_modules_ties_and_hooks_of_its_model_and_no_memory() -> None:
    model: Any = Words(tied=True)
    model.again = model.blocks[1]
    before = copy.deepcopy(model.state_dict())
    _ = model.blocks[0].register_forward_hook(lambda *_: None)
    skeleton: Any = skeleton_of(model)
    _ = model.blocks[2].register_forward_hook(lambda *_: None)
    assert skeleton.again is skeleton.blocks[1] is not model.again
    assert skeleton.embed.weight is skeleton.head.weight
    assert all(each.is_meta for each in skeleton.state_dict().values())
    assert [len(each._forward_hooks) for each in skeleton.blocks][:3] == [1, 0, 0]
    names = [name for name, _ in skeleton.named_modules(remove_duplicate=False)]
    assert names == [name for name, _ in model.named_modules(remove_duplicate=False)]
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
