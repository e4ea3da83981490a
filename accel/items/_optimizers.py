# SPDX-License-Identifier: Apache-2.0
"""An optimizer's state by the names of its parameters, and back into torch's form, which counts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import torch

from accel.checkpoint import Kept, Making, decode, encode
from accel.errors import CheckpointError
from accel.items._problems import Problems, facts
from accel.items._zero import held_params, inner, load_state_dict, state_dict

Names = Mapping[int, str]

_NAMING = ("params", "param_names")  # a group's own account of its parameters, which names replace here


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A parameter group: names in order, and its encoded options."""

    params: tuple[str, ...]
    options: dict[str, Any]


class ParamFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a parameter looked like."""

    dtype: str
    shape: tuple[int, ...]


class OptimizerValue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a manifest holds of an optimizer.

    Attributes:
        groups: parameter groups.
        params: dtype and shape of every parameter.
        state: encoded state by parameter.
        rest: encoded state beside torch's own, of optimizers that add some.
    """

    groups: tuple[Group, ...]
    params: dict[str, ParamFacts]
    state: dict[str, Any]
    rest: dict[str, Any]


def encode_optimizer(
    optimizer: torch.optim.Optimizer,
    item: str,
    names: Names,
    tensors: dict[str, torch.Tensor],
    kept: Kept | None = None,
) -> OptimizerValue:
    """Take an optimizer's state apart.

    Args:
        optimizer: the optimizer.
        item: its name, with which the tensors' names begin.
        names: parameter names by `id` of the parameter; a parameter without one is named by its position.
        tensors: receives the tensors by name.
        kept: receives the records by path.

    Raises:
        CheckpointError: something in the state cannot be stored.
    """
    listed, packed = _params(optimizer, names), _state_of(optimizer, item)
    order, state = list(listed), dict[str, Any]()
    for index, entries in packed["state"].items():
        if type(index) is not int or not 0 <= index < len(order):
            raise CheckpointError("state that belongs to no parameter", got=repr(index), where=f"{item}.state")
        state[order[index]] = encode(entries, f"{item}.state.{order[index]}", tensors, kept)
    groups = tuple(
        Group(
            params=tuple(order[index] for index in cast("list[int]", group["params"])),
            options={
                key: encode(value, f"{item}.param_groups[{i}].{key}", tensors, kept)
                for key, value in group.items()
                if key not in _NAMING
            },
        )
        for i, group in enumerate(packed["param_groups"])
    )
    beside = {k: v for k, v in packed.items() if k not in ("state", "param_groups")}
    rest = {k: encode(v, f"{item}.{k}", tensors, kept) for k, v in beside.items()}
    return OptimizerValue(groups, {name: ParamFacts(*facts(p)) for name, p in listed.items()}, state, rest)


def read_value(value: Any, item: str, moved: Mapping[str, str]) -> OptimizerValue:
    """Return what a manifest holds of an optimizer, by the names that its parameters are loaded under.

    Args:
        value: the manifest's.
        item: its name, for errors.
        moved: other names of parameters.

    Raises:
        CheckpointError: it is none.
    """
    try:
        stored = msgspec.convert(value, OptimizerValue)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"not an optimizer's state: {error}", where=f"item {item}") from error
    return OptimizerValue(
        groups=tuple(
            Group(tuple(moved.get(each, each) for each in group.params), group.options) for group in stored.groups
        ),
        params={moved.get(each, each): held for each, held in stored.params.items()},
        state={moved.get(each, each): held for each, held in stored.state.items()},
        rest=stored.rest,
    )


def compare_optimizer(
    optimizer: torch.optim.Optimizer, stored: OptimizerValue, item: str, names: Names, problems: Problems
) -> None:
    """Add to `problems` in what the live optimizer's parameters and groups differ from the stored ones."""
    listed, stored_groups = _params(optimizer, names), [set(group.params) for group in stored.groups]
    problems.compare_names(listed.keys(), stored.params.keys(), f"{item}: parameter ")
    for name in listed.keys() & stored.params.keys():
        old = stored.params[name]
        problems.compare_tensor(f"{item}: parameter {name}", facts(listed[name]), (old.dtype, old.shape))
    if listed.keys() == stored.params.keys() and stored_groups != _grouped(optimizer, listed):
        sizes = [[len(group) for group in groups] for groups in (_grouped(optimizer, listed), stored_groups)]
        problems.wrong_type(f"{item}: groups of parameters", f"groups of {sizes[0]}", f"other groups, of {sizes[1]}")
    problems.compare_names(set[str](), stored.state.keys() - stored.params.keys(), f"{item}: state of ")


def part_of_value(
    optimizer: torch.optim.Optimizer, stored: OptimizerValue, names: Names
) -> tuple[OptimizerValue, set[str]]:
    """Return a stored state of the parameters that the live optimizer has, and the names of the others."""
    mine = _params(optimizer, names).keys()
    groups = tuple(Group(tuple(n for n in group.params if n in mine), group.options) for group in stored.groups)
    params = {name: each for name, each in stored.params.items() if name in mine}
    state = {name: each for name, each in stored.state.items() if name in mine}
    return OptimizerValue(groups, params, state, stored.rest), set(stored.params) - mine


def held_state(optimizer: torch.optim.Optimizer, stored: OptimizerValue, names: Names) -> OptimizerValue:
    """Return a stored state without that of parameters of which the live optimizer holds none on this rank."""
    held = held_params(optimizer)
    mine = {name for name, parameter in _params(optimizer, names).items() if id(parameter) in held}
    return msgspec.structs.replace(stored, state={name: each for name, each in stored.state.items() if name in mine})


def join_optimizers(values: Sequence[OptimizerValue], item: str) -> OptimizerValue:
    """Return the state of an optimizer of which each rank holds some; of what several hold the lowest rank's counts.

    Args:
        values: by rank.
        item: its name, for errors.

    Raises:
        CheckpointError: ranks have another number of groups.
    """
    counts = [len(value.groups) for value in values]
    if len(set(counts)) > 1:
        raise CheckpointError(
            "ranks have other numbers of parameter groups",
            expected="the groups on every rank, empty ones where it has no such parameters",
            got=f"by rank: {', '.join(map(str, counts))}",
            where=item,
        )
    groups: list[Group] = []
    for same in zip(*(value.groups for value in values), strict=True):
        names = dict.fromkeys(name for group in same for name in group.params)
        groups.append(Group(tuple(names), same[0].options))
    params: dict[str, ParamFacts] = {}
    state: dict[str, Any] = {}
    for value in reversed(values):
        params |= value.params
        state |= value.state
    return OptimizerValue(tuple(groups), params, state, values[0].rest)


def decode_optimizer(
    optimizer: torch.optim.Optimizer,
    stored: OptimizerValue,
    item: str,
    names: Names,
    tensors: Mapping[str, torch.Tensor],
    making: Making | None = None,
) -> dict[str, Any]:
    """Return a state dict in torch's form for the live optimizer, which `compare_optimizer` found to fit.

    Args:
        optimizer: the live one.
        stored: from a manifest.
        item: its name.
        names: the live parameters' names by `id`.
        tensors: the checkpoint's, copies that the optimizer may keep.
        making: makes records.

    Raises:
        CheckpointError: the manifest holds what no optimizer gave.
    """
    listed, where = _params(optimizer, names), f"item {item}"
    state: dict[int, Any] = {}
    for index, name in enumerate(listed):
        if name in stored.state:
            state[index] = decode(stored.state[name], where, tensors, f"{item}.state.{name}", making)
            if not isinstance(state[index], dict):
                raise CheckpointError("not a state of a parameter", got=repr(state[index]), where=f"{where}, {name}")
    live = cast("list[dict[str, Any]]", state_dict(optimizer)["param_groups"])
    groups: list[dict[str, Any]] = []
    for i, (group, mine) in enumerate(zip(stored.groups, live, strict=True)):
        options: dict[str, Any] = {}
        for key, value in group.options.items():
            option = decode(value, where, tensors, f"{item}.param_groups[{i}].{key}", making)
            options[key] = _beside(option, mine.get(key))
        groups.append(options | {key: mine[key] for key in _NAMING if key in mine})
    rest = {key: decode(value, where, tensors, f"{item}.{key}", making) for key, value in stored.rest.items()}
    return rest | {"state": state, "param_groups": groups}


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Put a state dict into an optimizer, dtypes included. Mutates it."""
    load_state_dict(optimizer, state)
    params, held = [p for group in optimizer.param_groups for p in group["params"]], inner(optimizer).state
    for index, entries in state["state"].items():
        live = held.get(params[index], {})  # nothing of what another rank holds
        for key, value in entries.items():  # torch casts floating state to the parameter's dtype, which loses bits
            if isinstance(value, torch.Tensor) and key in live and live[key].dtype != value.dtype:
                live[key] = value.to(live[key].device)


def _state_of(optimizer: torch.optim.Optimizer, item: str) -> dict[str, Any]:
    try:
        return state_dict(optimizer)
    except RuntimeError as error:  # such as of an optimizer whose state is spread over ranks in a way of its own
        raise CheckpointError(
            f"a {type(optimizer).__name__} that does not give its state: {error}",
            where=item,
            fix="Shard the model by fully_shard: any optimizer's state is sharded then, and can be saved.",
        ) from error


def _params(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, torch.Tensor]:
    """The optimizer's parameters by name, in torch's own order; those without a name get their position."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {names.get(id(p), str(index)): p for index, p in enumerate(params)}


def _grouped(optimizer: torch.optim.Optimizer, listed: Mapping[str, torch.Tensor]) -> list[set[str]]:
    by_id = {id(p): name for name, p in listed.items()}
    return [{by_id[id(p)] for p in group["params"]} for group in optimizer.param_groups]


def _beside(value: Any, live: object) -> Any:
    """An option that is a tensor goes where the live one lies."""
    return value.to(live.device) if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor) else value
