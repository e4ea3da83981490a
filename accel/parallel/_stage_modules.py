# SPDX-License-Identifier: Apache-2.0
"""Modules that torch runs as stages of a pipelined model; a model that is none is its own only stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import nn

from accel.parallel._unwrap import wrapped_name

STAGES = "accel_stages"  # attribute of a pipelined model
_DIVIDED = "accel_divided"  # attribute of a module that follows a pipelined model
_MICRO_BATCHES = "accel_micro_batches"


def stage_modules(model: nn.Module) -> Sequence[nn.Module]:
    """Return the modules that run this rank's stages of a model; the model itself where it has no pipeline."""
    return cast("Sequence[nn.Module] | None", vars(model).get(STAGES)) or (model,)


def is_pipelined(model: nn.Module) -> bool:
    """Return whether a model is cut into the stages of a pipeline."""
    return STAGES in vars(model)


def follow_stages(module: nn.Module, model: nn.Module) -> None:
    """Let a module that copies a model's parameters be divided among ranks as the model is. Mutates it."""
    if is_divided(model):
        vars(module)[_DIVIDED] = True


def is_divided(module: nn.Module) -> bool:
    """Return whether ranks along a pipeline hold different parts of a module, under the names of the whole one."""
    while (name := wrapped_name(module)) is not None:
        module = getattr(module, name)
    return is_pipelined(module) or _DIVIDED in vars(module)


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
