# SPDX-License-Identifier: Apache-2.0
"""Hooks of sharded models: gathers ahead, shards after an evaluation, and buffers of the first rank."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import filterfalse
from typing import Any, cast

import torch
from torch import nn

from accel.comm import Comm
from accel.parallel._replicas import follow_first_
from accel.tensors import is_dtensor


def prefetch(units: Sequence[nn.Module], ahead: int) -> None:
    """Gather the parameters of the next units in forward, and of those before in backward, while one computes.

    Args:
        units: sharded modules, the model itself last; taken to run in the order in which it lists them.
        ahead: number of units to gather ahead.
    """
    model = units[-1]
    known = {id(each) for each in units}
    order = [cast(Any, each) for each in model.modules() if id(each) in known]
    for at, unit in enumerate(order):
        unit.set_modules_to_forward_prefetch(order[at + 1 : at + 1 + ahead])
        unit.set_modules_to_backward_prefetch(order[max(at - ahead, 0) : at][::-1])


def gather_outside_of_inference(unit: nn.Module) -> None:
    """Make whole parameters ordinary tensors, also where the first forward is in torch.inference_mode.

    `fully_shard` makes them once, and training cannot use tensors made in that mode.
    """

    def gather(module: nn.Module, _inputs: Any) -> None:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                cast(Any, module).unshard()

    _ = unit.register_forward_pre_hook(cast(Any, torch.compiler).disable(gather), prepend=True)


def reshard_after_evaluation(units: Sequence[nn.Module]) -> None:
    """Shard all units again after a forward of the model without backward.

    `fully_shard` would leave those whole that are not resharded after forward, and changes of those are lost.

    Args:
        units: sharded modules, the model itself last.
    """

    def reshard(_module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        if not torch.is_grad_enabled():
            for unit in units:
                cast(Any, unit).reshard()

    _ = units[-1].register_forward_hook(cast(Any, torch.compiler).disable(reshard))


def follow_first(stage: Comm, model: nn.Module) -> None:
    """Replace buffers by those of the stage's first rank before each forward, as DDP does.

    For a stage of a pipeline, before each batch: the backward of one micro-batch may need what the forward of the next
    would replace.
    """

    def follow(module: nn.Module, _inputs: Any = None) -> None:
        follow_first_(stage, filterfalse(is_dtensor, module.buffers()))

    if hasattr(model, "before_batch"):
        cast(Any, model).before_batch = functools.partial(follow, model)
        return
    _ = model.register_forward_pre_hook(cast(Any, torch.compiler).disable(follow))
