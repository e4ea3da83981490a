# SPDX-License-Identifier: Apache-2.0
"""A checkpoint and live items: compare everything, then change what can fail, then what cannot."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import torch
from torch import nn

from accel.checkpoint import Item, Saved, decode, encode
from accel.context import DistContext
from accel.errors import CheckpointError
from accel.random import RngState
from accel.training._items import Stateful, kind_of, module_states, parameter_names, type_name
from accel.training._modules import ModuleState
from accel.training._optimizers import OptimizerValue, compare_optimizer, decode_optimizer, load_optimizer
from accel.training._problems import Problems, facts
from accel.training._rng import apply_rng, check_rng
from accel.training._rows import read_row, with_own_part

Action = Callable[[], object]


@dataclass(slots=True)
class Changes:
    """What loading will do, in order.

    Attributes:
        risky: pairs of a change that runs code of others, and what makes it undone.
        copies: live tensors and what is copied into them; cannot fail.
        values: what `load_state` returns.
        rng: this rank's streams; None to seed them anew.
    """

    risky: list[tuple[Action, Action]] = field(default_factory=list[tuple[Action, Action]])
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list[tuple[torch.Tensor, torch.Tensor]])
    values: dict[str, object] = field(default_factory=dict[str, object])
    rng: RngState | None = None


def match(ctx: DistContext, saved: Saved, items: Mapping[str, object]) -> Changes:
    """Compare a checkpoint with live items; return what loading will do. Changes nothing, no communication.

    Raises:
        CheckpointError: they do not fit, every difference listed; or it holds what `save_state` never writes.
    """
    stored, problems, changes = saved.manifest.items, Problems(), Changes()
    modules = module_states(items)
    names = parameter_names(modules)
    problems.missing += [f"item {name}" for name in items.keys() - stored.keys()]
    problems.unasked += stored.keys() - items.keys()
    optimizers: dict[str, tuple[torch.optim.Optimizer, OptimizerValue]] = {}
    for name in sorted(items.keys() & stored.keys()):
        live, item = items[name], stored[name]
        changes.values[name] = live
        if not _same_kind(name, live, item, problems):
            continue
        if isinstance(live, nn.Module):
            _match_module(saved, name, modules[name], item, problems, changes)
        elif isinstance(live, torch.optim.Optimizer):
            optimizers[name] = live, _convert_optimizer(name, item)
            compare_optimizer(*optimizers[name], name, names, problems)
        elif item.kind == "stateful" and isinstance(live, Stateful):
            _match_stateful(saved, name, live, item, problems, changes)
        else:
            changes.values[name] = _new_value(ctx, saved, name, live, item, problems)
    if problems:
        raise problems.error(saved.path)
    for name, (optimizer, value) in optimizers.items():
        state = decode_optimizer(optimizer, value, name, names, _copies(saved, name, {}, torch.device("cpu")))
        changes.risky.append(_optimizer_change(optimizer, state))
    row = read_row(ctx, saved)
    changes.values = {name: with_own_part(value, name, row) for name, value in changes.values.items()}
    changes.rng = check_rng(ctx, saved, row)
    return changes


def try_risky(changes: Changes) -> list[Action]:
    """Make the changes that can fail; return what undoes them, last first. Undoes all if one fails.

    Raises:
        CheckpointError: an object refused its state.
    """
    undo: list[Action] = []
    for change, back in changes.risky:
        undo.insert(0, back)
        try:
            change()
        except Exception as error:
            rollback(undo)
            raise CheckpointError(
                f"an object refused its state: {type(error).__name__}: {error}",
                where="load_state",
                fix="Build it the way it was when it was saved; nothing has been changed.",
            ) from error
    return undo


def rollback(undo: list[Action]) -> None:
    """Undo changes."""
    for back in undo:
        back()


def finish(ctx: DistContext, saved: Saved, changes: Changes) -> None:
    """Make the changes that cannot fail: module tensors and random streams. Mutates them."""
    with torch.no_grad():
        for live, stored in changes.copies:
            live.copy_(stored)
    apply_rng(ctx, saved, changes.rng)


def _same_kind(name: str, live: object, item: Item, problems: Problems) -> bool:
    """Whether an item can be loaded at all; None leaves it in the file, unless it is a plain value."""
    if live is None:
        return item.kind == "value"
    named = kind_of(live) != "module"  # a module is its tensors, whatever its class
    numbers = {type_name(live), item.type} <= {"int", "float"}  # 0 stands for a number that may have become 0.5
    if kind_of(live) != item.kind or (named and type_name(live) != item.type and not numbers):
        problems.wrong_type(f"item {name}", f"{kind_of(live)} {type_name(live)}", f"{item.kind} {item.type}")
        return False
    return True


def _match_module(saved: Saved, name: str, live: ModuleState, item: Item, problems: Problems, changes: Changes) -> None:
    tensors = {f"{name}.{key}": tensor for key, tensor in {**live.parameters, **live.buffers}.items()}
    extras = _fields(item.value, name)
    inside = {f"{name}.{key}" for key in extras}
    stored = {key for key in saved.tensors if key.startswith(f"{name}.") and not _belongs(key, inside)}
    problems.compare_names(tensors.keys(), stored, "")
    problems.compare_names(live.extras.keys(), extras.keys(), f"{name}.")
    first: dict[int, str] = {}
    for key in sorted(tensors.keys() & stored):
        problems.compare_tensor(key, facts(tensors[key]), facts(saved.tensors[key]))
        twin = first.setdefault(id(tensors[key]), key)
        if facts(saved.tensors[twin]) == facts(saved.tensors[key]) and not _equal(saved, twin, key):
            problems.wrong_type(key, f"the same tensor as {twin}", "another one")
        changes.copies.append((tensors[key], saved.tensors[key]))
    for key in live.extras.keys() & extras.keys():
        owner, before = live.owners[key], copy.deepcopy(live.extras[key])
        value = decode(extras[key], f"item {name}", _copies(saved, name, {}, torch.device("cpu")))
        changes.risky.append((_call(owner.set_extra_state, value), _call(owner.set_extra_state, before)))


def _match_stateful(saved: Saved, name: str, live: Stateful, item: Item, problems: Problems, changes: Changes) -> None:
    mine: dict[str, torch.Tensor] = {}
    before = live.state_dict()
    encode(before, name, mine)
    tensors = _copies(saved, name, mine, torch.device("cpu"))
    for key in mine.keys() & tensors.keys():
        if mine[key].numel():  # what is empty now has yet to grow
            problems.compare_tensor(key, facts(mine[key]), facts(tensors[key]))
    state = decode(item.value, f"item {name}", tensors)
    changes.risky.append((_call(live.load_state_dict, state), _call(live.load_state_dict, copy.deepcopy(before))))


def _new_value(ctx: DistContext, saved: Saved, name: str, live: object, item: Item, problems: Problems) -> object:
    mine: dict[str, torch.Tensor] = {}
    encode(live, name, mine)
    device = ctx.device if isinstance(live, msgspec.Struct) else torch.device("cpu")
    value = decode(item.value, f"item {name}", _copies(saved, name, mine, device))
    if isinstance(live, msgspec.Struct):
        return _record(name, live, value, problems)
    live_type = torch.Tensor if isinstance(live, torch.Tensor) else type(live)
    numbers = {live_type, type(value)} <= {int, float}
    if live is not None and type(value) is not live_type and not numbers:
        problems.wrong_type(f"item {name}", live_type.__name__, type(value).__name__)
    return value


def _record(name: str, live: msgspec.Struct, value: object, problems: Problems) -> object:
    tag = live.__struct_config__.tag_field
    stored = _fields(value, name)
    problems.compare_names({*live.__struct_fields__, *filter(None, [tag])}, stored.keys(), f"{name}.")
    try:
        return msgspec.convert({_wire_name(live, key): held for key, held in stored.items()}, type(live))
    except msgspec.ValidationError as error:
        problems.wrong_type(f"item {name}", type(live).__qualname__, f"a value that is none: {error}")
        return live


def _wire_name(live: msgspec.Struct, name: str) -> str:
    names = dict(zip(live.__struct_fields__, live.__struct_encode_fields__, strict=True))
    return names.get(name, name)


def _convert_optimizer(name: str, item: Item) -> OptimizerValue:
    try:
        return msgspec.convert(item.value, OptimizerValue)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"not an optimizer's state: {error}", where=f"item {name}") from error


def _optimizer_change(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> tuple[Action, Action]:
    before = {"state": optimizer.state, "param_groups": optimizer.param_groups}  # replaced, never changed, by a load
    return _call(load_optimizer, optimizer, state), _call(optimizer.__dict__.update, before)


def _copies(saved: Saved, name: str, mine: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Copies of an item's tensors that live objects may keep, each where its live namesake lies."""
    keys = [key for key in saved.tensors if key == name or key.startswith((f"{name}.", f"{name}["))]
    return {key: saved.tensors[key].clone().to(mine[key].device if key in mine else device) for key in keys}


def _belongs(key: str, inside: set[str]) -> bool:
    return any(key == path or key.startswith((f"{path}.", f"{path}[")) for path in inside)


def _equal(saved: Saved, one: str, other: str) -> bool:
    aliases = saved.manifest.aliases
    if aliases.get(one, one) == aliases.get(other, other):
        return True
    return torch.equal(saved.tensors[one], saved.tensors[other])


def _fields(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError("not a stored value", got=type(value).__name__, where=f"item {name}")
    return cast("dict[str, Any]", value)


def _call(function: Callable[..., object], *values: Any) -> Action:
    return lambda: function(*values)
