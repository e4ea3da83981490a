# SPDX-License-Identifier: Apache-2.0
"""Scalars on an accelerator: those that come together are stacked once and added by one kernel, without a wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec
import torch

from accel.metrics._kinds import START, Kind, Weight, merged, merged_values, wide


class Group(msgspec.Struct, frozen=True, eq=False):
    """The states of scalars of one kind that come together.

    Attributes:
        kind: their kind.
        values: shape [names], float64, on the device.
        weights: shape [names], on the device; None while all weights came as numbers, which the record keeps.
    """

    kind: Kind
    values: Any
    weights: Any = None


Groups = dict[tuple[str, ...], Group]


class Scalars(msgspec.Struct, frozen=True, eq=False):
    """States of scalars, each in one place: on the host, or in a group.

    Attributes:
        numbers, weights: states and weights on the host, by name. A name in a group may have a weight here.
        groups: states on a device, by the names that came together.
    """

    numbers: dict[str, float]
    weights: dict[str, float]
    groups: Groups


@torch.no_grad()
def add_on_device(
    scalars: Scalars, kinds: Mapping[str, Kind], weight: Weight, values: Mapping[str, torch.Tensor]
) -> Scalars:
    """Return the states with values on a device added. No wait for the device.

    Args:
        scalars: the states; they stay as they are.
        kinds: kind of each name.
        weight: a number above 0, or a tensor of shape [] on the device.
        values: tensors of shape [] on one device, by name.
    """
    after = Scalars(scalars.numbers.copy(), scalars.weights.copy(), scalars.groups.copy())
    by_kind: dict[Kind, list[str]] = {}
    for name in values:
        by_kind.setdefault(kinds[name], []).append(name)
    for kind, names in by_kind.items():
        for part in _place(after, kind, tuple(names), values[names[0]].device):
            _add(after, part, _stacked([values[name] for name in part]), weight)
    return after


def add_contribution(scalars: Scalars, kind: Kind, name: str, added: torch.Tensor, weight: torch.Tensor) -> Scalars:
    """Return the states with a contribution on a device added. No wait for the device.

    Args:
        scalars: the states; they stay as they are.
        kind: kind of the metric.
        name: its name.
        added: the contribution, shape [], wide.
        weight: its weight, shape [].
    """
    after = Scalars(scalars.numbers.copy(), scalars.weights.copy(), scalars.groups.copy())
    for part in _place(after, kind, (name,), added.device):
        group = _with_weights(after, part)
        after.groups[part] = Group(
            kind, merged(kind, group.values, added.reshape(1), weight), group.weights + wide(weight).to(added.device)
        )
    return after


def fetched(scalars: Scalars) -> dict[str, tuple[float, float]]:
    """Return value and weight of each name. Waits for each device once."""
    found = {name: (value, scalars.weights[name]) for name, value in scalars.numbers.items()}
    places: dict[torch.device, list[tuple[tuple[str, ...], Group]]] = {}
    for names, group in scalars.groups.items():
        places.setdefault(group.values.device, []).append((names, group))
    for groups in places.values():
        rows = [row for _, group in groups for row in (group.values, group.weights) if row is not None]
        numbers = iter(cast("list[float]", cast(Any, torch.cat(rows)).tolist()))
        for names, group in groups:
            values = [next(numbers) for _ in names]
            weights = [scalars.weights[name] if group.weights is None else next(numbers) for name in names]
            found.update(zip(names, zip(values, weights, strict=True), strict=True))
    return found


def _add(after: Scalars, names: tuple[str, ...], values: torch.Tensor, weight: Weight) -> None:
    group = after.groups[names]
    if not isinstance(weight, torch.Tensor) and group.weights is None:
        for name in names:
            after.weights[name] += weight
        after.groups[names] = Group(group.kind, merged_values(group.kind, group.values, values, weight))
        return
    group = _with_weights(after, names)
    new = wide(weight).to(group.values.device) if isinstance(weight, torch.Tensor) else weight
    after.groups[names] = Group(
        group.kind, merged_values(group.kind, group.values, values, weight), group.weights + new
    )


def _with_weights(after: Scalars, names: tuple[str, ...]) -> Group:
    """Return a group whose weights are on the device, taken from the host if they were there."""
    group = after.groups[names]
    if group.weights is not None:
        return group
    weights = [after.weights.pop(name) for name in names]
    return Group(group.kind, group.values, torch.tensor(weights, dtype=group.values.dtype, device=group.values.device))


def _place(after: Scalars, kind: Kind, names: tuple[str, ...], device: torch.device) -> list[tuple[str, ...]]:
    """Return the groups that hold the names, made of the host's states where they are new.

    Names that come together again in other company stand alone from then on.
    """
    if names in after.groups:
        return [names]
    held = [group for group in after.groups if not set(group).isdisjoint(names)]
    for group in held:
        _take_apart(after, group)
    parts = [(name,) for name in names] if held else [names]
    for part in parts:
        if part not in after.groups:
            states = [after.numbers.pop(name, START[kind]) for name in part]
            dtype = wide(torch.empty((), device=device)).dtype
            after.groups[part] = Group(kind, torch.tensor(states, dtype=dtype, device=device))
            for name in part:
                after.weights.setdefault(name, 0.0)
    return parts


def _take_apart(after: Scalars, names: tuple[str, ...]) -> None:
    if len(names) == 1:
        return
    group = after.groups.pop(names)
    for i, name in enumerate(names):
        weights = None if group.weights is None else group.weights[i : i + 1]
        after.groups[(name,)] = Group(group.kind, group.values[i : i + 1], weights)


def _stacked(values: list[torch.Tensor]) -> torch.Tensor:
    """Copy scalars into one tensor; results of a replayed CUDA graph would be overwritten by the next replay."""
    if len(values) == 1:
        return values[0].detach().reshape(1).clone()
    if any(value.dtype != values[0].dtype for value in values):
        values = [wide(value) for value in values]
    return torch.stack(values)
