# SPDX-License-Identifier: Apache-2.0
"""The change that puts a loaded state into an optimizer: all of the state, but for flags of how the optimizer runs."""

from __future__ import annotations

from typing import Any

import torch

from accel.items import _packed_state
from accel.items._packed_state import is_zero, local_optimizer
from accel.items._source import Change

# They choose a kernel and not a result, so that they are the script's.
_FLAGS = ("fused", "foreach", "capturable", "differentiable")


def with_own_flags(live: torch.optim.Optimizer, state: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a state in torch's form with the live groups' flags of performance, and a line for each difference."""
    lines = dict[str, None]()
    groups = list[dict[str, Any]]()
    for stored, group in zip(state["param_groups"], live.param_groups, strict=True):
        own = {key: group[key] for key in _FLAGS if key in group}
        for key, value in own.items():
            if key in stored and stored[key] != value:
                lines[f"{key}={value} of the script stays; the checkpoint has {stored[key]}"] = None
        groups.append({**stored, **own})
    return {**state, "param_groups": groups}, list(lines)


def optimizer_change(
    where: str, live: torch.optim.Optimizer, wrapper: torch.optim.Optimizer, state: dict[str, Any]
) -> Change:
    """Return the change that puts a state in torch's form into an optimizer; `live` is the one inside of the passed
    `wrapper`."""
    both = {id(each): each for each in (live, local_optimizer(live))}.values()
    before = [(each, {"state": each.state, "param_groups": each.param_groups}) for each in both]

    def apply() -> None:
        if is_zero(live):
            _packed_state.load_state_dict(live, state)
        else:
            live.load_state_dict(state)
        _restore_dtypes(live, state)
        _follow(wrapper)

    def undo() -> None:
        for optimizer, held in before:  # a load replaces these, and never changes them
            optimizer.__dict__.update(held)
        _follow(wrapper)

    return Change(where, apply, undo)


def _restore_dtypes(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restore the dtypes of loaded state: torch casts floating state to the parameter's dtype, which loses bits."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    held = local_optimizer(optimizer).state
    for index, entries in state["state"].items():
        live = held.get(params[index], {})  # nothing of what another rank holds
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and key in live and live[key].dtype != value.dtype:
                live[key] = value.to(live[key].device)


def _follow(wrapper: object) -> None:
    """Update references of an optimizer's wrappers to its state. Mutates them."""
    held = getattr(wrapper, "optimizer", None)
    if isinstance(wrapper, torch.optim.Optimizer) and isinstance(held, torch.optim.Optimizer):
        _follow(held)
        for name in vars(wrapper).keys() & {"state", "param_groups"}:
            vars(wrapper)[name] = getattr(held, name)
