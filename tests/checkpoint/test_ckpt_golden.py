# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of every format that ever was, kept for ever: each loads into what it was made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ckpt_golden import HERE, filled, start
from ckpt_helpers import equal

import accel
from accel.checkpoint._manifest import FORMAT
from accel.context import DistContext
from accel.testing import simulate


def state(items: dict[str, Any]) -> list[Any]:
    slots = [dict(items["optimizer"].state[each]) for each in items["model"].parameters()]
    progress = items["progress"]
    return [dict(items["model"].state_dict()), slots, progress.epoch, progress.best, progress.window, items["extra"]]


@pytest.mark.parametrize("number", range(1, FORMAT + 1))
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_checkpoint_of_every_format_loads(number: int, world: int) -> None:
    def body(ctx: DistContext) -> list[Any]:
        items = start()
        return state(items | accel.load_state(ctx, HERE / f"format-{number}", items))

    assert all(equal(found, state(filled())) for found in simulate(body, world))


@pytest.mark.parametrize("number", range(1, FORMAT + 1))
def test_random_streams_of_every_format_go_on(number: int) -> None:
    def draw(ctx: DistContext) -> tuple[float, float]:
        accel.load_state(ctx, HERE / f"format-{number}", start())
        return torch.rand(1).item(), torch.rand(1, generator=torch.Generator().manual_seed(40 + ctx.rank)).item()

    assert all(drawn == expected for drawn, expected in simulate(draw, 2))
