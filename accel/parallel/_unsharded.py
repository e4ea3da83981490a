# SPDX-License-Identifier: Apache-2.0
"""The one place that knows where `fully_shard` keeps gradients that ranks have not exchanged yet.

They lie in no `.grad` that users reach: `optimizer.zero_grad()` leaves them, and the next exchange adds them. torch has
no public name for them; a test compares the private ones with what they are taken for here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import nn


class Shards(NamedTuple):
    """A parameter that `fully_shard` has taken.

    Attributes:
        parameter: as an optimizer has it.
        whole: as forward and backward have it; None until the first forward.
        held: gradients of the whole one that ranks have not exchanged.
    """

    parameter: torch.Tensor
    whole: torch.Tensor | None
    held: list[torch.Tensor]


def shards_of(module: nn.Module) -> Iterator[Shards]:
    """Yield the parameters that `fully_shard` took when it was called on a module; not those of modules below it."""
    for group in _groups(module):
        for each in group.fsdp_params:
            whole = getattr(each, "_unsharded_param", None)
            held = (None if whole is None else whole.grad, each.unsharded_accumulated_grad)
            yield Shards(each.sharded_param, whole, [grad for grad in held if grad is not None])


def drop_unsharded(module: nn.Module) -> list[torch.Tensor]:
    """Drop the gradients held for a module, and return its parameters as an optimizer has them. No communication.

    Args:
        module: that `fully_shard` was called on; modules below it are not looked at.
    """
    parameters: list[torch.Tensor] = []
    for group in _groups(module):
        group._partial_reduce_output = None  # of replicas that wait for set_requires_all_reduce
        for each in group.fsdp_params:
            each.unsharded_accumulated_grad = None
            parameters.append(each.sharded_param)
            if hasattr(each, "_unsharded_param"):
                each._unsharded_param.grad = None
    return parameters


def _groups(module: nn.Module) -> list[Any]:
    state = cast(Any, module)._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)  # older torch has at most one
    if several is not None:
        return several
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
