# SPDX-License-Identifier: Apache-2.0
"""What a prepared parameter says about itself, for errors of calls that see parameters and no model."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

_ATTRIBUTE = "accel_label"  # holds plain values, so that a pickled model needs nothing of accel


def label_parameters(model: nn.Module, *, exchanged: bool) -> None:
    """Label the model's parameters. Mutates them by one attribute, which nothing computes with.

    Args:
        model: whose names they get.
        exchanged: whether a step needs a gradient of each, because ranks exchange all or none.
    """
    for name, parameter in model.named_parameters():
        setattr(parameter, _ATTRIBUTE, (name, exchanged))


def label_of(parameter: torch.Tensor) -> tuple[str, bool]:
    """Return a parameter's name and whether a step needs its gradient; an empty name for one without a label."""
    return cast("tuple[str, bool]", getattr(parameter, _ATTRIBUTE, ("", False)))
