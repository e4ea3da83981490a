# SPDX-License-Identifier: Apache-2.0
"""Units of sharding: modules that are sharded one by one, by size or by a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from accel.errors import PrepareError
from accel.errors._checks import did_you_mean, with_article
from accel.parallel._blocks import is_called
from accel.parallel._labels import heir_of
from accel.parallel._modules import is_elsewhere, matching
from accel.parallel._private import has_hooks
from accel.parallel._spread import ModelView

Fits = Callable[[nn.Module], str]  # the reason that keeps a module from being a unit; empty if there is none


def modules_named(view: ModelView, wanted: Sequence[str], *, where: str) -> dict[str, nn.Module]:
    """Return the modules that patterns of paths (`*` is one component) or class names mean, by name; `PrepareError`
    with all that mean none."""
    hits = {entry: _matches(view, entry) for entry in wanted}
    if strangers := [entry for entry, found in hits.items() if not found]:
        kinds = sorted({type(each).__name__ for each in view.modules.values()})
        raise PrepareError(
            "the plan names modules that the model does not have",
            expected="paths of modules, with * for one component, or names of classes",
            got=", ".join(map(repr, strangers)),
            where=where,
            fix=did_you_mean(strangers[0], [*filter(None, view.modules), *kinds]),
        )
    return {name: module for found in hits.values() for name, module in found.items()}


def ignored_ids(view: ModelView, ignored: Sequence[str]) -> frozenset[int]:
    """Return the `id` of each parameter below modules that a plan ignores; entries that mean none are passed over."""
    modules = [module for entry in ignored for module in _matches(view, entry).values()]
    return frozenset(id(each) for module in modules for each in module.parameters())


def together_ids(view: ModelView, together: Sequence[str]) -> frozenset[int]:
    """Return the `id` of each module that a plan keeps in the unit around it, and of those below."""
    held = [module for entry in together for module in _matches(view, entry).values()]
    return frozenset(id(each) for module in held for each in module.modules())


def _matches(view: ModelView, entry: str) -> dict[str, nn.Module]:
    """Return the modules that a pattern of paths or the name of a class means, by name."""
    hits = set(matching(view.modules, entry))
    return {name: each for name, each in view.modules.items() if name in hits or type(each).__name__ == entry}


def check_ignored(view: ModelView, ignored: Sequence[str]) -> None:
    """Raise `PrepareError` for a trainable parameter that a plan ignores: nothing would reduce its gradient."""
    for name, module in modules_named(view, ignored, where="Plan.ignored").items():
        for key, parameter in module.named_parameters():
            if parameter.requires_grad:
                raise PrepareError(
                    "a parameter that is not sharded is trainable, so its gradient would stay on each rank",
                    expected="frozen parameters in the modules that the plan ignores",
                    got=f"{name}.{key}" if name else key,
                    where="Plan.ignored",
                    fix="Freeze it with requires_grad_(False), or let it be sharded.",
                )


def units_named(view: ModelView, wanted: Sequence[str], problem_of: Fits) -> list[str]:
    """Return the names of the modules that a plan's `units` name, but for the model; `PrepareError` with all that
    cannot be units."""
    found = modules_named(view, wanted, where="Plan.units")
    problems = {name: problem for name, module in found.items() if name and (problem := problem_of(module))}
    if problems:
        raise PrepareError(
            "modules that the plan names cannot be units",
            got="; ".join(f"{name}: {problem}" for name, problem in problems.items()),
            where="Plan.units",
            fix="Name modules that are called and share no parameters with other modules.",
        )
    return [name for name in found if name]


def units_in(
    root: ModelView, view: ModelView, units: Literal["auto"] | Sequence[str] | int
) -> Literal["auto"] | Sequence[str] | int:
    """Return a plan's `units` for a stage of a model: the names in the stage of the modules that it names in the
    model, except modules of other stages."""
    if isinstance(units, int) or units == "auto":
        return units
    named = [module for entry in units for module in _matches(view, entry).values()]
    chosen = {id(module) for module in named if not is_elsewhere(module)}
    return [name for name, module in root.modules.items() if name and id(module) in chosen]


def units_of_size(view: ModelView, least: int, fits: Callable[[nn.Module], bool]) -> list[str]:
    """Return the names of the innermost modules with so many parameters outside of inner units, and of those around
    with as many more."""
    found: list[str] = []
    taken: set[int] = set()
    for name, module in reversed(view.modules.items()):  # submodules come after their module in the list
        own = {id(each): each.numel() for each in module.parameters() if id(each) not in taken}
        if name and sum(own.values()) >= least and fits(module):
            found.append(name)
            taken |= own.keys()
    return found


_WHERE = "prepare_model, strategy fsdp"


def plan_units(
    view: ModelView,
    leaves: Sequence[str] = (),
    *,
    units: Literal["auto"] | Sequence[str] | int = "auto",
    wide: frozenset[int] = frozenset(),
    ignored: frozenset[int] = frozenset(),
    together: frozenset[int] = frozenset(),
) -> tuple[str, ...]:
    """Return the names of the modules to shard, inner ones first and the model itself, "", last. No communication.

    `leaves`: further units, with no unit inside. `wide`, `ignored`: the `id` of parameters in wider dtypes, and of
    those not sharded. `together`: the `id` of modules that are no units.
    """
    model = view.model
    _check_model(view, ignored)
    paths = _Paths(view, wide)
    unsharded = ignored | {id(each) for each in view.parameters.values() if is_indivisible(each)}
    inside = tuple(f"{name}." for name in leaves)
    chosen = [name for name in _chosen(view, units, paths, together) if not name.startswith(inside)]
    blocks = [name for name in chosen if _parameter_ids(model, name) - unsharded]
    # gradients of a unit are sent together, in one dtype
    inner = [name for unit in (*blocks, "") for name in _of_other_dtypes(model, unit, (*blocks, *leaves), paths)]
    names = {*inner, *blocks, *leaves} - {""}
    _check_together(model, names, together)
    return (*sorted(names, key=lambda name: (-name.count("."), name)), "")


def _parameter_ids(model: nn.Module, name: str) -> set[int]:
    return {id(each) for each in model.get_submodule(name).parameters()}


def _chosen(
    view: ModelView, units: Literal["auto"] | Sequence[str] | int, paths: _Paths, together: frozenset[int]
) -> list[str]:
    """Return the names of the blocks to shard one by one."""
    if isinstance(units, int):
        return units_of_size(
            view, units, lambda module: is_called(module) and _is_closed(module, paths) and id(module) not in together
        )
    if units != "auto":
        return units_named(view, units, lambda module: _unit_problem(module, paths))
    declared = {name for module in view.modules.values() for name in _declared(module)}
    found = _blocks(view, view.model, declared, {id(block.module) for block in view.blocks})
    # a block that shares parameters with modules outside stays with the model
    return [name for name, module in found if _is_closed(module, paths) and id(module) not in together]


def _check_together(model: nn.Module, names: Iterable[str], together: frozenset[int]) -> None:
    """Raise `PrepareError` for units in modules that a plan keeps in the unit around them."""
    if inside := sorted(name for name in names if id(model.get_submodule(name)) in together):
        raise PrepareError(
            "parts that are kept together cannot hold units",
            expected="one dtype in these modules, no experts along ep, and none of them in Plan.units",
            got=", ".join(inside),
            where="Plan.together",
            fix="Convert them to the dtype of the unit around them, or leave them out of Plan.units.",
        )


def _unit_problem(module: nn.Module, paths: _Paths) -> str:
    """Return the reason that keeps a module from being a unit; empty if there is none."""
    if not is_called(module):
        return f"{with_article(type(module).__name__)} has no forward"
    if not any(True for _ in module.parameters()):
        return "without parameters"
    return "" if _is_closed(module, paths) else "its parameters are used outside of it too"


class _Paths(NamedTuple):
    """Names and dtypes of a view's parameters; `wide` is as for `plan_units`."""

    view: ModelView
    wide: frozenset[int]

    def format_of(self, parameter: nn.Parameter) -> tuple[torch.dtype, bool]:
        """Return a parameter's dtype and whether it is in `wide`; both are equal for parameters sent together."""
        return parameter.dtype, id(parameter) in self.wide


def _declared(module: nn.Module) -> Iterable[str]:
    listed = cast(Any, getattr(module, "_no_split_modules", None)) or ()
    return (listed,) if isinstance(listed, str) else listed


def _blocks(
    view: ModelView, module: nn.Module, declared: set[str], candidates: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    """The outermost blocks below a module, by their first paths; one that holds declared ones leaves it to them."""
    for child in module.children():
        inside = {type(each).__name__ for each in child.modules()}
        chosen = type(child).__name__ in declared or (id(child) in candidates and declared.isdisjoint(inside))
        if chosen and is_called(child) and any(True for _ in child.parameters()):
            yield view.places[id(child)][0], child
        else:
            yield from _blocks(view, child, declared, candidates)


def _is_closed(module: nn.Module, paths: _Paths) -> bool:
    """Whether every way to the module's parameters leads through it."""
    own = tuple(f"{name}." for name in paths.view.places[id(module)])
    return all(name.startswith(own) for each in module.parameters() for name in paths.view.owners[id(each)])


def _of_other_dtypes(model: nn.Module, unit: str, units: Sequence[str], paths: _Paths) -> list[str]:
    """Modules of a unit that must be separate units, because their parameters have another dtype than most."""
    top = model.get_submodule(unit)
    own = [*top.parameters()] if unit else [*paths.view.parameters.values()]
    others = [name for name in units if name != unit and f"{name}.".startswith(f"{unit}." if unit else "")]
    taken = {id(each) for name in others for each in model.get_submodule(name).parameters()}
    sizes = Counter[tuple[torch.dtype, bool]]()
    for parameter in _trained(own, taken):
        sizes[paths.format_of(parameter)] += parameter.numel()
    if len(sizes) < 2:
        return []
    main = sizes.most_common(1)[0][0]
    found = list(_uniform(top, main, taken, paths))
    taken |= {id(each) for name in found for each in model.get_submodule(name).parameters()}
    for parameter in _trained(own, taken):
        if parameter.dtype != main[0]:
            raise PrepareError(
                "parameters with gradients that are sent together have two dtypes",
                expected=f"{main[0]}, as most of {unit or type(model).__name__}",
                got=str(parameter.dtype),
                where=f"{_WHERE}, {paths.view.owners[id(parameter)][0]}",
                fix="Convert it, or put it into a separate module.",
            )
    return found


def _uniform(module: nn.Module, main: tuple[torch.dtype, bool], taken: set[int], paths: _Paths) -> Iterator[str]:
    """The first paths of the outermost modules below with parameters of one other dtype than the main one."""
    for child in module.children():
        formats = {paths.format_of(parameter) for parameter in _trained(child.parameters(), taken)}
        if len(formats) == 1 and main not in formats and is_called(child) and _is_closed(child, paths):
            yield paths.view.places[id(child)][0]
        elif formats - {main}:
            yield from _uniform(child, main, taken, paths)


def _trained(parameters: Iterable[nn.Parameter], taken: set[int]) -> Iterator[nn.Parameter]:
    """The parameters with gradients in one message; parameters that are not sharded have separate messages."""
    return (each for each in parameters if each.requires_grad and not is_indivisible(each) and id(each) not in taken)


def is_indivisible(parameter: nn.Parameter) -> bool:
    """Return whether ranks cannot share a parameter: it has no dimension, or no elements."""
    return parameter.ndim == 0 or parameter.numel() == 0


def _check_model(view: ModelView, ignored: frozenset[int]) -> None:
    if not is_called(view.model):
        raise PrepareError(
            "a container without a forward cannot be sharded",
            expected="a module with a forward",
            got=type(view.model).__name__,
            where=_WHERE,
            fix="Prepare the modules in it one by one.",
        )
    for name, parameter in view.parameters.items():
        problem, fix = ("", "") if id(parameter) in ignored else _problem(parameter)
        if problem:
            raise PrepareError("a parameter cannot be sharded", got=problem, where=f"{_WHERE}, {name}", fix=fix)


def _problem(parameter: nn.Parameter) -> tuple[str, str]:
    """Return the reason that keeps a parameter from being sharded, and the fix; empty if there is none."""
    if heir_of(parameter) is not None:
        return "one that another model shares, and that was sharded with it", "Prepare both as one module."
    if is_lazy(parameter):
        return "one without a shape yet", "Run the model once on the CPU, before it is prepared."
    if not parameter.is_contiguous():
        return f"strides {parameter.stride()}", "Make it contiguous: parameter.data = parameter.data.contiguous()."
    if has_hooks(parameter):
        return "one with hooks, which its shards would not have", (
            "After prepare_model: parameter.register_post_accumulate_grad_hook(hook)."
        )
    return "", ""
