# SPDX-License-Identifier: Apache-2.0
"""`unwrap_model`: what the user built, without what was put around it."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel and torch.compile; a plain module is returned as it is.

    `fully_shard`, tensor parallelism and `compile_model` wrap nothing: the model itself is returned, still sharded or
    compiled. `get_state_dict` gives its tensors whole.

    Args:
        model: from `prepare_model`, or compiled, or plain.

    Example:
        >>> model = accel.prepare_model(ctx, net)
        >>> accel.unwrap_model(model) is net
        True
    """
    while (name := wrapped_name(model)) is not None:
        model = getattr(model, name)
    return model


def wrapped_name(module: nn.Module) -> str | None:
    """Return the attribute under which a wrapper holds what it wraps, None for a module that wraps nothing."""
    if isinstance(module, DistributedDataParallel):
        return "module"
    compiled = isinstance(getattr(module, "_orig_mod", None), nn.Module)  # torch names the class in a private place
    return "_orig_mod" if compiled else None
