# SPDX-License-Identifier: Apache-2.0
"""Kinds of items, and the classes that they go by, without what other libraries or torch wrap around them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch
from torch import nn

from accel.checkpoint import Item, ItemKind, is_record, is_sharded
from accel.items._problems import Problems
from accel.items._zero import inner
from accel.parallel import unwrap_model

_BITS = ("8", "16", "32", "64")
_NUMBERS = frozenset({"int", "float", "longdouble", *(kind + n for kind in ("int", "uint", "float") for n in _BITS)})


@runtime_checkable
class Stateful(Protocol):
    """An object that gives its state as plain values and tensors, and takes it back in place."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Take a state that `state_dict` gave."""
        ...


def kind_of(item: object) -> ItemKind:
    """Return how an item is saved and loaded."""
    if isinstance(item, nn.Module):
        return "module"
    if isinstance(item, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(item, msgspec.Struct):
        return "record"
    if isinstance(item, Stateful) and not isinstance(item, type):
        return "stateful"
    return "record" if is_record(item) else "value"


def type_name(item: object) -> str:
    """Return the name of an item's class, without wrappers."""
    if isinstance(item, torch.Tensor) and is_sharded(item):
        return "Tensor"  # what a mesh spreads, another mesh or none takes back
    if isinstance(item, torch.optim.Optimizer):
        return type(inner(bare_optimizer(item))).__qualname__
    if isinstance(item, Path):
        return "Path"  # whatever system it is of
    return type(unwrap_model(item) if isinstance(item, nn.Module) else item).__qualname__


def bare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside of wrappers that share its state, as those of Accelerate and Fabric do."""
    held = getattr(optimizer, "optimizer", None)
    if not isinstance(held, torch.optim.Optimizer) or held is optimizer:
        return optimizer
    shares = held.state is optimizer.state and held.param_groups is optimizer.param_groups
    return bare_optimizer(held) if shares else optimizer


def without_wrappers(items: Mapping[str, object]) -> dict[str, object]:
    """Return items with optimizers that are not wrapped."""
    optimizers = {name: item for name, item in items.items() if isinstance(item, torch.optim.Optimizer)}
    return {**items, **{name: bare_optimizer(each) for name, each in optimizers.items()}}


def follow(wrapper: object) -> None:
    """Let the wrappers of an optimizer that keep references to its state hold what it holds by now. Mutates them."""
    held = getattr(wrapper, "optimizer", None)
    if isinstance(wrapper, torch.optim.Optimizer) and isinstance(held, torch.optim.Optimizer):
        follow(held)
        for name in vars(wrapper).keys() & {"state", "param_groups"}:
            vars(wrapper)[name] = getattr(held, name)


def same_kind(name: str, live: object, item: Item, problems: Problems) -> bool:
    """Whether an item can be loaded at all; None leaves it in the file, unless it is a plain value."""
    if live is None:
        return item.kind == "value"
    named = kind_of(live) != "module" and item.type != ""  # a module is its tensors, and other formats name no classes
    numbers = {type_name(live), item.type} <= _NUMBERS  # 0 stands for a number that may have become 0.5
    if kind_of(live) == item.kind == "optimizer" and _is_wrapper_name(item.type):
        return True
    if kind_of(live) != item.kind or (named and type_name(live) != item.type and not numbers):
        problems.wrong_type(f"item {name}", f"{kind_of(live)} {type_name(live)}", f"{item.kind} {item.type}")
        return False
    return True


def compare_class(name: str, live: object, value: object, problems: Problems) -> None:
    """Note a value of another class than the live one; None stands for any, a number for any number."""
    classes = [torch.Tensor if isinstance(each, torch.Tensor) else type(each) for each in (live, value)]
    if live is not None and classes[0] is not classes[1] and not {each.__name__ for each in classes} <= _NUMBERS:
        problems.wrong_type(f"item {name}", classes[0].__name__, classes[1].__name__)


def _is_wrapper_name(name: str) -> bool:
    """Whether a checkpoint names the class of a wrapper, which older versions stored: Accelerate's, or Fabric's."""
    return name in ("AcceleratedOptimizer", "_FabricOptimizer") or name.startswith("Fabric")
