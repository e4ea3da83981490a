# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: blocks forget what they computed in forward and compute it again in backward."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType] - dynamo knows the name

from accel.mixins import Mixin, add_mixin
from accel.parallel._select import Select, selected
from accel.parallel._unwrap import unwrap_model

M = TypeVar("M", bound=nn.Module)


class Recomputed(Mixin, nn.Module):
    """Stands before the class of a block that is computed again in backward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward, remembering its inputs only."""
        forward = cast(Any, super()).forward
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)  # pyright: ignore[reportUnknownVariableType]


def checkpoint_activations(model: M, select: Select = "repeated") -> M:
    """Trade time for memory: keep only the inputs of the chosen blocks for backward. No communication. Mutates them.

    In backward each block runs its forward again, with the random numbers and autocast of the first time. Gradients are
    the same. Nothing is wrapped: names, checkpoints and `isinstance` stay as they are. Call it before `compile_model`;
    before or after `prepare_model` is the same.

    Args:
        model: plain, or from `prepare_model`.
        select: "repeated" for the blocks that a ModuleList or Sequential holds at least two of, of one class; a class
            or a tuple of classes; or a predicate of a module's name and the module. Of nested blocks the outer one
            counts.

    Returns:
        The model that was passed.

    Raises:
        ConfigError: nothing is chosen.

    Reference: Chen et al. 2016, "Training deep nets with sublinear memory cost", arXiv:1604.06174;
        torch.utils.checkpoint.
    """
    add_mixin(selected(unwrap_model(model), select, "checkpoint_activations").values(), Recomputed)
    return model
