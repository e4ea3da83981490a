# SPDX-License-Identifier: Apache-2.0
"""A model to a device, its parameters as the objects that optimizers know."""

from __future__ import annotations

import torch
from torch import nn

from accel.tensors import become


def move_model(model: nn.Module, device: torch.device) -> None:
    """Move a model's parameters and buffers in place; those on the meta device stay there.

    To XLA and to devices that packages register `Module.to` would put new parameters into the model, and leave the
    optimizer with those on the CPU. DTensors would lose their attributes by it, even where they do not move.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if all(each.device == device or each.is_meta for each in tensors):
        return
    if not any(each.is_meta for each in tensors) and _keeps_parameters(device):
        model.to(device)
        return
    for tensor in tensors:
        if tensor.device == device or tensor.is_meta:
            continue
        there: torch.Tensor = tensor.detach().to(device)
        if isinstance(tensor, nn.Parameter):
            there = nn.Parameter(there, tensor.requires_grad)
            there.grad_dtype = tensor.grad_dtype
        become(tensor, there)


def _keeps_parameters(device: torch.device) -> bool:
    """Return whether `Module.to` leaves parameters the objects that they are on the way from the CPU to a device."""
    probe = nn.Module()
    probe.parameter = parameter = nn.Parameter(torch.empty(0, device="cpu"))
    return probe.to(device).parameter is parameter
