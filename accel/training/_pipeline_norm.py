# SPDX-License-Identifier: Apache-2.0
"""Norms of gradients of a pipelined model: those of all stages together, tied parameters counted once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from accel.comm import adopt, all_gather_flat, all_reduce_flat
from accel.context import DistContext, group_of
from accel.optim import total_norm
from accel.parallel.pipeline import is_tied_copy


def whole_norm(
    ctx: DistContext, grads: Sequence[torch.Tensor], parameters: Iterable[torch.Tensor], norm_type: float
) -> float | torch.Tensor:
    """Return the total norm of gradients over all stages. A collective along the pipeline, and of DTensors' meshes.

    Args:
        ctx: the context.
        grads: of this rank.
        parameters: among them those that the gradients are of.
        norm_type: p of the p-norm, above 0; inf for the largest absolute value.

    Returns:
        As `accel.optim.total_norm`; equal on all ranks.
    """
    if ctx.axis("pp").size == 1:
        return total_norm(grads, norm_type)
    group = group_of(ctx, "pp")
    assert group is not None
    copies = {id(each.grad) for each in parameters if is_tied_copy(each)}
    own = total_norm([grad for grad in grads if id(grad) not in copies], norm_type)
    power = torch.as_tensor(own, dtype=torch.float64, device=ctx.device).reshape(1)
    comm = adopt(group, ctx.device)
    if norm_type == math.inf:
        norm = all_gather_flat(comm, power).amax(0)  # a reduction by max need not keep NaN
    else:
        norm = all_reduce_flat(comm, power**norm_type, "sum") ** (1 / norm_type)
    return norm.item() if norm.is_cpu else norm.reshape(())
