# SPDX-License-Identifier: Apache-2.0
"""Sums of losses of micro-batches, from the user's function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accel.context import DistContext
from accel.parallel.pipeline import MicroBatch, first_rows, first_tensor
from accel.training._backward import check_loss

LossFn = Callable[..., torch.Tensor]


class LossSums:
    """Sums of losses, one for each micro-batch.

    Attributes:
        factor: factor of their gradients.
        found: the sums so far, detached.
    """

    def __init__(self, ctx: DistContext, loss_fn: LossFn, factor: float | torch.Tensor) -> None:
        self.factor = factor
        self.found: list[torch.Tensor] = []
        self._ctx = ctx
        self._loss_fn = loss_fn

    def of(self, output: Any, batch: MicroBatch) -> torch.Tensor:
        """Return the sum of a micro-batch's losses; rows that fill it up are left out."""
        containers = self._ctx.containers
        if not batch.rows.real:
            found = first_tensor(output).flatten()[:0].sum()
        else:
            given = () if batch.targets is None else (first_rows(batch.targets, batch.rows, containers),)
            found = self._loss_fn(first_rows(output, batch.rows, containers), *given)
            check_loss(found, "forward_backward", "Return the sum over the real units: loss.sum().")
        if found.dtype in (torch.float16, torch.bfloat16):
            found = found.float()  # weight times scale does not fit into 16 bits
        self.found.append(found.detach())
        return found

    def scaled(self, output: Any, batch: MicroBatch) -> torch.Tensor:
        """Return what backward runs from."""
        found = self.of(output, batch)
        if isinstance(self.factor, torch.Tensor):
            return found * self.factor.detach().to(found.device, found.dtype)
        return found * self.factor
