# SPDX-License-Identifier: Apache-2.0
"""What an error calls a parameter: its name in the optimizer, else in the prepared model, else its place."""

from __future__ import annotations

import io
import math

import pytest
import torch
from catching import assert_raises
from torch import nn

import accel
from accel.errors import NonFiniteError


def _models() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)) for _ in range(2)]


def _spoilt_at(optimizers: list[torch.optim.Optimizer], spoilt: torch.Tensor) -> str:
    ctx = accel.single()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for each in group["params"]:
                each.grad = torch.ones_like(each)
    spoilt.grad.view(-1)[-1] = math.nan
    with pytest.raises(NonFiniteError) as caught:
        accel.training.parts.optimizer_step(ctx, optimizers, accel.LossScale())
    return caught.value.where


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_names_come_from_wherever_they_are_known(named, prepared, count):
    models = _models()[:count]
    if prepared:
        models = [accel.prepare_model(accel.single(), model) for model in models]
    groups = [
        [{"params": list(layer.named_parameters(prefix=str(at)) if named else layer.parameters())} for at, layer in
         enumerate(model)]
        for model in models
    ]  # fmt: skip
    where = _spoilt_at([torch.optim.SGD(each) for each in groups], models[-1][1].bias)
    name = "1.bias" if named or prepared else "param_groups[1]['params'][1]"
    prefix = f"optimizer {count - 1}, " if count > 1 or not (named or prepared) else ""
    assert where == f"{prefix}{name}, shape [1]"


def test_a_norm_that_overflows_by_itself_is_told_apart():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    for each in model.parameters():
        each.grad = torch.full_like(each, 3e38)
    with assert_raises(NonFiniteError, where="the norm of all gradients, each finite by itself"):
        accel.training.parts.optimizer_step(accel.single(), optimizer, accel.LossScale())


def test_labels_leave_no_trace_in_what_is_saved():
    model = accel.prepare_model(accel.single(), nn.Linear(2, 2))
    for content in (model, model.state_dict()):
        torch.save(content, file := io.BytesIO())
        assert b"accel." not in file.getvalue()
    assert list(model.state_dict()) == ["weight", "bias"]
