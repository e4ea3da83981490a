# SPDX-License-Identifier: Apache-2.0
"""Models whose data-parallel ranks step on their own gradients, as local SGD has them."""

from __future__ import annotations

from torch import nn

from accel.parallel._unwrap import unwrap_model
from accel.topology import Dimension

# Along these, ranks of local SGD step on their own gradients.
APART: tuple[Dimension, ...] = ("data", "replicate", "shard")

_LOCAL = "accel_local"  # attribute of a prepared model


def mark_local(model: nn.Module) -> None:
    """Note that no gradient of a model crosses ranks with other samples. Mutates it."""
    vars(model)[_LOCAL] = True


def is_local(model: nn.Module) -> bool:
    """Return whether no gradient of a model crosses ranks with other samples."""
    return _LOCAL in vars(unwrap_model(model))
