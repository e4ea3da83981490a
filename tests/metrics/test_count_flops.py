# SPDX-License-Identifier: Apache-2.0
"""FLOPs against arithmetic, on the meta device and with values; nothing changes, and nothing fails."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accel


class Attention(nn.Module):
    """Causal attention; `peeks` reads a value, which the meta device cannot."""

    def __init__(self, *, peeks: bool) -> None:
        super().__init__()
        self.peeks = peeks

    def forward(self, q: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.peeks:
            assert q.sum().item() is not None
        return {"out": nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)}


ATTENTION = 4 * 2 * 8 * 32 * 32 * 16
CASES = {
    "linear": (nn.Linear(16, 32), (4, 16), 2 * 4 * 16 * 32),
    "conv": (nn.Conv2d(3, 8, 3, padding=1), (2, 3, 8, 8), 2 * 2 * 64 * 8 * 27),
    "depthwise": (nn.Conv2d(16, 16, 3, padding=1, groups=16), (2, 16, 8, 8), 2 * 2 * 64 * 16 * 9),
    "transposed": (nn.ConvTranspose2d(16, 8, 3, stride=2), (2, 16, 8, 8), 2 * 2 * 64 * 16 * 8 * 9),
    "attention": (Attention(peeks=False), (2, 8, 32, 16), ATTENTION),
    "attention with values": (Attention(peeks=True), (2, 8, 32, 16), ATTENTION),
}


@pytest.mark.parametrize(("model", "shape", "forward"), CASES.values(), ids=CASES)
def test_flops_are_those_of_arithmetic(model, shape, forward):
    count = accel.metrics.count_flops(model, torch.rand(shape, requires_grad=True))
    assert count == accel.metrics.FlopCount(forward, 3 * forward)


def test_a_live_model_stays_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    stream = torch.get_rng_state()

    class Peeks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x) * x.sum().item()

    for counted in (model, Peeks()):
        assert accel.metrics.count_flops(counted, torch.ones(8, 4)).total == 2 * (2 * 8 * 4 * 4)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(each.grad is None for each in model.parameters())


def test_a_model_that_cannot_be_counted_says_why():
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("no such expert")

    count = accel.metrics.count_flops(Fails(), torch.ones(1))
    assert count.total is None
    assert count.per_sample(4) is None
    assert "KeyError: 'no such expert'" in count.unknown
