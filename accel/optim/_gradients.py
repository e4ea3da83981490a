# SPDX-License-Identifier: Apache-2.0
"""The gradients of optimizers, and in-place passes over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.optim import Optimizer

from accel.optim import _foreach
from accel.tensors import is_partial, local_part, local_parts, summed


def parameters_of(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """List the optimizers' parameters, in their order."""
    return [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]


def gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """List the gradients of parameters that have one, in order, each once.

    Partial gradients, as tensor parallelism leaves some, are summed over ranks first: a collective where there are any.
    """
    found: dict[int, torch.Tensor] = {}
    for each in parameters:
        grad = each.grad
        if grad is None:
            continue
        if type(grad) is not torch.Tensor and is_partial(grad):  # the cheap question first: there are many
            each.grad = grad = summed(grad)
        found[id(each)] = grad
    return list(found.values())


def scale_(grads: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply gradients in place, in one pass. No communication.

    Args:
        grads: of any dtypes, devices and placements.
        factor: a number, or a tensor of shape [].
    """
    parts = local_parts(grads)
    if isinstance(factor, torch.Tensor) and parts[0].dtype in (torch.float32, torch.float64):
        factor = factor.to(parts[0].dtype)  # torch multiplies lists in one kernel only if dtypes are equal
    _foreach.mul_(parts, factor)


def clamp_(grads: Sequence[torch.Tensor], bound: float | torch.Tensor) -> None:
    """Clamp every element of gradients to [-bound, bound], in place. No communication.

    Args:
        grads: of any dtypes, devices and placements.
        bound: a number, or a tensor of shape [].
    """
    parts = local_parts(grads)
    if isinstance(bound, torch.Tensor):
        for part in parts:
            limit = bound.to(part.dtype)
            _ = part.clamp_(-limit, limit)
    else:
        _foreach.clamp_(parts, bound)


def first_nonfinite(parameters: Sequence[torch.Tensor]) -> int:
    """Return the index of the first parameter with inf or NaN in this rank's gradient; their number if none has."""
    for at, parameter in enumerate(parameters):
        if parameter.grad is not None and not bool(torch.isfinite(local_part(parameter.grad)).all()):
            return at
    return len(parameters)
