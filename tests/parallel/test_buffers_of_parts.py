# SPDX-License-Identifier: Apache-2.0
"""A forward that assigns what it has computed to a buffer, as a running average: the buffer is whole on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accel
from accel.parallel.parts import PartTensor
from accel.testing import Simulator

WIDTH, LENGTH = 16, 8


class Averages(nn.Module):
    """Subtracts averages of hidden features, and of positions, and keeps both in buffers that it replaces."""

    features: Tensor
    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)
        self.register_buffer("features", torch.zeros(WIDTH))
        self.register_buffer("positions", torch.zeros(LENGTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.training:
            self.features = (0.9 * self.features + 0.1 * hidden.mean((0, 1))).detach()
        y = self.down(torch.relu(hidden - self.features))
        if self.training:
            self.positions = (0.9 * self.positions + 0.1 * y.mean(0)).detach()
        scores = (y @ y.transpose(-1, -2)).softmax(-1)
        return x + scores @ (y - self.positions)


def train(ctx: accel.DistContext, mesh: str) -> dict[str, Tensor]:
    ctx = accel.replace(ctx, mesh=mesh)
    torch.manual_seed(0)
    net, x = Averages().double(), torch.randn(2, LENGTH, 4, dtype=torch.float64)
    example = x if "tp" in mesh else None
    model, optimizer = accel.prepare(ctx, net, torch.optim.SGD(net.parameters(), lr=0.1), example=example)
    state, own = accel.train_state(ctx), accel.parallel.split_sequence(ctx, {"x": x})["x"]
    for _ in range(3):
        loss = model(own).square().mean()
        state = accel.backward(ctx, loss, state.next(), weight=own.shape[1])
        state = accel.optimizer_step(ctx, optimizer, state)
    inner: Any = accel.unwrap_model(model)
    assert not isinstance(inner.features, PartTensor)
    assert not isinstance(inner.positions, PartTensor)
    return accel.get_state_dict(ctx, model, dst=None)


@pytest.mark.parametrize(("mesh", "size"), [("tp=2", 2), ("cp=2", 2), ("tp=2,cp=2", 4)])
def test_buffers_that_a_forward_replaces_are_those_of_one_process(ranks: Simulator, mesh: str, size: int) -> None:
    expected = train(accel.single(), "")
    for found in ranks.run(lambda ctx: train(ctx, mesh), size, default_group=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
