# SPDX-License-Identifier: Apache-2.0
"""Any hand-written model trains and evaluates in stages as in a plain loop in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from handwritten import MODELS, Handwritten, named
from handwritten_runs import compare, piped, plain

import accel
from accel.errors import PrepareError
from accel.parallel import Plan
from accel.testing import Simulator

# of torch, for a reentrant checkpoint in a forward without gradients
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
# Each stands for a kind: words, free parameters, residuals outside of modules, a bias that is passed on, two inputs,
# skips, statistics, buffers, side doors, frozen stages, and calls in another order than that of registration.
FEW = (
    "nano_gpt",
    "min_gpt",
    "lora_of_last_block",
    "residuals_between",
    "dlrm",
    "unet",
    "spectral_norm",
    "listed_losses",
    "aux_attribute",
    "hooked_features",
    "reentrant",
    "backwards",
)
OUTPUTS = ("nano_gpt", "dlrm", "hooked_features")
CALLS = {"lstm": 3, "gru": 3}  # calls of modules, where there are fewer than four


def _check(ranks: Simulator, each: Handwritten, stages: int, *, evaluates: bool = True) -> None:
    micro = 3 if stages == 2 else 4
    ragged = 7 if "batch_norm" not in each.tags else 2 * micro
    plan = Plan(micro_batches=micro)

    def run(ctx: accel.DistContext) -> Any:
        return piped(ctx, each, f"pp={stages}", plan, rows=ragged, evaluates=evaluates)

    expected = plain(each, micro, rows=ragged)
    is_joint = "rows" in each.tags  # its output depends on the samples that a micro-batch has
    assert compare(ranks.run(run, stages, default_group=True), expected, outputs=not is_joint) == []


@pytest.mark.parametrize("each", named(*FEW), ids=lambda each: each.name)
def test_two_stages_are_the_model(ranks: Simulator, each: Handwritten) -> None:
    _check(ranks, each, 2, evaluates=each.name in OUTPUTS)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("each", MODELS, ids=lambda each: each.name)
def test_any_number_of_stages_is_the_model(ranks: Simulator, each: Handwritten, stages: int) -> None:
    if CALLS.get(each.name, stages) < stages:
        with pytest.raises(PrepareError, match="fewer calls of modules than stages"):
            _check(ranks, each, stages)
        return
    _check(ranks, each, stages)


def _holdings(ctx: accel.DistContext, each: Handwritten, mesh: str) -> tuple[set[str], set[str], int]:
    ctx = accel.replace(ctx, mesh=mesh)
    model: Any = each.make()
    before = [*model.parameters()]
    optimizer = torch.optim.SGD([one for one in before if one.requires_grad], lr=0.1)
    model, optimizer = accel.prepare(ctx, model, optimizer, plan=Plan(micro_batches=2), example=each.batch(6, 4).inputs)
    inner = accel.unwrap_model(model)
    held = {id(one) for one in inner.parameters()}
    for one in before:
        if id(one) not in held:
            assert one.numel() == 0 or one.isnan().all()
    batch = each.batch(5, 4)
    scale, window = accel.loss_scale(ctx), accel.Accumulation(1).next()
    _ = accel.forward_backward(
        ctx, model, scale, window, batch.inputs, targets=batch.targets, loss_fn=each.loss, weight=4
    )
    named = dict(inner.named_parameters())
    idle = {name for name, one in named.items() if one.requires_grad and one.grad is None}
    return set(named), idle, sum(one.numel() for one in inner.parameters())


@pytest.mark.parametrize("each", named("nano_gpt", "towers", "residuals_between"), ids=lambda each: each.name)
def test_a_stage_has_nothing_but_its_own(ranks: Simulator, each: Handwritten) -> None:
    found = ranks.run(lambda ctx: _holdings(ctx, each, "pp=2"), 2, default_group=True)
    model = each.make()
    whole = sum(one.numel() for one in model.parameters())
    assert set().union(*(names for names, _, _ in found)) == {name for name, _ in model.named_parameters()}
    assert [idle for _, idle, _ in found] == [set(), set()]
    assert max(elements for _, _, elements in found) < 0.8 * whole
