# SPDX-License-Identifier: Apache-2.0
"""Modules inside a prepared model: the user's own, without wrappers, and stages of pipelines; what an engine holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

WRAPS = "accel_wraps"  # attribute of an engine's wrapper: the attribute of what it wraps
HELD = "accel_held"  # attribute of an engine's wrapper: its `Held`
EMPTIED = "accel_emptied"  # attribute of modules whose parameters are empty between passes: what makes them so
STAGES = "accel_stages"  # attribute of a pipelined model
_DIVIDED = "accel_divided"  # attribute of a module that follows a pipelined model


class Held(Protocol):
    """Gradients of one model, as an engine holds them."""

    def clear(self) -> None:
        """Drop them. No communication."""
        ...

    def note(self) -> None:
        """Note whether there are any now that a window begins; a step then refuses them. No communication."""
        ...


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel and torch.compile; a plain module is returned as it is.

    `fully_shard`, tensor parallelism and `compile_model` wrap nothing: the model itself is returned, still sharded or
    compiled. `get_state_dict` gives its tensors whole.

    Args:
        model: from `prepare_model`, or compiled, or plain.

    Example:
        >>> model = accel.prepare_model(ctx, net)
        >>> accel.unwrap_model(model) is net
        True
    """
    while (name := wrapped_name(model)) is not None:
        model = getattr(model, name)
    return model


def wrapped_name(module: nn.Module) -> str | None:
    """Return the attribute under which a wrapper holds what it wraps, None for a module that wraps nothing."""
    if isinstance(module, DistributedDataParallel):
        return "module"
    if (name := vars(module).get(WRAPS)) is not None:
        return cast(str, name)
    compiled = isinstance(getattr(module, "_orig_mod", None), nn.Module)  # torch names the class in a private place
    return "_orig_mod" if compiled else None


def held_by(model: nn.Module) -> Held | None:
    """Return the gradients that an engine holds of a model, from under wrappers; None if no engine does."""
    at: nn.Module | None = model
    while at is not None:
        if (held := vars(at).get(HELD)) is not None:
            return cast(Held, held)
        name = wrapped_name(at)
        at = None if name is None else getattr(at, name)
    return None


def emptied_by(module: nn.Module) -> str | None:
    """Return what makes a module's parameters empty between passes; None where they have their values."""
    return cast("str | None", vars(module).get(EMPTIED))


def stage_modules(model: nn.Module) -> Sequence[nn.Module]:
    """Return the modules that run this rank's stages of a model; the model itself where it has no pipeline."""
    return cast("Sequence[nn.Module] | None", vars(model).get(STAGES)) or (model,)


def is_pipelined(model: nn.Module) -> bool:
    """Return whether a model is cut into the stages of a pipeline."""
    return STAGES in vars(model)


def follow_stages(module: nn.Module, model: nn.Module) -> None:
    """Let a module that copies a model's parameters be divided among ranks as the model is. Mutates it."""
    if is_divided(model):
        vars(module)[_DIVIDED] = True


def is_divided(module: nn.Module) -> bool:
    """Return whether ranks along a pipeline hold different parts of a module, under the names of the whole one."""
    inner = unwrap_model(module)
    return is_pipelined(inner) or _DIVIDED in vars(inner)
