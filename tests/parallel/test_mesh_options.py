# SPDX-License-Identifier: Apache-2.0
"""Recomputed activations, compiled blocks and the loss scale of fp16 on every axis of a mesh."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import pytest
import torch
from language_models import STYLES, Block, make_objects, plan_of, rows
from steps import begin_batch
from torch import Tensor
from torch.utils.data import DataLoader

import accel
from accel.parallel import Axes
from accel.testing import Simulator, simulate

MESHES = [
    (Axes(dp=2), "ddp"),
    (Axes(dp=2), "fsdp"),
    (Axes(tp=2), "ddp"),
    (Axes(cp=2), "ddp"),
    (Axes(pp=2), "ddp"),
    (Axes(pp=2, tp=2), "ddp"),
    (Axes(dp=2, tp=2), "fsdp"),
    (Axes(cp=2, tp=2), "ddp"),
    (Axes(dp=2, ep=2), "fsdp"),
    (Axes(dp=2, tp=2, ep=2), "ddp"),
]
ON_EACH = pytest.mark.parametrize(("axes", "strategy"), MESHES, ids=str)


def _train(ctx: accel.DistContext, how: str, experts: int) -> list[tuple[bool, float]]:
    """Whether each step was taken, and the norm of its gradients."""
    model, optimizer = make_objects(ctx, experts=experts)
    if "recompute" in how:
        accel.checkpoint_activations(model, Block, keep="products" if "products" in how else ())
    if "compile" in how:
        accel.compile_model(model, Block, backend="aot_eager")
    if "fp16" in how:
        model.float()
    loader = accel.prepare_loader(ctx, DataLoader(rows(6), batch_size=4), global_batch=4)
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan_of(experts, context="heads"))
    state = accel.train_state(ctx)
    if "fp16" in how:
        state = msgspec.structs.replace(state, scaler=accel.loss_scale(ctx, initial=256.0))
    dtype = torch.float32 if "fp16" in how else torch.float64

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return accel.parallel.vocab_cross_entropy(ctx, logits.flatten(0, 1).to(dtype), targets.flatten())

    steps: list[tuple[bool, float]] = []
    for batch in accel.batches(ctx, loader, state):
        state = state.next(batch)
        labels = batch.data.clone()
        labels[int(batch.valid) :] = -100  # stand-ins
        part = accel.parallel.split_sequence(ctx, {"ids": batch.data, "labels": labels})
        wanted = part.pop("labels")
        weight = (wanted != -100).sum()
        _, state = accel.forward_backward(ctx, model, state, part, targets=wanted, loss_fn=loss_of, weight=weight)
        state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.5)
        steps.append((state.stepped, 0.0 if state.grad_norm is None else float(state.grad_norm)))
    return steps


@functools.cache
def _alone(precision: Any, experts: int) -> list[tuple[bool, float]]:
    """The steps of one process, neither recomputed nor compiled."""

    def rank(ctx: accel.DistContext) -> Any:
        return _train(accel.replace(ctx, mesh="dp=1", precision=precision), precision or "", experts)

    return simulate(rank, 1, default_group=True)[0]


def assert_steps_as_one_process(
    ranks: Simulator, axes: Axes, strategy: Any, how: str, *, rel: float, precision: Any = None
) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        return _train(accel.replace(ctx, mesh=str(axes), precision=precision, strategy=strategy), how, experts)

    experts = 4 if axes.ep > 1 else 0
    expected = _alone(precision, experts)
    found = ranks.run(rank, axes.world_size, default_group=True, timeout_s=300)
    for steps in found:
        assert [stepped for stepped, _ in steps] == [stepped for stepped, _ in expected]
        assert [norm for _, norm in steps] == pytest.approx([norm for _, norm in expected], rel=rel)


def test_recomputed_stages_are_those_of_one_process(ranks: Simulator) -> None:
    assert_steps_as_one_process(ranks, Axes(pp=2), "ddp", "recompute", rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "strategy", "how"),
    [
        *((*mesh, "recompute") for mesh in MESHES),
        *((*mesh, "recompute products") for mesh in (*MESHES[1:5], MESHES[8])),
    ],
    ids=str,
)
def test_recomputed_blocks_are_those_of_one_process(ranks: Simulator, axes: Axes, strategy: str, how: str) -> None:
    assert_steps_as_one_process(ranks, axes, strategy, how, rel=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch makes an autograd function while it traces one, and warns of it
@pytest.mark.parametrize(
    ("axes", "strategy", "how"),
    [
        *((*mesh, "compile") for mesh in (*MESHES[3:5], MESHES[9])),
        *((*mesh, "recompute compile") for mesh in (MESHES[1], MESHES[8])),
    ],
    ids=str,
)
def test_compiled_blocks_are_those_of_one_process(ranks: Simulator, axes: Axes, strategy: str, how: str) -> None:
    """Blocks with experts along tp and ep, and recomputed ones with scalars under fsdp, run uncompiled."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    assert_steps_as_one_process(ranks, axes, strategy, how, rel=1e-12)
    is_compiled = "recompute" not in how and not (axes.tp > 1 and axes.ep > 1)
    assert bool(torch._dynamo.utils.counters["stats"]["unique_graphs"]) == is_compiled


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_recomputed_blocks_that_torch_compiles_see_all_positions(ranks: Simulator) -> None:
    torch.compiler.reset()
    assert_steps_as_one_process(ranks, Axes(cp=2), "ddp", "recompute compile", rel=1e-12)


@pytest.mark.slow
@ON_EACH
def test_a_loss_scale_of_fp16_takes_the_steps_of_one_process(ranks: Simulator, axes: Axes, strategy: str) -> None:
    assert_steps_as_one_process(ranks, axes, strategy, "fp16", rel=2e-2, precision="fp16")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gather", "ring"])
@pytest.mark.parametrize("keep", ["products", ("aten.addmm.default",)])
def test_kept_outputs_are_those_of_one_process_by_any_method(ranks: Simulator, method: Any, keep: Any) -> None:
    def rank(ctx: accel.DistContext, mesh: str) -> float:
        ctx = accel.replace(ctx, mesh=mesh)
        model, optimizer = make_objects(ctx)
        accel.checkpoint_activations(model, Block, keep=keep)
        plan = accel.parallel.Plan(tensor=STYLES, context=method)
        model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan)
        part = accel.parallel.split_sequence(ctx, {"ids": rows(4)}, shift=())
        state = begin_batch(ctx)
        _, state = accel.forward_backward(
            ctx, model, state, part, loss_fn=lambda logits: logits.square().sum(), weight=part["ids"].numel()
        )
        return float(accel.optimizer_step(ctx, optimizer, state, max_norm=0.5).grad_norm)

    (expected,) = ranks.run(lambda ctx: rank(ctx, "dp=1"), 1, default_group=True)
    assert ranks.run(lambda ctx: rank(ctx, "cp=2"), 2, default_group=True) == pytest.approx([expected] * 2, rel=1e-12)
