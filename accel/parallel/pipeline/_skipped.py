# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for modules of other stages: they hold nothing, and return what they are given."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from accel.mixins import Mixin, add_mixin
from accel.parallel._paths import named_modules

_MAIN = "hidden_states"  # name of a block's input in the models of Hugging Face


class Skipped(Mixin):
    """A module of another stage. It keeps its attributes, which the forward around it may read."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the first input; 0 for indices, so that a skipped embedding of positions adds nothing."""
        first = inputs[0] if inputs else kwargs.get(_MAIN, next(iter(kwargs.values()), None))
        if isinstance(first, torch.Tensor) and not (first.is_floating_point() or first.is_complex()):
            return torch.zeros((), device=first.device)
        return first

    def state_dict(self, *_: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return nothing: the rank of its stage saves the module."""
        _ = prefix, keep_vars
        return {} if destination is None else destination


def is_skipped(module: nn.Module) -> bool:
    """Return whether a module stands in for one of another stage."""
    return isinstance(module, Skipped)


def remove_modules(model: nn.Module, paths: Iterable[str]) -> list[nn.Parameter]:
    """Replace modules of a model by stand-ins. Mutates the model.

    Args:
        model: the whole one.
        paths: of the modules.

    Returns:
        The parameters that the model has no longer, in order.
    """
    before = list(model.parameters())
    removed = tuple(paths)
    named = named_modules(model, every_path=True)
    shared = {id(each) for path, each in named if not f"{path}.".startswith(tuple(f"{other}." for other in removed))}
    for path in removed:
        module = model.get_submodule(path)
        if not shared.isdisjoint(map(id, module.modules())):  # those that stay keep what they hold
            above, _, key = path.rpartition(".")
            module = _shallow(module)
            setattr(model.get_submodule(above), key, module)
        _empty(module)
    kept = {id(each) for each in model.parameters()}
    return [each for each in before if id(each) not in kept]


def stage_view(model: nn.Module, own: Sequence[str], others: Sequence[str]) -> nn.Module:
    """Return a model with the modules of one stage, which it shares with the model of all of this rank's stages.

    Args:
        model: without the modules of other ranks.
        own: paths of the stage's modules.
        others: paths of the modules of this rank's other stages.
    """
    return _view(model, "", frozenset(own), frozenset(others))


def _view(module: nn.Module, path: str, own: frozenset[str], others: frozenset[str]) -> nn.Module:
    if path in others:
        stand_in = _shallow(module)
        _empty(stand_in)
        return stand_in
    if path and not any(each.startswith(f"{path}.") for each in own | others):
        return module
    view: Any = copy.copy(module)
    children = cast("Mapping[str, nn.Module | None]", view._modules)
    view._modules = {
        key: None if child is None else _view(child, f"{path}.{key}" if path else key, own, others)
        for key, child in children.items()
    }
    return view


def _shallow(module: nn.Module) -> nn.Module:
    """A copy of a module and those below it that shares their tensors."""
    copied: Any = copy.copy(module)
    _without_hooks(copied)
    children = cast("Mapping[str, nn.Module | None]", copied._modules)
    copied._parameters = dict(copied._parameters)
    copied._buffers = dict(copied._buffers)
    copied._modules = {key: None if child is None else _shallow(child) for key, child in children.items()}
    return copied


def _without_hooks(module: nn.Module) -> None:
    """Leave a stand-in none of the hooks of the module itself."""
    own = vars(module)
    hooks = [name for name, held in own.items() if "_hooks" in name and isinstance(held, dict)]
    own |= {name: type(own[name])() for name in hooks}


def _empty(module: nn.Module) -> None:
    _without_hooks(module)
    for each in module.modules():
        for name, _ in list(each.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(each, name, None)
        for name, _ in list(each.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(each, name, None)
    add_mixin([module], Skipped)
