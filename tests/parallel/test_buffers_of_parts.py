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

    features: Tensor | None
    positions: Tensor | None

    def __init__(self, *, are_set: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)
        self.register_buffer("features", torch.zeros(WIDTH) if are_set else None)
        self.register_buffer("positions", torch.zeros(LENGTH, 4) if are_set else None)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.training:
            self.features = _averaged(self.features, hidden.mean((0, 1)))
        y = self.down(torch.relu(hidden if self.features is None else hidden - self.features))
        if self.training:
            self.positions = _averaged(self.positions, y.mean(0))
        scores = (y @ y.transpose(-1, -2)).softmax(-1)
        return x + scores @ (y if self.positions is None else y - self.positions)


def _averaged(average: Tensor | None, new: Tensor) -> Tensor:
    return new.detach() if average is None else (0.9 * average + 0.1 * new).detach()


def train(ctx: accel.DistContext, mesh: str, *, are_set: bool) -> dict[str, Tensor]:
    ctx = accel.replace(ctx, mesh=mesh)
    torch.manual_seed(0)
    net, x = Averages(are_set=are_set).double(), torch.randn(2, LENGTH, 4, dtype=torch.float64)
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


@pytest.mark.parametrize("are_set", [True, False])
@pytest.mark.parametrize(
    ("mesh", "size"), [("tp=2", 2), ("cp=2", 2), pytest.param("tp=2,cp=2", 4, marks=pytest.mark.slow)]
)
def test_buffers_that_a_forward_replaces_are_those_of_one_process(
    ranks: Simulator, mesh: str, size: int, *, are_set: bool
) -> None:
    expected = train(accel.single(), "", are_set=are_set)
    for found in ranks.run(lambda ctx: train(ctx, mesh, are_set=are_set), size, default_group=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
