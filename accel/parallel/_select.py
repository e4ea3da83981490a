# SPDX-License-Identifier: Apache-2.0
"""Selection of a model's modules by path, class or size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal

from torch import nn

from accel.errors import ConfigError

Select = Literal["repeated"] | type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool]


def selected(model: nn.Module, select: Select, where: str) -> dict[str, nn.Module]:
    """Return the chosen modules by name, outermost ones only; the model itself has the name "".

    Args:
        model: the model to search.
        select: "repeated" for the blocks that a ModuleList or Sequential holds at least two of, of one class that has
            modules of its own; a class, or several; or a function of a module's name and the module.
        where: the call, for errors.

    Raises:
        ConfigError: nothing is chosen, or `select` is none of these.
    """
    if select == "repeated":
        blocks = repeated(model)
        chosen = dict(_outermost(model, lambda _name, module: id(module) in blocks))
    elif isinstance(select, type | tuple):
        chosen = dict(_outermost(model, lambda _name, module: isinstance(module, select)))
    elif callable(select):
        chosen = dict(_outermost(model, select))
    else:
        raise ConfigError(
            "cannot choose by this", expected="'repeated', a class or a function", got=f"{select!r}", where=where
        )
    if not chosen:
        raise ConfigError(
            "no part of the model is chosen",
            expected="at least one of " + ", ".join(sorted({type(each).__name__ for each in model.modules()})),
            got=f"{select!r}",
            where=where,
            fix="Name a class of blocks, or give a function of (name, module).",
        )
    return chosen


def repeated(model: nn.Module) -> set[int]:
    """Return the `id` of each module with modules of its own that stands in a list beside another of its class."""
    found: set[int] = set()
    for holder in model.modules():
        if isinstance(holder, nn.ModuleList | nn.Sequential):
            blocks = [child for child in holder if any(True for _ in child.children())]
            counts = Counter(map(type, blocks))
            found.update(id(child) for child in blocks if counts[type(child)] > 1)
    return found


def _outermost(
    module: nn.Module, matches: Callable[[str, nn.Module], bool], name: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    if matches(name, module):
        yield name, module
        return
    for key, child in module.named_children():
        yield from _outermost(child, matches, f"{name}.{key}" if name else key)
