# SPDX-License-Identifier: Apache-2.0
"""The number of micro-batches of a model's plan, noted on the model."""

from __future__ import annotations

from torch import nn

from accel.parallel._unwrap import wrapped_name

_MICRO_BATCHES = "accel_micro_batches"


def note_micro_batches(model: nn.Module, count: int) -> None:
    """Let a model know the number of micro-batches of its plan. Mutates it by an attribute."""
    vars(model)[_MICRO_BATCHES] = count


def micro_batches_of(model: nn.Module) -> int:
    """Return the number of micro-batches that a model's plan makes of a batch; 1 where it does not say.

    Args:
        model: as `prepare_model` returned it, or inside its wrappers.
    """
    while _MICRO_BATCHES not in vars(model) and (name := wrapped_name(model)) is not None:
        model = getattr(model, name)
    return vars(model).get(_MICRO_BATCHES, 1)
