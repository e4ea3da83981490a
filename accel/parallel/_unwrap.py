# SPDX-License-Identifier: Apache-2.0
"""`unwrap_model`: what the user built, without what was put around it."""

from __future__ import annotations

from typing import cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel and torch.compile; a plain module is returned as it is.

    Args:
        model: from `prepare_model`, or compiled, or plain.
    """
    while True:
        if isinstance(model, DistributedDataParallel):
            model = cast(nn.Module, model.module)
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model
