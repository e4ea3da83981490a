# SPDX-License-Identifier: Apache-2.0
"""torch's `ZeroRedundancyOptimizer`: on each rank an optimizer of some of the parameters, which all ranks know.

Its state is read and written as that of the optimizer inside, so a checkpoint of it is one of that optimizer.
Reference: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch

from accel.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


def is_zero(optimizer: object) -> TypeGuard[ZeroRedundancyOptimizer]:
    """Whether an optimizer divides its parameters among ranks. No communication."""
    module = sys.modules.get(_MODULE)  # its import takes long
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that holds state: of a `ZeroRedundancyOptimizer` this rank's, else the optimizer itself.

    Raises:
        CheckpointError: it is a `ZeroRedundancyOptimizer` that follows the buckets of DDP, which decide at the first
            step what each rank holds.
    """
    if not is_zero(optimizer):
        return optimizer
    if cast(Any, optimizer)._overlap_with_ddp:
        raise CheckpointError(
            "a ZeroRedundancyOptimizer with overlap_with_ddp=True cannot be saved or loaded",
            fix="Build it without overlap_with_ddp, or shard the model by fully_shard.",
        )
    return optimizer.optim


def held_params(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the `id` of every parameter of which this rank holds the state."""
    return {id(parameter) for group in inner(optimizer).param_groups for parameter in group["params"]}


def state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state in torch's form, of all groups and of the parameters that this rank holds.

    Raises:
        CheckpointError: see `inner`.
    """
    local = inner(optimizer)
    packed = local.state_dict()
    if local is optimizer:
        return packed
    place = _places(optimizer)
    mine = [place[id(parameter)] for parameter in _params(local)]
    return packed | {
        "state": {mine[at]: entries for at, entries in packed["state"].items()},
        "param_groups": _indexed(optimizer.param_groups, place),
    }


def load_state_dict(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Put a state in torch's form into an optimizer, what this rank holds of it. Mutates it; groups are replaced."""
    local = inner(optimizer)
    if local is optimizer:
        optimizer.load_state_dict(state)
        return
    params, place, entries = _params(optimizer), _places(local), cast("dict[int, Any]", state["state"])
    options = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
    mine = {place[id(params[at])]: each for at, each in entries.items() if id(params[at]) in place}
    groups = [old | new for old, new in zip(_indexed(local.param_groups, place), options, strict=True)]
    local.load_state_dict(state | {"state": mine, "param_groups": groups})
    optimizer.param_groups = [old | new for old, new in zip(optimizer.param_groups, options, strict=True)]


def contents(optimizer: torch.optim.Optimizer) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
    """Return what a load replaces and never changes: of the optimizer and of the one inside."""
    each = {id(one): one for one in (optimizer, inner(optimizer))}.values()
    return [(one, {"state": one.state, "param_groups": one.param_groups}) for one in each]


def put_back(before: list[tuple[torch.optim.Optimizer, dict[str, Any]]]) -> None:
    """Undo a load. Mutates the optimizers of which `contents` was taken."""
    for one, held in before:
        one.__dict__.update(held)


def _places(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    return {id(parameter): at for at, parameter in enumerate(_params(optimizer))}


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _indexed(groups: list[dict[str, Any]], place: dict[int, int]) -> list[dict[str, Any]]:
    params = [cast("list[torch.Tensor]", group["params"]) for group in groups]
    return [group | {"params": [place[id(each)] for each in of]} for group, of in zip(groups, params, strict=True)]
