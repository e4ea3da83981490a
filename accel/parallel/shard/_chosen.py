# SPDX-License-Identifier: Apache-2.0
"""Modules of a model that a plan names: units of sharding, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from torch import nn

from accel.errors import PrepareError, did_you_mean
from accel.parallel._paths import matching, named_modules

Fits = Callable[[nn.Module], str]  # the reason that keeps a module from being a unit; empty if there is none


def modules_named(model: nn.Module, wanted: Sequence[str], *, where: str) -> dict[str, nn.Module]:
    """Return the modules of a model that patterns or class names mean, by name. No communication.

    Args:
        model: the model.
        wanted: patterns of paths, in which `*` stands for one component, or names of classes.
        where: the setting, for errors.

    Raises:
        PrepareError: entries that mean no module; all of them.
    """
    hits = {entry: _matches(model, entry) for entry in wanted}
    if strangers := [entry for entry, found in hits.items() if not found]:
        named = dict(named_modules(model))
        kinds = sorted({type(each).__name__ for each in named.values()})
        raise PrepareError(
            "the plan names modules that the model does not have",
            expected="paths of modules, with * for one component, or names of classes",
            got=", ".join(map(repr, strangers)),
            where=where,
            fix=did_you_mean(strangers[0], [*filter(None, named), *kinds]),
        )
    return {name: module for found in hits.values() for name, module in found.items()}


def ignored_ids(model: nn.Module, ignored: Sequence[str]) -> frozenset[int]:
    """Return the `id` of each parameter below modules that a plan ignores; entries that mean none are passed over."""
    modules = [module for entry in ignored for module in _matches(model, entry).values()]
    return frozenset(id(each) for module in modules for each in module.parameters())


def _matches(model: nn.Module, entry: str) -> dict[str, nn.Module]:
    """Return the modules that a pattern of paths or the name of a class means, by name."""
    named = dict(named_modules(model))
    hits = set(matching(named, entry))
    return {name: each for name, each in named.items() if name in hits or type(each).__name__ == entry}


def ignored_parameters(model: nn.Module, ignored: Sequence[str]) -> list[nn.Parameter]:
    """Return the parameters that a plan leaves alone, each once. No communication.

    Args:
        model: the model.
        ignored: as of `Plan`.

    Raises:
        PrepareError: as `modules_named`; or one of them is trainable, named: nobody would exchange its gradient.
    """
    found: dict[int, nn.Parameter] = {}
    for name, module in modules_named(model, ignored, where="Plan.ignored").items():
        for key, parameter in module.named_parameters():
            found[id(parameter)] = parameter
            if parameter.requires_grad:
                raise PrepareError(
                    "a parameter that is not sharded is trainable, so its gradient would stay on each rank",
                    expected="frozen parameters in the modules that the plan ignores",
                    got=f"{name}.{key}" if name else key,
                    where="Plan.ignored",
                    fix="Freeze it with requires_grad_(False), or let it be sharded.",
                )
    return list(found.values())


def units_named(model: nn.Module, wanted: Sequence[str], problem_of: Fits) -> list[str]:
    """Return the names of the modules that a plan's `units` name, apart from the model itself.

    Args:
        model, wanted: as for `modules_named`.
        problem_of: gives the reason that keeps a module from being a unit.

    Raises:
        PrepareError: as `modules_named`; or modules that cannot be units, all of them.
    """
    found = modules_named(model, wanted, where="Plan.units")
    problems = {name: problem for name, module in found.items() if name and (problem := problem_of(module))}
    if problems:
        raise PrepareError(
            "modules that the plan names cannot be units",
            got="; ".join(f"{name}: {problem}" for name, problem in problems.items()),
            where="Plan.units",
            fix="Name modules that are called and whose parameters no other uses.",
        )
    return [name for name in found if name]


def units_in(
    root: nn.Module, model: nn.Module, units: Literal["auto"] | Sequence[str] | int
) -> Literal["auto"] | Sequence[str] | int:
    """Return a plan's `units` for a stage of a model: the names in the stage of the modules that it names in the model.

    Args:
        root: the stage, or the model itself.
        model: the model.
        units: as of `Plan`.
    """
    if isinstance(units, int) or units == "auto":
        return units
    chosen = {id(module) for entry in units for module in _matches(model, entry).values()}
    named = named_modules(root)
    return [name for name, module in named if name and id(module) in chosen]


def units_of_size(model: nn.Module, least: int, fits: Callable[[nn.Module], bool]) -> list[str]:
    """Return the names of the innermost modules with so many parameters, and of those around them with as many more.

    Args:
        model: the model.
        least: number of elements of the parameters that are in no inner unit.
        fits: whether a module can be a unit.
    """
    found: list[str] = []
    taken: set[int] = set()
    named = list(named_modules(model))
    for name, module in reversed(named):  # what is inside of a module comes after it in the list
        own = {id(each): each.numel() for each in module.parameters() if id(each) not in taken}
        if name and sum(own.values()) >= least and fits(module):
            found.append(name)
            taken |= own.keys()
    return found
