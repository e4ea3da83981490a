# SPDX-License-Identifier: Apache-2.0
"""Gradients that a window finds when it begins: noted on their parameters, and cleared."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from accel.errors import StepError
from accel.parallel._unsharded import drop_unsharded, shards_of
from accel.parallel._unwrap import held_by, is_pipelined, stage_modules
from accel.tensors import integers, local_part

_FOUND = "accel_found"  # whether the gradient that a window found holds a value other than zero, as a plain bool
_WATCHED = "accel_watched"  # the id of the tensor whose hook may take the note back: a copy has no hook


def clear_gradients(*models: nn.Module) -> None:
    """Drop all gradients of models, such as those of a window that is given up. No communication.

    It reaches what `optimizer.zero_grad()` leaves: parameters that no optimizer has, and under `fsdp` the gradients of
    micro-batches whose exchange has not come yet. Of an engine's model it reaches what the engine holds.

    Args:
        models: plain or from `prepare_model`. The `.grad` of their parameters becomes None.
    """
    for each in models:
        if (held := held_by(each)) is not None:
            held.clear()
    parameters, sharded = _tables(models)
    for module in sharded:
        parameters += drop_unsharded(module)
    clear_parameters(each for each in parameters if each is not None)


def clear_parameters(parameters: Iterable[torch.Tensor]) -> None:
    """Drop the gradients of parameters, but for what `fully_shard` holds. No communication."""
    for each in parameters:
        each.grad = None
        _forget(each)


def note_gradients(models: Iterable[nn.Module]) -> None:
    """Note on each parameter of models whether it holds a gradient now. Waits for the device where one does.

    A note is taken back if the gradient is cleared before a backward adds to it.

    Args:
        models: that a window begins with.
    """
    models = tuple(models)
    for each in models:
        if (held := held_by(each)) is not None:
            held.note()
    parameters, sharded = _tables(models)
    noted = [each for each in parameters if each is not None and (each.grad is not None or hasattr(each, _FOUND))]
    shards = [each for module in sharded for each in shards_of(module)]
    if not noted and not shards:
        return
    for each in noted:
        _forget(each)
    apart = {id(each) for parameter, whole, _ in shards for each in (parameter, whole)}
    found = [_FoundGradient(each, each, each.grad) for each in noted if each.grad is not None and id(each) not in apart]
    for parameter, whole, held in shards:
        _forget(parameter)
        found += [_FoundGradient(parameter, None, grad) for grad in held]
        if parameter.grad is not None:
            found.append(_FoundGradient(parameter, whole, parameter.grad))
    if found:
        _note(found)


def check_kept(models: Iterable[nn.Module]) -> None:
    """Raise where a window's second micro-batch finds no gradient of the first. No communication.

    It does not look into pipelines and models of `fully_shard`, which keep gradients elsewhere.

    Args:
        models: that a block trains.

    Raises:
        StepError: the models have trainable parameters, and none has a gradient.
    """
    models = tuple(models)
    if any(map(is_pipelined, models)):
        return
    parameters, sharded = _tables(models)
    trained = [each for each in parameters if each is not None and each.requires_grad]
    if trained and not sharded and all(each.grad is None for each in trained):
        raise StepError(
            "the gradients of this window's first micro-batch are gone",
            expected="gradients that add up until the optimizer step, which clears them",
            got="no gradient in any parameter of the block's models",
            where="accel.accumulate",
            fix="Leave optimizer.zero_grad() out of the loop. To drop a window: state = accel.discard(state, model).",
        )


def found_gradient(parameter: torch.Tensor) -> bool | None:
    """Return whether a parameter's gradient held more than zeros when the window began; None if there was none."""
    return getattr(parameter, _FOUND, None)


class _FoundGradient(NamedTuple):
    """A gradient that a window found.

    Attributes:
        parameter: as an optimizer has it.
        reached: the tensor whose gradient a backward computes before it adds to this one; None if `zero_grad` cannot
            clear it.
        grad: the gradient.
    """

    parameter: torch.Tensor
    reached: torch.Tensor | None
    grad: torch.Tensor


def _note(found: list[_FoundGradient]) -> None:
    counts = [_nonzero(each.grad) for each in found]
    read = integers(torch.stack([count.to(counts[0].device) for count in counts]))
    for (parameter, reached, _), count in zip(found, read, strict=True):
        setattr(parameter, _FOUND, bool(found_gradient(parameter)) or count > 0)
        if count and reached is not None and reached.requires_grad:
            _watch(parameter, reached)


def _forget(parameter: torch.Tensor) -> None:
    if hasattr(parameter, _FOUND):
        delattr(parameter, _FOUND)


def _watch(parameter: torch.Tensor, reached: torch.Tensor) -> None:
    """Take the note back if the gradient is gone when another one comes. One hook, which lasts as long as the note."""
    if getattr(parameter, _WATCHED, None) == id(reached):
        return
    known = weakref.ref(parameter)

    def look(_grad: torch.Tensor) -> None:
        live = known()
        if live is not None and live.grad is not None and found_gradient(live):
            return
        handle.remove()
        if live is not None:
            _forget(live)
            setattr(live, _WATCHED, None)

    handle = cast(Any, reached).register_hook(look)
    setattr(parameter, _WATCHED, id(reached))


def _nonzero(grad: torch.Tensor) -> torch.Tensor:
    """Count this rank's elements that are not zero."""
    grad = local_part(grad)
    return (grad.coalesce().values() if grad.is_sparse else grad).count_nonzero()


def _tables(models: Iterable[nn.Module]) -> tuple[list[torch.Tensor | None], list[nn.Module]]:
    """Return the parameters of models, some perhaps twice or None, and the modules that `fully_shard` was called on.

    It reads tables that torch has no public name for: `parameters()` takes ten times as long. A test compares both.
    """
    parameters: list[torch.Tensor | None] = []
    sharded: list[nn.Module] = []
    waiting: list[Any] = [part for model in models for part in stage_modules(model)]
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded_kind = getattr(fsdp, "FSDPModule", None)  # another thread may be importing the module
    while waiting:
        module = waiting.pop()
        if module is None:
            continue
        if module._parameters:
            parameters += module._parameters.values()
        if module._modules:
            waiting += module._modules.values()
        if sharded_kind is not None and isinstance(module, sharded_kind):
            sharded.append(module)
    return parameters, sharded
