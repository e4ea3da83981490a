# SPDX-License-Identifier: Apache-2.0
"""A module's state by the names that it has without wrappers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from accel.checkpoint import check_tensor
from accel.errors import CheckpointError
from accel.parallel import wrapped_name

_EXTRA_STATE = "_extra_state"  # the key that torch gives to what get_extra_state() returns


@dataclass(frozen=True, slots=True)
class ModuleState:
    """A module's live state.

    Attributes:
        parameters, buffers: the live tensors by name; tied ones under every name.
        extras: what get_extra_state() gave, by name.
        owners: the submodule of each extra state.
    """

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    extras: Mapping[str, Any]
    owners: Mapping[str, nn.Module]


def module_state(module: nn.Module, item: str) -> ModuleState:
    """List a module's parameters, persistent buffers and extra state; wrappers leave no trace in the names.

    Args:
        module: plain, sharded, or wrapped by DDP or torch.compile, whole or in parts.
        item: its name, for errors.

    Raises:
        CheckpointError: a tensor cannot be stored, or is neither parameter nor buffer.
    """
    reshard(module)
    live = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    parameters: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    extras: dict[str, Any] = {}
    owners: dict[str, nn.Module] = {}
    for raw, value in module.state_dict(keep_vars=True).items():
        name, owner = _clean(module, raw)
        if raw.rpartition(".")[2] == _EXTRA_STATE:
            extras[name], owners[name] = value, owner
            continue
        check_tensor(value, f"{item}.{name}")
        if id(value) not in live:
            raise CheckpointError(
                "state_dict() gives a tensor that is neither a parameter nor a buffer, so it could not be loaded",
                where=f"{item}.{name}",
                fix="Let get_extra_state() and set_extra_state() carry it.",
            )
        (parameters if isinstance(value, nn.Parameter) else buffers)[name] = value
    return ModuleState(parameters, buffers, extras, owners)


def reshard(model: nn.Module) -> None:
    """Let `fully_shard` drop gathered weights, which it would else go on with after their shards have changed."""
    for module in model.modules():
        kind = type(module)
        if hasattr(kind, "reshard") and hasattr(kind, "set_requires_gradient_sync"):
            cast(Any, module).reshard()


def clean_name(module: nn.Module, raw: str) -> str:
    """Return a name in a module without the steps that wrappers put into it."""
    return _clean(module, raw)[0]


def _clean(module: nn.Module, raw: str) -> tuple[str, nn.Module]:
    """The name without wrappers' steps, and the innermost submodule on the way."""
    kept: list[str] = []
    node = module
    for part in raw.split("."):
        if part != wrapped_name(node):
            kept.append(part)
        child = getattr(node, part, None)
        node = child if isinstance(child, nn.Module) else node
    return ".".join(kept), node
