# SPDX-License-Identifier: Apache-2.0
"""Models that Accelerate has offloaded are refused at prepare; those with all of their weights pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from catching import assert_raises
from torch import nn

import accel

accelerate = pytest.importorskip("accelerate")


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


def on_gpus(model: nn.Module, folder: Path) -> None:
    """Hooks as of a model that lies on two GPUs."""
    for module, device in zip((model[0], model[1]), (0, torch.device("cuda:1")), strict=True):
        module._hf_hook = SimpleNamespace(execution_device=device, offload=False)


OFFLOADED: list[Callable[[Any, Path], object]] = [
    lambda model, folder: accelerate.cpu_offload(model, torch.device("cpu")),
    lambda model, folder: accelerate.disk_offload(model, str(folder), torch.device("cpu")),
    lambda model, folder: accelerate.dispatch_model(
        model, {"0": "cpu", "1": "disk"}, main_device="cpu", offload_dir=str(folder)
    ),
    on_gpus,
]


@pytest.mark.parametrize("offload", OFFLOADED)
def test_models_that_accelerate_offloaded_are_refused(tmp_path: Path, offload: Callable[[Any, Path], object]) -> None:
    model = make()
    offload(model, tmp_path)
    refused = assert_raises(
        accel.errors.PrepareError, problem="Accelerate has dispatched", fix=r"load_checkpoint_and_dispatch\("
    )
    with refused as caught:
        accel.prepare_model(accel.single("cpu"), model)
    assert "remove_hook_from_module(model, recurse=True)" in caught.value.fix


def test_a_wrapped_or_second_model_is_looked_at_too() -> None:
    model = make()
    holder = nn.ModuleDict({"inner": model})
    accelerate.cpu_offload(model, torch.device("cpu"))
    with assert_raises(accel.errors.PrepareError, got=r"2 offloaded modules, such as 'inner\.0'"):
        accel.prepare(accel.single("cpu"), make(), holder)


def test_models_with_all_weights_pass() -> None:
    ctx, x = accel.single("cpu"), torch.ones(1, 4)
    whole = accelerate.dispatch_model(make(), {"": "cpu"})
    hooked = make()
    accelerate.hooks.attach_align_device_hook(hooked, execution_device="cpu")  # moves inputs alone
    back = make()
    expected = back(x)
    accelerate.cpu_offload(back, torch.device("cpu"))
    accelerate.hooks.remove_hook_from_module(back, recurse=True)
    for model in (whole, hooked, back):
        assert accel.prepare_model(ctx, model)(x).shape == (1, 4)
    assert torch.equal(back(x), expected)
