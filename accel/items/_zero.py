# SPDX-License-Identifier: Apache-2.0
"""torch's `ZeroRedundancyOptimizer`: each rank has the optimizer of some parameters; all ranks know the division.

Its state is read and written as that of the inner optimizer, so a checkpoint of it is one of that optimizer.
Reference: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from accel.items._kinds import local_optimizer
from accel.optim import parameters_of


def state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state in torch's form, of all groups and of this rank's parameters.

    Raises:
        CheckpointError: see `local_optimizer`.
    """
    local = local_optimizer(optimizer)
    packed = local.state_dict()
    place = _places(optimizer)
    mine = [place[id(parameter)] for parameter in parameters_of([local])]
    return packed | {
        "state": {mine[at]: entries for at, entries in packed["state"].items()},
        "param_groups": _indexed(optimizer.param_groups, place),
    }


def load_state_dict(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load this rank's part of a state in torch's form. Mutates the optimizer; groups are replaced."""
    local = local_optimizer(optimizer)
    params = parameters_of([optimizer])
    place = _places(local)
    entries = cast("dict[int, Any]", state["state"])
    options = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
    mine = {place[id(params[at])]: each for at, each in entries.items() if id(params[at]) in place}
    groups = [old | new for old, new in zip(_indexed(local.param_groups, place), options, strict=True)]
    local.load_state_dict(state | {"state": mine, "param_groups": groups})
    optimizer.param_groups = [old | new for old, new in zip(optimizer.param_groups, options, strict=True)]


def _places(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    return {id(parameter): at for at, parameter in enumerate(parameters_of([optimizer]))}


def _indexed(groups: list[dict[str, Any]], place: dict[int, int]) -> list[dict[str, Any]]:
    params = [group["params"] for group in groups]
    return [group | {"params": [place[id(each)] for each in of]} for group, of in zip(groups, params, strict=True)]
