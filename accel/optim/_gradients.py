# SPDX-License-Identifier: Apache-2.0
"""Passes over the gradients of optimizers: one for their norm, one to multiply them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from accel.optim import _foreach


def gradients(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """List the gradients of the optimizers' parameters, in their order, each once; parameters without are left out."""
    found = {
        id(parameter.grad): parameter.grad
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    }
    return list(found.values())


def total_norm(grads: Sequence[torch.Tensor]) -> float | torch.Tensor:
    """Return the L2 norm of all gradients together; inf or NaN if one of them is not finite.

    Args:
        grads: of any dtypes and devices.

    Returns:
        A number for gradients on the CPU, where reading it waits for nothing; else a tensor of shape [].
    """
    first = grads[0]
    if all(grad.is_cpu for grad in grads):
        return math.hypot(*(norm.item() for norm in _foreach.norms(grads)))
    if any(grad.dtype != first.dtype or grad.device != first.device for grad in grads):
        return get_total_norm(list(grads))
    return get_total_norm(_foreach.norms(grads))


def scale_(grads: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply gradients in place, in one pass.

    Args:
        grads: of any dtypes and devices.
        factor: a number, or a tensor of shape [].
    """
    if isinstance(factor, torch.Tensor) and grads[0].dtype in (torch.float32, torch.float64):
        factor = factor.to(grads[0].dtype)  # torch multiplies lists in one kernel only if dtypes are equal
    _foreach.mul_(grads, factor)


def first_nonfinite(optimizers: Iterable[Optimizer]) -> str:
    """Describe the first parameter whose gradient holds inf or NaN: its name where the optimizer has it, and shape."""
    for at, optimizer in enumerate(optimizers):
        for group_at, group in enumerate(optimizer.param_groups):
            names = cast("list[str] | None", group.get("param_names"))
            for i, parameter in enumerate(group["params"]):
                if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                    place = f"optimizer {at}, param_groups[{group_at}]['params'][{i}]"
                    return f"{names[i] if names else place}, shape {list(parameter.shape)}"
    return "the norm of all gradients, each finite by itself"
