# SPDX-License-Identifier: Apache-2.0
"""The part of a model that a stage holds: its parameters and buffers, and placeholders without memory for others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from accel.errors import PrepareError, StageError
from accel.mixins import Mixin, add_mixin
from accel.parallel._copies import shallow_copy
from accel.parallel._fakes import stand_in
from accel.parallel._modules import named_modules, named_tensors, note_module, notes_of, tensor_notes, wrapped_name
from accel.parallel._spread import ModelView


class Copied(NamedTuple):
    path: str
    module: nn.Module
    children: dict[str, nn.Module]  # when it was copied


class PartlyHeld(Mixin):
    """A module that lacks some of its parameters and buffers: they are None in its tables, and placeholders as
    attributes."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module, or a placeholder."""
        found = notes_of(cast(nn.Module, self)).get("absent", {}).get(name)
        return cast(Any, super()).__getattr__(name) if found is None else found


class Elsewhere(Mixin):
    """A module of another stage: nothing of it is saved here."""

    def __repr__(self) -> str:
        """Return its class and place. Its own text may need the parameters."""
        return f"{type(self).__name__}(of another stage)"

    def state_dict(self, *_: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return nothing: the rank of its stage saves the module."""
        _ = prefix, keep_vars
        return {} if destination is None else destination


def drop_others(
    view: ModelView, kept: Collection[str], units: Collection[str], device: torch.device
) -> list[nn.Parameter]:
    """Take all tensors but some out of a model, and mark units without any as units of another stage. Mutates the
    model.

    Args:
        kept: names of the tensors that stay.
        units: paths of the modules that stages answer calls of.
        device: of the placeholders.

    Returns:
        The parameters that no stage of this rank holds, in order.
    """
    before = view.parameters
    for path, module in view.modules.items():
        absent: dict[str, torch.Tensor] = {}
        own = (
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        )
        for name, each in own:
            if _joined(path, name) not in kept:
                absent[name] = stand_in(each, device)
                setattr(module, name, None)
        if absent:
            _lack(module, absent)
    for path in units:
        unit = view.model.get_submodule(path)
        if not any(True for _ in (*unit.parameters(), *unit.buffers())):
            _mark_elsewhere(unit)
    live = {id(each) for each in view.after().parameters.values()}
    return [each for each in before.values() if id(each) not in live]


def view_of(
    model: nn.Module, kept: Collection[str], units: Collection[str], device: torch.device, *, shards: bool
) -> nn.Module:
    """Return a copy of a model with the tensors of one stage, which it shares; it is not pipelined itself.

    A module with parameters inside and outside of `kept` is held in full; `PrepareError` if stages are sharded
    separately.
    """

    def view(path: str, module: nn.Module) -> nn.Module:
        if path and all(_joined(path, name) in kept for name, _ in named_tensors(module)):
            return module
        found = shallow_copy(module)
        note_module(found, copied=Copied(path, module, dict(module.named_children())))
        own = vars(found)  # a compiled module would hand attributes on to the module inside
        own["_parameters"], absent = _part(own["_parameters"], path, kept, device, shards=shards)
        own["_buffers"], others = _part(own["_buffers"], path, kept, device, shards=False)
        own["_modules"] = {
            key: None if child is None else view(_joined(path, key), child) for key, child in own["_modules"].items()
        }
        if absent or others:
            _lack(found, {**absent, **others})
        if path in units and not any(True for _ in found.parameters()):
            _mark_elsewhere(found)
        return found

    return view("", model)


def copies_in(stages: Iterable[nn.Module]) -> list[Copied]:
    """List the modules of a model that its stages hold copies of."""
    noted = (notes_of(each).get("copied") for stage in stages for each in stage.modules())
    return [each for each in noted if each is not None]


def check_children(copies: Iterable[Copied]) -> None:
    """Raise for a module that was replaced in the model since stages copied the module above it; a wrapper of it may
    replace it, such as that of `torch.compile`."""
    for each in copies:
        for key, child in each.children.items():
            now = vars(each.module)["_modules"].get(key)
            if now is not child and (now is None or _inside(now) is not child):
                raise _changed(_joined(each.path, key), "None" if now is None else f"now of {type(now).__name__}")


def _inside(module: nn.Module) -> object:
    name = wrapped_name(module)
    return None if name is None else getattr(module, name)


class OwnParameters(NamedTuple):
    path: str
    parameters: Mapping[str, torch.Tensor | None]  # of a module
    absent: Collection[str]  # names of other stages


def tables_in(model: nn.Module) -> list[OwnParameters]:
    """List the tables of parameters of a model's modules."""
    return [
        OwnParameters(path, vars(module)["_parameters"], notes_of(module).get("absent", ()))
        for path, module in named_modules(model)
    ]


def check_tensors(tables: Iterable[OwnParameters]) -> None:
    """Raise for a parameter that was assigned across stages: one of another stage here, or one of this stage there."""
    for path, parameters, absent in tables:
        for name, each in parameters.items():
            if each is not None and (name in absent or "placeholder" in tensor_notes(each)):
                raise _changed(_joined(path, name), "another parameter")


def _changed(name: str, now: str) -> StageError:
    return StageError(
        "a module or a parameter was replaced after the model was cut into stages, which do not see it",
        expected="the modules and parameters of prepare_model",
        got=f"{name}, {now}",
        where="the first batch after it",
        fix="Replace or tie it first, then prepare: model = accel.prepare_model(ctx, model).",
    )


def _part(
    tensors: dict[str, torch.Tensor | None], path: str, kept: Collection[str], device: torch.device, *, shards: bool
) -> tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor]]:
    """The tensors of a module if all are kept, else nothing and placeholders; whatever replaces a tensor of the first
    table replaces it in the model."""
    held = {name: each for name, each in tensors.items() if each is not None}
    own = [name for name in held if _joined(path, name) in kept]
    if len(own) == len(held) or (own and not shards):
        return tensors, {}
    if not own:
        return {}, {name: stand_in(each, device) for name, each in held.items()}
    other = next(name for name in held if name not in own)
    raise PrepareError(
        "two stages of one rank read different parameters of one module, and cannot be sharded apart",
        expected="stages of one rank without modules in common",
        got=f"{path or 'the model'}: {', '.join(sorted(own))} and {other}",
        where="prepare_model, plan=, stages",
        fix="Leave stages_per_rank out, or begin the stages at other modules: Plan(stages=[[...], [...]]).",
    )


def _lack(module: nn.Module, absent: Mapping[str, torch.Tensor]) -> None:
    note_module(module, absent={**notes_of(module).get("absent", {}), **absent})
    add_mixin([module], PartlyHeld)


def _mark_elsewhere(unit: nn.Module) -> None:
    for each in unit.modules():
        note_module(each, elsewhere=True)
        add_mixin([each], Elsewhere)


def _joined(path: str, name: str) -> str:
    return ".".join(filter(None, (path, name)))
