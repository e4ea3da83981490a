# SPDX-License-Identifier: Apache-2.0
"""Values that are no plain numbers, added to a record: tensors on devices, stacked once and added without a wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import msgspec
import torch

from accel.errors import DataError, TreeError
from accel.metrics._kinds import (
    START,
    Kind,
    Nested,
    Weight,
    add_nested,
    add_nested_rows,
    contribution,
    merged,
    merged_number,
    merged_values,
    sum_of_rows,
    wide,
    wide_tensors,
)
from accel.tensors import is_dtensor


class ScalarGroup(msgspec.Struct, frozen=True, eq=False):
    """The states of scalars of one kind that come together."""

    kind: Kind
    values: Any  # shape [names], float64, on the device
    weights: Any = None  # shape [names], on the device; None while all weights came as numbers, which the record keeps


Groups = dict[tuple[str, ...], ScalarGroup]


class States(msgspec.Struct, frozen=True, eq=False):
    """The states of metrics, each in one place; the attributes are named as in `Metrics`."""

    kinds: dict[str, Kind] = {}
    by_rank: tuple[str, ...] = ()
    numbers: dict[str, float] = {}
    weights: dict[str, float] = {}
    groups: Groups = {}
    nested: dict[str, Nested] = {}


S = TypeVar("S", bound=States)


def _copied(states: S) -> S:
    """Return the record with separate tables of scalars, to be changed."""
    tables = {name: getattr(states, name).copy() for name in ("numbers", "weights", "groups")}
    return msgspec.structs.replace(states, **tables)


@torch.no_grad()
def add_on_device(states: S, weight: Weight, values: Mapping[str, torch.Tensor]) -> S:
    """Return the states with values on a device added, by name; arguments stay unchanged. No wait for the device."""
    after = _copied(states)
    by_kind: dict[Kind, list[str]] = {}
    for name in values:
        by_kind.setdefault(states.kinds[name], []).append(name)
    for kind, names in by_kind.items():
        for part in _place(after, kind, tuple(names), values[names[0]].device):
            _add(after, part, _stacked([values[name] for name in part]), weight)
    return after


def _add_contribution(states: S, name: str, added: torch.Tensor, weight: torch.Tensor) -> S:
    """Return the states with one wide contribution of shape [] on a device added. No wait for the device."""
    after = _copied(states)
    kind = states.kinds[name]
    for part in _place(after, kind, (name,), added.device):
        group = _with_weights(after, part)
        after.groups[part] = ScalarGroup(
            kind, merged(kind, group.values, added.reshape(1), weight), group.weights + wide(weight).to(added.device)
        )
    return after


def fetched(states: States) -> dict[str, tuple[float, float]]:
    """Return value and weight of each name. Waits for each device once."""
    found = {name: (value, states.weights[name]) for name, value in states.numbers.items()}
    places: dict[torch.device, list[tuple[tuple[str, ...], ScalarGroup]]] = {}
    for names, group in states.groups.items():
        places.setdefault(group.values.device, []).append((names, group))
    for groups in places.values():
        rows = [row for _, group in groups for row in (group.values, group.weights) if row is not None]
        numbers = iter(cast("list[float]", cast(Any, torch.cat(rows)).tolist()))
        for names, group in groups:
            values = [next(numbers) for _ in names]
            weights = [states.weights[name] if group.weights is None else next(numbers) for name in names]
            found.update(zip(names, zip(values, weights, strict=True), strict=True))
    return found


def _add(after: States, names: tuple[str, ...], values: torch.Tensor, weight: Weight) -> None:
    group = after.groups[names]
    if not isinstance(weight, torch.Tensor) and group.weights is None:
        for name in names:
            after.weights[name] += weight
        after.groups[names] = ScalarGroup(group.kind, merged_values(group.kind, group.values, values, weight))
        return
    group = _with_weights(after, names)
    new = wide(weight).to(group.values.device) if isinstance(weight, torch.Tensor) else weight
    after.groups[names] = ScalarGroup(
        group.kind, merged_values(group.kind, group.values, values, weight), group.weights + new
    )


def _with_weights(after: States, names: tuple[str, ...]) -> ScalarGroup:
    """Return a group with its weights on the device; weights on the host are moved."""
    group = after.groups[names]
    if group.weights is not None:
        return group
    weights = [after.weights.pop(name) for name in names]
    return ScalarGroup(
        group.kind, group.values, torch.tensor(weights, dtype=group.values.dtype, device=group.values.device)
    )


def _place(after: States, kind: Kind, names: tuple[str, ...], device: torch.device) -> list[tuple[str, ...]]:
    """Return the groups that hold the names, made of the host's states where they are new."""
    if names in after.groups:
        return [names]
    # names in a new combination leave their groups for good: each state has one place
    held = [group for group in after.groups if not set(group).isdisjoint(names)]
    for group in held:
        _take_apart(after, group)
    parts = [(name,) for name in names] if held else [names]
    for part in parts:
        if part not in after.groups:
            states = [after.numbers.pop(name, START[kind]) for name in part]
            dtype = wide(torch.empty((), device=device)).dtype
            after.groups[part] = ScalarGroup(kind, torch.tensor(states, dtype=dtype, device=device))
            for name in part:
                after.weights.setdefault(name, 0.0)
    return parts


def _take_apart(after: States, names: tuple[str, ...]) -> None:
    if len(names) == 1:
        return
    group = after.groups.pop(names)
    for i, name in enumerate(names):
        weights = None if group.weights is None else group.weights[i : i + 1]
        after.groups[(name,)] = ScalarGroup(group.kind, group.values[i : i + 1], weights)


def _stacked(values: list[torch.Tensor]) -> torch.Tensor:
    """Copy scalars into one tensor; results of a replayed CUDA graph would be overwritten by the next replay."""
    if len(values) == 1:
        return values[0].detach().reshape(1).clone()
    if any(value.dtype != values[0].dtype for value in values):
        values = [wide(value) for value in values]
    return torch.stack(values)


@torch.no_grad()
def add_others(states: S, weight: Weight, values: Mapping[str, Any]) -> S:
    """Return the states with values added, tensors or numbers or containers of them. No wait for a device.

    `weight` is a number from 0, a tensor of shape [] on a device, or one for each sample, shape [rows].
    """
    if isinstance(weight, torch.Tensor) and weight.ndim:
        for name, value in values.items():
            states = _add_rows(states, name, value, weight)
        return states
    device = weight.device if isinstance(weight, torch.Tensor) else None
    scalars: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        kind = states.kinds[name]
        number = _scalar(name, value)
        if number is None or name in states.nested:
            _check_new(states, name)
            nested = add_nested(name, states.nested.get(name), kind, wide_tensors(name, value), weight)
            states = msgspec.structs.replace(states, nested=states.nested | {name: nested})
            continue
        place = number.device if not number.is_cpu else _device_of(states, name) or device
        if place is not None:
            scalars[name] = number.to(place)
        elif weight:  # the weight is a number here
            states = _with_number(states, name, contribution(kind, wide(number), weight).item(), float(weight))
    if scalars and (isinstance(weight, torch.Tensor) or weight):
        states = add_on_device(states, weight, scalars)
    return states


def _add_rows(states: S, name: str, value: Any, weights: torch.Tensor) -> S:
    """Return the states with values of single samples added."""
    kind = states.kinds[name]
    scalar = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.ndim < 2)
    values = wide_tensors(name, value)
    if not scalar or name in states.nested:
        _check_new(states, name)
        nested = add_nested_rows(name, states.nested.get(name), kind, values, weights)
        return msgspec.structs.replace(states, nested=states.nested | {name: nested})
    total = wide(weights.to(values.device)).sum()
    added = sum_of_rows(name, values, kind, weights, total)
    place = _device_of(states, name)
    if added.is_cpu and place is None:
        weight = total.item()
        return _with_number(states, name, added.item(), weight) if weight else states
    place = place or added.device
    return _add_contribution(states, name, added.to(place), total.to(place))


def _scalar(name: str, value: Any) -> torch.Tensor | None:
    """Return a number as a tensor of shape []; None for everything else."""
    if is_dtensor(value):
        raise TreeError("a DTensor among the values", where=name, fix="Pass its full_tensor().")
    if isinstance(value, torch.Tensor):
        if value.is_complex():
            raise TreeError("only real numbers are added up", got=str(value.dtype), where=name)
        return None if value.ndim else value
    if isinstance(value, int | float):
        return torch.as_tensor(value, dtype=torch.float64)
    return None


def _with_number(states: S, name: str, added: float, weight: float) -> S:
    after = _copied(states)
    kind = states.kinds[name]
    after.numbers[name] = merged_number(kind, after.numbers.get(name, START[kind]), added)
    after.weights[name] = after.weights.get(name, 0.0) + weight
    return after


def _device_of(states: States, name: str) -> torch.device | None:
    """Return the device of a name's state; None for the host or no state yet."""
    return next((group.values.device for names, group in states.groups.items() if name in names), None)


def _check_new(states: States, name: str) -> None:
    """Raise unless a metric of several numbers has been one from the start."""
    if name in states.numbers or _device_of(states, name) is not None:
        raise DataError(
            "values of another form than before",
            expected="a number, as before",
            got="a tensor with dimensions, or a container",
            where=name,
            fix="Add the same containers and shapes each time.",
        )
