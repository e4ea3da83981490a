# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments and wrong calls of replica groups, in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accel

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]
torchft = pytest.importorskip("accel.engines.torchft")


def test_a_model_of_another_shape_is_refused_and_stays() -> None:
    from accel.engines.torchft._healing import capture, restore

    state = accel.train_state(accel.single("cpu"))
    taken = capture({"model": nn.Linear(4, 1)}, state)
    wide, narrow = nn.Linear(4, 3), nn.Linear(4, 1).double()
    before = wide.bias.detach().clone()
    with pytest.raises(accel.ConfigError, match=r"expected model\.weight \[1, 4\] .*, got model\.weight \[3, 4\]"):
        restore({"model": wide}, taken)
    assert torch.equal(wide.bias, before)
    with pytest.raises(accel.ConfigError, match=r"got .*model\.bias \[1\] torch\.float64"):
        restore({"model": narrow}, taken)
