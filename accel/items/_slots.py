# SPDX-License-Identifier: Apache-2.0
"""What of an optimizer's live state can be loaded in place, which takes no memory for a second one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import torch

from accel.checkpoint import is_sharded, local_part, memory_id, tensors_in

_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")


def loadable_in_place(
    optimizer: torch.optim.Optimizer, stored: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return live state tensors by the names of the stored tensors that may be copied into them. No communication.

    The optimizer can be given them as its new state, and their contents be read when nothing can fail any more. So
    none are returned of an optimizer that has code of its own to load, as that might look at them.

    Args:
        optimizer: the live one.
        stored: the encoded state of its parameters.
        parameters: the live parameters by those names.
    """
    if not _keeps_what_it_is_given(optimizer):
        return {}
    slots = [slot for held in optimizer.state.values() for slot in held.values() if isinstance(slot, torch.Tensor)]
    memory = Counter(map(_address, [*parameters.values(), *slots]))
    found: dict[str, torch.Tensor] = {}
    for owner in stored.keys() & parameters.keys():
        parameter, state = parameters[owner], stored[owner]
        for key, slot in optimizer.state.get(parameter, {}).items():
            if isinstance(state, dict) and _lies_like(slot, parameter) and memory[_address(slot)] == 1:
                value = cast("dict[str, Any]", state).get(key)
                found |= {name: slot for name in tensors_in(value) if value == {"$tensor": name}}
    return found


def _keeps_what_it_is_given(optimizer: torch.optim.Optimizer) -> bool:
    kind, hooks = cast("Any", type(optimizer)), [getattr(optimizer, name, None) for name in _HOOKS]
    loading = (kind.load_state_dict.__module__, kind.__setstate__.__module__)
    return all(module.startswith("torch.optim.") for module in loading) and hooks == [{}, {}]


def _lies_like(slot: object, parameter: torch.Tensor) -> bool:
    """Whether a state tensor is spread as its parameter is, in memory that holds nothing else."""
    if not isinstance(slot, torch.Tensor) or slot.shape != parameter.shape or slot.device != parameter.device:
        return False
    if is_sharded(slot) and is_sharded(parameter):
        if (slot.device_mesh, slot.placements) != (parameter.device_mesh, parameter.placements):
            return False
    elif is_sharded(slot) or is_sharded(parameter):
        return False
    part = local_part(slot)
    return (
        slot.dim() > 0
        and type(part) is torch.Tensor
        and part.is_contiguous()
        and part.untyped_storage().nbytes() == part.nbytes
    )


def _address(tensor: torch.Tensor) -> int:
    part = local_part(tensor)
    return memory_id(part) if type(part) is torch.Tensor else 0
