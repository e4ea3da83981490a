# SPDX-License-Identifier: Apache-2.0
"""Whether a prepared model's forward has run with autocast on, as the launcher's precision needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

# A list that the parameters of a model share: whether a forward ran with autocast on, and whether one ran with it off.
_SEEN = "accel_autocast_seen"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _Look:
    """A hook of all modules that hold parameters, until one of them has run with autocast on.

    torch.compile traces it: it neither breaks a graph nor takes itself away there.
    """

    def __init__(self, device_type: str) -> None:
        self.seen = [False, False]
        self.device_type = device_type
        self.handles: list[Any] = []

    def __call__(self, _module: nn.Module, _inputs: Any) -> None:
        on = torch.is_autocast_enabled(self.device_type)
        self.seen[0 if on else 1] = True
        if on and not torch.compiler.is_compiling():
            for handle in self.handles:
                handle.remove()


def watch_autocast(model: nn.Module, device_type: str, compute: str) -> None:
    """Note on a model's parameters whether its forward runs with autocast on. Mutates it by hooks until it has.

    Models whose parameters have the compute dtype need no autocast. They are not watched.

    Args:
        model: prepared.
        device_type: device type of the autocast.
        compute: "bf16" or "fp16".
    """
    if all(each.dtype is _DTYPES[compute] for each in model.parameters() if each.is_floating_point()):
        return
    look = _Look(device_type)
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            look.handles.append(module.register_forward_pre_hook(look))
    for each in model.parameters():
        setattr(each, _SEEN, look.seen)


def runs_without_autocast(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether forwards of watched models have run, and none of them with autocast on."""
    without = False
    for each in parameters:
        seen = cast("list[bool] | None", getattr(each, _SEEN, None))
        if seen is not None:
            if seen[0]:
                return False
            without = without or seen[1]
    return without
