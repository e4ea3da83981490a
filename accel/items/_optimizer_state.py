# SPDX-License-Identifier: Apache-2.0
"""An optimizer's state by names of parameters, and back to torch's form, by their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import msgspec
import torch

from accel.checkpoint import Kept, Making, decode, encode
from accel.errors import CheckpointError
from accel.items import _packed_state, _zero
from accel.items._kinds import is_zero
from accel.optim import parameters_of
from accel.storage import dtype_name

Names = Mapping[int, str]

_NAMING = ("params", "param_names")  # a group's own account of its parameters, which names replace here


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A parameter group: names in order, and its encoded options."""

    params: tuple[str, ...]
    options: dict[str, Any]


class ParamFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape and kind of a parameter when it was saved."""

    dtype: str
    shape: tuple[int, ...]


class OptimizerValue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An optimizer's entry in a manifest.

    Attributes:
        groups: parameter groups.
        params: dtype and shape of every parameter.
        state: encoded state by parameter.
        rest: encoded state beside torch's own, of some optimizers.
    """

    groups: tuple[Group, ...]
    params: dict[str, ParamFacts]
    state: dict[str, Any]
    rest: dict[str, Any]

    def encoded(self) -> list[Any]:
        """Return all encoded values."""
        return [self.state, self.rest, [group.options for group in self.groups]]

    def renamed(self, moved: Mapping[str, str]) -> OptimizerValue:
        """Return the value with other names for some parameters."""
        return OptimizerValue(
            groups=tuple(
                Group(tuple(moved.get(each, each) for each in group.params), group.options) for group in self.groups
            ),
            params={moved.get(each, each): held for each, held in self.params.items()},
            state={moved.get(each, each): held for each, held in self.state.items()},
            rest=self.rest,
        )

    def part(self, names: Iterable[str]) -> OptimizerValue:
        """Return the value with some of the parameters only."""
        held = set(names)
        return OptimizerValue(
            groups=tuple(Group(tuple(n for n in group.params if n in held), group.options) for group in self.groups),
            params={name: each for name, each in self.params.items() if name in held},
            state={name: each for name, each in self.state.items() if name in held},
            rest=self.rest,
        )


def named_parameters(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, torch.Tensor]:
    """Return an optimizer's parameters by name, in torch's own order; those without a name get their position."""
    return {names.get(id(p), str(index)): p for index, p in enumerate(parameters_of([optimizer]))}


def state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state in torch's form, of all groups and of the parameters that this rank holds.

    Raises:
        CheckpointError: see `local_optimizer`.
    """
    return _zero.state_dict(optimizer) if is_zero(optimizer) else optimizer.state_dict()


def encode_optimizer(
    optimizer: torch.optim.Optimizer,
    item: str,
    names: Names,
    tensors: dict[str, torch.Tensor],
    kept: Kept | None = None,
) -> OptimizerValue:
    """Encode an optimizer's state by names of parameters.

    Args:
        optimizer: the optimizer.
        item: name of the item, with which the tensors' names begin.
        names: parameter names by `id` of the parameter; a parameter without one is named by its position.
        tensors: receives the tensors by name.
        kept: receives the records by path.

    Raises:
        CheckpointError: something in the state cannot be stored.
    """
    listed = named_parameters(optimizer, names)
    packed = _state_of(optimizer, item)
    order = list(listed)
    state = dict[str, Any]()
    for index, entries in packed["state"].items():
        if type(index) is not int or not 0 <= index < len(order):
            raise CheckpointError("state that belongs to no parameter", got=repr(index), where=f"{item}.state")
        path = f"{item}.state.{order[index]}"
        state[order[index]] = encode(_packed_state.take_apart(entries, path), path, tensors, kept)
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
    params = {name: ParamFacts(dtype_name(p.dtype), tuple(p.shape)) for name, p in listed.items()}
    return OptimizerValue(groups, params, state, rest)


def decode_optimizer(
    optimizer: torch.optim.Optimizer,
    stored: OptimizerValue,
    item: str,
    names: Names,
    tensors: Mapping[str, torch.Tensor],
    making: Making | None = None,
) -> dict[str, Any]:
    """Return a state dict in torch's form, for a live optimizer that fits.

    Args:
        optimizer: the live optimizer.
        stored: entry of a manifest.
        item: name of the item.
        names: the live parameters' names by `id`.
        tensors: tensors of the checkpoint; the optimizer may keep them.
        making: makes records.

    Raises:
        CheckpointError: the manifest's entry is no state of an optimizer.
    """
    listed, where = named_parameters(optimizer, names), f"item {item}"
    state: dict[int, Any] = {}
    for index, name in enumerate(listed):
        if name in stored.state:
            path = f"{item}.state.{name}"
            entries = decode(stored.state[name], where, tensors, path, making)
            if not isinstance(entries, dict):
                raise CheckpointError("not a state of a parameter", got=repr(entries), where=f"{where}, {name}")
            state[index] = _packed_state.put_together(cast("dict[str, Any]", entries), listed[name], path)
    live = state_dict(optimizer)["param_groups"]
    groups: list[dict[str, Any]] = []
    for i, (group, mine) in enumerate(zip(stored.groups, live, strict=True)):
        options: dict[str, Any] = {}
        for key, value in group.options.items():
            option = decode(value, where, tensors, f"{item}.param_groups[{i}].{key}", making)
            options[key] = _beside(option, mine.get(key))
        groups.append(options | {key: mine[key] for key in _NAMING if key in mine})
    rest = {key: decode(value, where, tensors, f"{item}.{key}", making) for key, value in stored.rest.items()}
    return rest | {"state": state, "param_groups": groups}


def _state_of(optimizer: torch.optim.Optimizer, item: str) -> dict[str, Any]:
    try:
        return state_dict(optimizer)
    except RuntimeError as error:  # such as of an optimizer whose state is spread over ranks in a way of its own
        raise CheckpointError(
            f"a {type(optimizer).__name__} that does not give its state: {error}",
            where=item,
            fix="Shard the model by fully_shard: any optimizer's state is sharded then, and can be saved.",
        ) from error


def _beside(value: Any, live: object) -> Any:
    """Move an option that is a tensor to the device of the live one."""
    return value.to(live.device) if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor) else value
