# SPDX-License-Identifier: Apache-2.0
"""A frozen model is spread as a trained one is, so an average of weights or a target network computes with both."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accel
from accel.testing import Simulator

X = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4).sin()


def _updated(ctx: accel.DistContext) -> tuple[dict[str, Tensor], Tensor, int]:
    """Average a frozen copy with weights that have changed; return it, its output and its elements on this rank."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    target = copy.deepcopy(net).requires_grad_(False)
    model, target = accel.prepare(ctx, net, target)
    with torch.no_grad():
        for mine, trained in zip(target.parameters(), model.parameters(), strict=True):
            trained.mul_(3)
            mine.lerp_(trained, 0.5)
        output = target(X)
    parts: list[Any] = [each.to_local() if hasattr(each, "to_local") else each for each in target.parameters()]
    return accel.get_state_dict(ctx, target, dst=None), output, sum(each.numel() for each in parts)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_frozen_copy_on_dp_and_tp_is_averaged_with_the_trained_model(ranks: Simulator, strategy: Any) -> None:
    weights, output, elements = _updated(accel.single())
    found = ranks.run(
        lambda ctx: _updated(accel.replace(ctx, mesh="dp=2,tp=2", strategy=strategy)), 4, default_group=True
    )
    for mine, result, held in found:
        torch.testing.assert_close(mine, weights)
        torch.testing.assert_close(result, output)
        assert strategy == "ddp" or held < elements / 3
