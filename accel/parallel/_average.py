# SPDX-License-Identifier: Apache-2.0
"""The mean of tensors over ranks, in one message for each dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from accel.comm import all_reduce_flat
from accel.context import DistContext


def average_(ctx: DistContext, tensors: Sequence[torch.Tensor]) -> None:
    """Replace tensors by their mean over all ranks. A collective.

    Args:
        ctx: the context.
        tensors: plain ones, of the same shapes and dtypes in the same order on every rank; changed in place.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in kinds.values():
        flat = torch.cat([tensor.flatten() for tensor in same])
        mean = all_reduce_flat(ctx.comm, flat, "sum").div_(ctx.world_size)
        start = 0
        for tensor in same:
            _ = tensor.copy_(mean[start : start + tensor.numel()].view_as(tensor))
            start += tensor.numel()
