# SPDX-License-Identifier: Apache-2.0
"""Saving from a CUDA device in the background: `pytest -m gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import accel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_what_is_saved_is_of_the_moment_of_the_call_though_kernels_wait(tmp_path: Path) -> None:
    ctx = accel.single("cuda")
    model = nn.Linear(4096, 4096).to(ctx.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for step in range(3):
        for _ in range(20):  # still running when save_state is called
            optimizer.step()
        saving = accel.save_state(ctx, tmp_path, {"model": model, "optimizer": optimizer}, step=step, mode="async")
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for _ in range(20):
            optimizer.step()
        other = nn.Linear(4096, 4096).to(ctx.device)
        accel.load_state(ctx, saving.result(), {"model": other, "optimizer": torch.optim.AdamW(other.parameters())})
        for name, tensor in other.state_dict().items():
            assert tensor.equal(expected[name]), name


def test_the_copy_is_pinned_and_of_the_device_as_it_was() -> None:
    from ckpt_helpers import copy_to_host

    tensors = {"a": torch.arange(10, device="cuda").to(torch.bfloat16), "b": torch.ones(2, 3, device="cuda").t()}
    copies = copy_to_host(tensors, {}, accel.single("cuda:0").streams)
    tensors["a"].zero_()
    assert all(copy.is_pinned() for copy in copies.values())
    assert copies["a"].tolist() == list(range(10))
    assert copies["b"].shape == (3, 2)
