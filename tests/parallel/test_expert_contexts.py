# SPDX-License-Identifier: Apache-2.0
"""Experts beside context parallelism: ranks that share sequences share experts too, and train as one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from language_models import Run, plan_of, train

from accel.parallel import Axes
from accel.testing import Simulator, simulate

EXPERTS = 8


@functools.cache
def _alone() -> Run:
    return simulate(lambda ctx: train(ctx, "dp=1", experts=EXPERTS), 1, default_group=True)[0]


@pytest.mark.parametrize(
    ("axes", "strategy", "method"),
    [
        (Axes(cp=2, ep=2), "ddp", "gather"),
        (Axes(dp=2, cp=2, ep=4), "fsdp", "ring"),
        pytest.param(Axes(dp=2, cp=2, ep=2), "ddp", "heads", marks=pytest.mark.slow),
        pytest.param(Axes(cp=2, tp=2, ep=4), "fsdp", "gather", marks=pytest.mark.slow),
        pytest.param(Axes(dp_replicate=2, dp_shard=2, cp=2, ep=4), "fsdp", "ring", marks=pytest.mark.slow),
        pytest.param(Axes(pp=2, cp=2, ep=2), "ddp", "heads", marks=pytest.mark.slow),
        pytest.param(Axes(pp=2, dp=2, cp=2, tp=2, ep=8), "fsdp", "ring", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_of_a_sequence_share_experts(ranks: Simulator, axes: Axes, strategy: Any, method: Any) -> None:
    expected = _alone()

    def rank(ctx: Any) -> Run:
        return train(ctx, str(axes), strategy=strategy, experts=EXPERTS, plan=plan_of(EXPERTS, context=method))

    runs = ranks.run(rank, axes.world_size, default_group=True, timeout_s=300)
    for run in runs:
        assert run.norms == pytest.approx(expected.norms, rel=1e-12, abs=1e-12)
        for name, parameter in run.parameters.items():
            torch.testing.assert_close(parameter, expected.parameters[name], rtol=0, atol=1e-10, msg=name)
    assert {name for run in runs for name in run.parameters} == expected.parameters.keys()
