# SPDX-License-Identifier: Apache-2.0
"""Gradients that a window finds when it begins: noted on their parameters, and cleared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from accel.parallel._unsharded import drop_unsharded, holds_unsharded, unsharded_gradients

_FOUND = "accel_found"  # whether the gradient that a window found holds a value other than zero, as a plain bool


def clear_gradients(*models: nn.Module) -> None:
    """Drop all gradients of models, such as those of a window that is given up. No communication.

    It reaches what `optimizer.zero_grad()` leaves: parameters that no optimizer has, and under `fsdp` the gradients of
    micro-batches whose exchange has not come yet.

    Args:
        models: plain or from `prepare_model`. The `.grad` of their parameters becomes None.
    """
    parameters, sharded = _tables(models)
    for module in sharded:
        parameters += drop_unsharded(module)
    for each in parameters:
        each.grad = None
        if hasattr(each, _FOUND):
            delattr(each, _FOUND)


def note_gradients(models: Iterable[nn.Module]) -> None:
    """Note on each parameter of models whether it holds a gradient now. Waits for the device where one does.

    Args:
        models: that a window begins with.
    """
    parameters, sharded = _tables(models)
    for each in parameters:
        if each.grad is not None:
            setattr(each, _FOUND, _any_nonzero(each.grad))
        elif hasattr(each, _FOUND):
            delattr(each, _FOUND)
    for module in sharded:
        for each, held in unsharded_gradients(module):
            setattr(each, _FOUND, bool(found_gradient(each)) or _any_nonzero(held))


def found_gradient(parameter: torch.Tensor) -> bool | None:
    """Return whether a parameter's gradient held more than zeros when the window began; None if there was none."""
    return cast("bool | None", getattr(parameter, _FOUND, None))


def _tables(models: Iterable[nn.Module]) -> tuple[list[torch.Tensor], list[nn.Module]]:
    """Return the parameters of models, some perhaps twice, and the modules that `fully_shard` was called on.

    It reads tables that torch has no public name for: `parameters()` takes four times as long. A test compares both.
    """
    parameters: list[torch.Tensor | None] = []
    sharded: list[nn.Module] = []
    for model in models:
        _add_tables(model, parameters, sharded)
    return [each for each in parameters if each is not None], sharded


def _add_tables(module: Any, parameters: list[torch.Tensor | None], sharded: list[nn.Module]) -> None:
    parameters += module._parameters.values()
    if holds_unsharded(module):
        sharded.append(module)
    for child in module._modules.values():
        if child is not None:
            _add_tables(child, parameters, sharded)


def _any_nonzero(grad: torch.Tensor) -> bool:
    if hasattr(grad, "placements"):
        with torch.no_grad():
            grad = cast(Any, grad).to_local()
    return bool(grad.count_nonzero() if grad.layout is torch.strided else grad._nnz())
