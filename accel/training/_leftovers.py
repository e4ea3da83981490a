# SPDX-License-Identifier: Apache-2.0
"""Gradients from before a window: refused by the step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch.optim import Optimizer

from accel.comm import Call, agreed
from accel.context import DistContext
from accel.errors import StepError
from accel.optim import parameters_of
from accel.parallel import found_gradient, name_of
from accel.tensors import is_dtensor

_MOST_NAMED = 3


def refuse_leftovers(ctx: DistContext, optimizers: Sequence[Optimizer]) -> None:
    """Raise if `accumulate` found gradients at the start of the window, on parameters of this step.

    Zeros are no gradients. A rank's shard may hold only zeros, so ranks agree on sharded gradients, by a collective.
    Whole gradients are equal on all ranks, unless some ranks ran a backward of their own: these raise alone, because
    the others have nothing to agree on.

    Raises:
        StepError: on every rank that holds such a gradient or a shard of it; the first parameters are named.
    """
    found = [
        (each, nonzero)
        for each in parameters_of(optimizers)
        if (nonzero := found_gradient(each)) is not None and each.grad is not None  # else no optimizer steps it
    ]
    if not found:
        return
    used = [each for each, nonzero in found if nonzero]
    is_sharded = any(is_dtensor(each) for each, _ in found)
    with agreed(ctx.comm, Call("optimizer_step", ordered=False)) if is_sharded else nullcontext():
        if used:
            raise _leftovers(used)


def _leftovers(parameters: Sequence[torch.Tensor]) -> StepError:
    names = [name_of(each) or f"one of shape {list(each.shape)}" for each in parameters[:_MOST_NAMED]]
    more = f" and {len(parameters) - _MOST_NAMED} more" if len(parameters) > _MOST_NAMED else ""
    return StepError(
        "the step would use gradients from before its window",
        expected="parameters without gradients when a window begins",
        got=f"gradients of {', '.join(names)}{more}",
        where="optimizer_step",
        fix="Call accel.clear_gradients(model) where a window is abandoned, or where a loss of another model has left"
        " gradients in this one; optimizer.zero_grad() after each window in which an optimizer takes no step.",
    )
