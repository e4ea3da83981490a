# SPDX-License-Identifier: Apache-2.0
"""Parameters of optimizers after a model was spread: shards take the places of whole ones, other ranks' go."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch.optim import Optimizer

from accel.errors import PrepareError
from accel.items import is_zero
from accel.optim import parameters_of
from accel.parallel import heir_of, is_dropped, name_of
from accel.tensors import has_wide_gradient, is_dtensor, is_half


def current_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter, or its replacement in the model."""
    heir = heir_of(parameter)
    return parameter if heir is None else heir


def drop_others(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Take parameters of other ranks' stages out of a group, with their state. Mutates both."""
    kept = [not is_dropped(each) for each in group["params"]]
    if all(kept):
        return
    for each in group["params"]:
        if is_dropped(each):
            _ = optimizer.state.pop(each, None)
    for key in ("params", "param_names"):
        if key in group:
            group[key] = list(itertools.compress(cast("list[Any]", group[key]), kept))


def move_state(optimizer: Optimizer) -> None:
    """Move state to the devices of its parameters, as after a load before `prepare`. Mutates the state's containers.

    A "step" stays where it is, as torch keeps it on the CPU, unless its group is `capturable` or `fused`.
    """
    for group in optimizer.param_groups:
        counts_there = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                stays = key == "step" and not counts_there
                if isinstance(value, torch.Tensor) and value.device != parameter.device and not stays:
                    optimizer.state[parameter][key] = value.to(parameter.device)


def check_masters(optimizer: Optimizer) -> None:
    """Raise if an optimizer cannot step float32 copies of its 16-bit parameters."""
    for each in parameters_of([optimizer]):
        if each.requires_grad and is_half(each) and (is_dtensor(each) or not has_wide_gradient(each)):
            raise PrepareError(
                "this parameter cannot have master weights",
                expected="a replicated parameter with gradients in float32, as prepare makes them",
                got="one that is sharded" if is_dtensor(each) else f"gradients in {each.dtype}",
                where=f"prepare_optimizer, {name_of(each) or f'a parameter of shape {list(each.shape)}'}",
                fix="Prepare the model along with the optimizer. Keep sharded parameters in float32:"
                ' precision="bf16" gathers and computes in bf16.',
            )
    if is_zero(optimizer):
        raise PrepareError(
            "a ZeroRedundancyOptimizer steps parameters of its own",
            expected="another optimizer, for Precision(master_weights=)",
            where="prepare_optimizer",
            fix='Pass strategy="fsdp" and precision="bf16": every rank then has a share of float32 parameters.',
        )


def check_state(optimizer: Optimizer, replaced: Iterable[torch.Tensor]) -> None:
    """Raise if shards cannot replace parameters of an optimizer."""
    listed = list(replaced)
    found = [each for each in listed if optimizer.state.get(each)]
    if found or (listed and is_zero(optimizer)):
        raise PrepareError(
            "the optimizer's state does not fit the shards of its parameters",
            expected="one without state, as torch's are before their first step",
            got=f"a {type(optimizer).__name__}" + (f" with state of {len(found)} of them" if found else ""),
            where="prepare, strategy fsdp",
            fix="Prepare the model first, and build the optimizer from the parameters that it has then; then load its"
            " state.",
        )
