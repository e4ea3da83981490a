# SPDX-License-Identifier: Apache-2.0
"""Blocks that stream from host memory and disk to a CUDA device: `pytest -m gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import accel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WIDTH, DEPTH = 256, 8


def build() -> nn.Module:
    blocks = (nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(DEPTH))
    return nn.Sequential(nn.Embedding(1000, WIDTH), *blocks, nn.Linear(WIDTH, 1000))


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(
    "limits", [{0: "12MB", "cpu": "1GB"}, {0: "12MB", "cpu": "10MB", "disk": None}, {0: "12MB", "disk": None}], ids=str
)
def test_a_streamed_model_computes_what_the_whole_one_does(
    tmp_path: Path, limits: dict[int | str, str | None], slots: int
) -> None:
    """Eight passes without a wait between them, so that a slot filled too early, or read too early, would show."""
    ctx = accel.single("cuda")
    torch.manual_seed(0)
    whole = build().to(ctx.device).eval()
    accel.save_model(ctx, whole, tmp_path)
    inputs = [torch.randint(1000, (8, 128), device=ctx.device) for _ in range(8)]
    with torch.no_grad():
        expected = [whole(each) for each in inputs]
    empty = accel.init_empty_weights(build).eval()
    plan = accel.infer_device_map(accel.bigmodel.describe(empty), limits, slots=slots)
    assert plan.order  # something streams
    with torch.no_grad(), accel.load_checkpoint_and_dispatch(ctx, empty, tmp_path, plan) as run:
        found = [run.model(each) for each in inputs]
    assert all(each.device == ctx.device for each in found)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_weights_and_slots_stay_within_the_limit(tmp_path: Path) -> None:
    ctx = accel.single("cuda")
    accel.save_model(ctx, build(), tmp_path)
    empty = accel.init_empty_weights(build).eval()
    plan = accel.infer_device_map(accel.bigmodel.describe(empty), {0: "12MB", "cpu": "1GB"}, slots=2)
    before = torch.cuda.memory_allocated()
    with torch.no_grad(), accel.load_checkpoint_and_dispatch(ctx, empty, tmp_path, plan) as run:
        _ = run.model(torch.zeros(1, 1, dtype=torch.long, device=ctx.device))
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before <= 12_000_000 + 9_000_000  # cuBLAS keeps a workspace of its own
    del run, empty
