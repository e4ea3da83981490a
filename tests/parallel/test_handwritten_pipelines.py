# SPDX-License-Identifier: Apache-2.0
"""Any hand-written model trains and evaluates in stages as in a plain loop in float64."""

from __future__ import annotations

from typing import Any

import pytest
from handwritten import MODELS, Handwritten, named
from handwritten_runs import compare, piped, plain

import accel
from accel.errors import PrepareError, StageError
from accel.parallel import Plan
from accel.testing import Simulator

# of torch, for a reentrant checkpoint in a forward without gradients
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
# Each stands for a kind: words, free parameters, frozen stages, residuals outside of modules, two inputs, skips,
# buffers, a list, attributes, hooks, a checkpoint, and calls in another order than that of registration.
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
REFUSED = {  # in four stages
    "lstm": "fewer calls of modules than stages",
    "gru": "fewer calls of modules than stages",
    "dlrm": "stages would compute too much again",
}


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


@pytest.mark.nightly
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("each", MODELS, ids=lambda each: each.name)
def test_any_number_of_stages_is_the_model(ranks: Simulator, each: Handwritten, stages: int) -> None:
    if stages == 4 and each.name in REFUSED:
        with pytest.raises((PrepareError, StageError), match=REFUSED[each.name]):
            _check(ranks, each, stages)
        return
    _check(ranks, each, stages)
