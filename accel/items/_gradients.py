# SPDX-License-Identifier: Apache-2.0
"""Gradients of live items, which a loaded checkpoint drops."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from accel.items._parts import without_parts
from accel.optim import parameters_of
from accel.parallel import clear_gradients, clear_parameters


def drop_gradients(items: Mapping[str, object]) -> None:
    """Drop the gradients of modules and of optimizers' parameters. No communication."""
    live = without_parts(items).values()
    clear_gradients(*(each for each in live if isinstance(each, nn.Module)))
    clear_parameters(parameters_of(each for each in live if isinstance(each, Optimizer)))
