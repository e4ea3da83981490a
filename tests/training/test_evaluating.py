# SPDX-License-Identifier: Apache-2.0
"""Evaluation mode: what is switched, and that everything is in its former mode afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from steps import begin_batch
from torch import nn

import accel
from accel.errors import ConfigError


class Averaging(torch.optim.SGD):
    """Has two sets of weights as schedule-free optimizers have, but its averaged ones are the others' negatives."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["train_mode"] = False

    def _switch(self, train: bool) -> None:
        group = self.param_groups[0]
        if group["train_mode"] != train:
            group["train_mode"] = train
            with torch.no_grad():
                for parameter in group["params"]:
                    parameter.neg_()

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)


@pytest.mark.parametrize("trains", [True, False])
def test_modes_and_weights_come_back_as_they_were(trains: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    model[1].eval()
    averaging, plain = Averaging(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    if trains:
        averaging.train()
    before = model[0].weight.detach().clone()
    with pytest.raises(KeyError), accel.evaluating(model, averaging, plain):  # noqa: PT012 - the whole block is tested
        assert not any(module.training for module in model.modules())
        assert torch.equal(model[0].weight, -before if trains else before)
        raise KeyError
    assert [module.training for module in model.modules()] == [True, True, False, True]
    assert averaging.param_groups[0]["train_mode"] == trains
    assert torch.equal(model[0].weight, before)


def test_something_else_is_refused_before_anything_is_switched() -> None:
    model: Any = nn.Linear(2, 2)
    with assert_raises(ConfigError, got="str", where="evaluating, argument 2"), accel.evaluating(model, "optimizer"):
        pass
    assert model.training


@pytest.mark.parametrize("name", ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"])
def test_schedule_free_optimizers_train_evaluate_and_resume(name: str, tmp_path: Path) -> None:
    schedulefree = pytest.importorskip("schedulefree")
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    targets = inputs @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]])

    def train(steps: int, out: str) -> tuple[list[float], torch.Tensor]:
        ctx = accel.single()
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = getattr(schedulefree, name)(model.parameters(), lr=0.05)
        optimizer.train()
        model, optimizer = accel.prepare(ctx, model, optimizer)
        losses = []
        state = accel.train_state(ctx)
        if found := accel.latest_checkpoint(tmp_path / out):
            loaded = accel.load_state(ctx, found, {"model": model, "optimizer": optimizer, "state": state})
            state = loaded["state"]
        while state.updates < steps:
            state = begin_batch(ctx, state)
            with accel.accumulate(ctx, state, model):
                state = accel.backward(ctx, (model(inputs) - targets).square().mean(), state)
            state = accel.optimizer_step(ctx, optimizer, state, max_norm=10.0)
            with torch.no_grad(), accel.evaluating(model, optimizer):
                losses.append((model(inputs) - targets).square().mean().item())
        items = {"model": model, "optimizer": optimizer, "state": state}
        accel.save_state(ctx, tmp_path / out, items, step=steps)
        return losses, model.weight.detach()

    train(10, "stopped")
    resumed, weight = train(60, "stopped")
    straight, expected = train(60, "straight")
    assert resumed == straight[10:]
    assert torch.equal(weight, expected)
    assert straight[-1] < 0.9 * straight[0]
