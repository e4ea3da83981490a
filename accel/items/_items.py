# SPDX-License-Identifier: Apache-2.0
"""Items to tensors and values: what a checkpoint holds of modules, optimizers, stateful objects, records and values."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
from torch import nn

from accel.checkpoint import Content, Item, Kept, encode, encode_record, record_tag
from accel.context import DistContext
from accel.errors import CheckpointError, ConfigError
from accel.items._bases import BASE, trainable_names, without_base
from accel.items._kinds import Stateful, kind_of, type_name, without_wrappers
from accel.items._modules import ModuleState, module_state
from accel.items._optimizers import Names, encode_optimizer
from accel.items._parts import divided_names, without_parts
from accel.items._records import check_records
from accel.items._renaming import SaveTransform, transformed_tensors
from accel.items._rows import write_row

_OfItem = tuple[str, torch.Tensor]  # a tensor, and the item that it is of


def capture(ctx: DistContext, items: Mapping[str, object], transform: SaveTransform | None = None) -> Content:
    """Take items apart into what this rank brings to a checkpoint. No communication; nothing is copied.

    Raises:
        CheckpointError: something cannot be stored, named by its path.
        ConfigError: a record says that this is no moment to save, or the transform returned what it may not.
    """
    shared: dict[str, torch.Tensor] = {}
    main: dict[str, torch.Tensor] = {}
    own: dict[str, torch.Tensor] = {}
    loose: dict[str, torch.Tensor] = {}
    trainable = trainable_names(items)
    divided, items = divided_names(items), without_wrappers(without_parts(items))
    modules, bases = module_states(items), dict[str, dict[str, str]]()
    for name in sorted(trainable):
        modules[name], bases[name] = without_base(name, modules[name])
    parameters, buffers, names = _capture_modules(modules, transform)
    for found, to_all, to_some in ((parameters, shared, own), (buffers, main, loose)):
        for name, (item, tensor) in found.items():
            (to_some if item in divided else to_all)[name] = tensor
    entries, kept = dict[str, Item](), Kept()
    for name, item in items.items():
        same, first = (own, loose) if name in divided else (shared, main)
        try:
            entries[name] = _capture_item(name, item, modules, names, same, first, kept)
        except CheckpointError:
            check_records(kept)  # a record within a step may hold what cannot be stored, and has more to say
            raise
        except RecursionError as error:
            raise CheckpointError("a value that contains itself, or is nested too deeply", where=name) from error
    for name, digests in bases.items():
        entries[name] = msgspec.structs.replace(entries[name], value={**entries[name].value, BASE: digests})
    check_records(kept)
    return Content(shared=shared, main=main, own=own, loose=loose, items=entries, row=write_row(ctx, kept))


def module_states(items: Mapping[str, object]) -> dict[str, ModuleState]:
    """Return the live state of every module among the items."""
    return {name: module_state(item, name) for name, item in items.items() if isinstance(item, nn.Module)}


def parameter_names(modules: Mapping[str, ModuleState]) -> Names:
    """Return the full name of every parameter of the modules, by `id`; the first in sorted order of a tied one."""
    names: dict[int, str] = {}
    for item, state in sorted(modules.items()):
        for name, parameter in sorted(state.parameters.items()):
            names.setdefault(id(parameter), f"{item}.{name}")
    return names


def _capture_modules(
    modules: Mapping[str, ModuleState], transform: SaveTransform | None
) -> tuple[dict[str, _OfItem], dict[str, _OfItem], Names]:
    """Return what modules hold by name, parameters and other tensors; and the parameters' names by `id`."""
    named: dict[str, torch.Tensor] = {}
    parameters: set[str] = set()
    once: dict[int, torch.Tensor] = {}  # tied tensors stay one object
    for item, state in modules.items():
        parameters |= {f"{item}.{key}" for key in state.parameters}
        for key, tensor in {**state.parameters, **state.buffers}.items():
            named[f"{item}.{key}"] = once.setdefault(id(tensor), tensor.detach())
    found = transformed_tensors(named, modules, transform)
    old_names = {id(tensor): name for name, tensor in reversed(named.items())}
    kept: dict[str, _OfItem] = {}
    rest: dict[str, _OfItem] = {}
    moved: dict[str, str] = {}
    for name, tensor in sorted(found.items()):
        old = name if name in named else old_names.get(id(tensor), name)
        moved.setdefault(old_names.get(id(tensor), name), name)
        (kept if old in parameters else rest)[name] = old.partition(".")[0], tensor
    return kept, rest, {key: moved.get(name, name) for key, name in parameter_names(modules).items()}


def _capture_item(
    name: str,
    item: object,
    modules: Mapping[str, ModuleState],
    names: Names,
    shared: dict[str, torch.Tensor],
    main: dict[str, torch.Tensor],
    kept: Kept,
) -> Item:
    kind = kind_of(item)
    if isinstance(item, nn.Module):
        state = modules[name]
        value = {key: encode(extra, f"{name}.{key}", main, kept) for key, extra in state.extras.items()}
    elif isinstance(item, torch.optim.Optimizer):
        value = msgspec.to_builtins(encode_optimizer(item, name, names, shared, kept))
    elif kind == "stateful" and isinstance(item, Stateful):
        value = encode(item.state_dict(), name, main, kept)
    elif kind == "record":
        value = record_tag(item) | encode_record(item, name, main, kept)
    else:
        value = encode(item, name, main, kept)
    return Item(kind=kind, type=type_name(item), value=value)


def check_items(items: Mapping[str, object], where: str) -> None:
    """Raise unless there are items and their names are identifiers.

    Raises:
        ConfigError: there are none, or a name is none.
    """
    if not items:
        raise ConfigError("nothing to checkpoint", expected="at least one item", got="none", where=where)
    for name in items:
        if not isinstance(name, str) or not name.isidentifier():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                "not a name of an item", expected="an identifier, such as model", got=repr(name), where=where
            )
