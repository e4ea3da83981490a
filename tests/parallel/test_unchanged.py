# SPDX-License-Identifier: Apache-2.0
"""A forward that is none of the user's: values are put back, and what installs hooks knows later that it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel.parallel._calls import unchanged


class Installs(nn.Module):
    """Installs hooks in its first forward and notes that it has, as models of transformers do.

    Args:
        removed: hooks of others to remove at the same time.
    """

    def __init__(self, removed: int) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(2, 2), 0
        self.register_buffer("calls", torch.zeros(()))
        self.others = [self.linear.register_forward_hook(lambda *_: None) for _ in range(removed)]

    def _counts(self, *_inputs: Any) -> None:
        self.count += 1

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if not getattr(self, "installed", False):
            for each in self.others:
                each.remove()
            _ = self.linear.register_forward_hook(self._counts)
            self.installed = True
        return self.linear(x)


@pytest.mark.parametrize("removed", [0, 1, 2])
def test_hooks_of_a_forward_are_installed_once(removed: int) -> None:
    model = Installs(removed)
    with unchanged(model):
        _ = model(torch.ones(1, 2))
    assert (model.count, float(model.calls)) == (0, 0.0)
    _ = model(torch.ones(1, 2))
    assert (model.count, float(model.calls)) == (1, 1.0)
