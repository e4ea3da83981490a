# SPDX-License-Identifier: Apache-2.0
"""Gradients that are not finite: the error, with the name of the first of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.optim import Optimizer

from accel.comm import Call, adopt, all_reduce_flat, exchange_values
from accel.context import DistContext, group_of
from accel.errors import NonFiniteError
from accel.optim import Accumulation, first_nonfinite, parameters_of
from accel.parallel import name_of
from accel.precision import LossScale
from accel.tensors import is_dtensor

_MOST_OVERFLOWS = 64  # in a row; halving that often takes any scale below what a float32 gradient can hold


def check_overflow(
    ctx: DistContext, scaler: LossScale, accum: Accumulation | None, optimizers: list[Optimizer]
) -> None:
    """Raise for gradients with inf or NaN, unless a dynamic loss scale explains them. A collective if some are sharded.

    Args:
        ctx: the context.
        scaler: loss scale of the window; a dynamic scale may overflow a number of times in a row.
        accum: window that has ended; None for a script without accumulation.
        optimizers: optimizers that take the step together.

    Raises:
        NonFiniteError: the first such parameter is named.
    """
    if scaler.dynamic and scaler.overflows < _MOST_OVERFLOWS:
        return
    raise NonFiniteError(
        "a gradient is not finite" if accum is None else f"a gradient of step {accum.updates} is not finite",
        expected="finite gradients" if not scaler.dynamic else f"a finite step within {_MOST_OVERFLOWS}",
        got="inf or NaN",
        where=_first_nonfinite(ctx, optimizers),
        fix="Lower the learning rate, clip with max_norm=, divide means by a count of at least 1 where a micro-batch"
        " may hold no unit, or pass nonfinite='skip' to leave such steps out.",
    )


def _first_nonfinite(ctx: DistContext, optimizers: list[Optimizer]) -> str:
    """Name the first parameter whose gradient holds inf or NaN on any rank. A collective if some are sharded."""
    parameters = parameters_of(optimizers)
    at = first_nonfinite(parameters)
    if ctx.world_size > 1 and any(is_dtensor(each.grad) for each in parameters):
        at = int(all_reduce_flat(ctx.comm, torch.tensor([at], device=ctx.comm.control), "min").item())
    own = "" if at == len(parameters) else f"{list(_names(optimizers))[at]}, shape {list(parameters[at].shape)}"
    group = group_of(ctx, "pp")
    if group is not None:  # stages have parameters of their own
        told = exchange_values(adopt(group, ctx.device), Call("optimizer_step", ordered=False), own, str)
        own = next(filter(None, told), "")
    return own or "the norm of all gradients, each finite by itself"


def _names(optimizers: list[Optimizer]) -> Iterator[str]:
    """Yield the parameters' names, from the optimizer or from `prepare_model`; else their positions."""
    for which, optimizer in enumerate(optimizers):
        for group_at, group in enumerate(optimizer.param_groups):
            known = group.get("param_names")
            for at, parameter in enumerate(group["params"]):
                name = known[at] if known else name_of(parameter)
                place = f"optimizer {which}, " if len(optimizers) > 1 or not name else ""
                yield place + (name or f"param_groups[{group_at}]['params'][{at}]")
