# SPDX-License-Identifier: Apache-2.0
"""A model to a device, its parameters as the objects that optimizers know."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn


def move_model(model: nn.Module, device: torch.device) -> None:
    """Move a model's parameters and buffers in place.

    To XLA `Module.to` would put new parameters into the model, and leave the optimizer with those on the CPU. DTensors
    would lose their attributes by it, even where they do not move.
    """
    if all(each.device == device for each in (*model.parameters(), *model.buffers())):
        return
    if device.type != "xla":
        model.to(device)
        return
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device == device:
            continue
        there: torch.Tensor = tensor.detach().to(device)
        if isinstance(tensor, nn.Parameter):
            there = nn.Parameter(there, tensor.requires_grad)
        vars(there).update(vars(tensor))
        cast(Any, torch.utils).swap_tensors(tensor, there)
