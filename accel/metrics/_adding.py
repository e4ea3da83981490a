# SPDX-License-Identifier: Apache-2.0
"""Values that are no plain numbers, added to a record: tensors on devices, per-sample values, containers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from accel.errors import DataError, TreeError
from accel.metrics._groups import Scalars, add_contribution, add_on_device
from accel.metrics._kinds import START, Kind, Weight, contribution, merged_number, wide
from accel.metrics._nested import Nested, add_nested, add_nested_rows, sum_of_rows, wide_tensors
from accel.tensors import is_dtensor


class States(msgspec.Struct, frozen=True, eq=False):
    """The states of a record: of scalars, and of metrics of several numbers by name."""

    scalars: Scalars
    nested: dict[str, Nested]


@torch.no_grad()
def add_others(states: States, kinds: Mapping[str, Kind], weight: Weight, values: Mapping[str, Any]) -> States:
    """Return the states with values added. No wait for a device.

    Args:
        states: the states; they stay as they are.
        kinds: kind of each name.
        weight: a number from 0, a tensor of shape [] on a device, or one for each sample, shape [rows].
        values: tensors, numbers or nested containers of them, by name.

    Raises:
        DataError: values of another form than before, or without a row for each weight.
        TreeError: a container that cannot be taken apart, or a leaf that is no real number.
    """
    if isinstance(weight, torch.Tensor) and weight.ndim:
        for name, value in values.items():
            states = _add_rows(states, name, kinds[name], value, weight)
        return states
    device = weight.device if isinstance(weight, torch.Tensor) else None
    scalars: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        number = _scalar(name, value)
        if number is None or name in states.nested:
            _check_new(states, name)
            nested = add_nested(name, states.nested.get(name), kinds[name], wide_tensors(name, value), weight)
            states = States(states.scalars, states.nested | {name: nested})
            continue
        place = number.device if not number.is_cpu else _device_of(states.scalars, name) or device
        if place is not None:
            scalars[name] = number.to(place)
        elif weight:  # the weight is a number here
            added = contribution(kinds[name], wide(number), weight).item()
            states = States(_with_number(states.scalars, name, kinds[name], added, float(weight)), states.nested)
    if scalars and (isinstance(weight, torch.Tensor) or weight):
        states = States(add_on_device(states.scalars, kinds, weight, scalars), states.nested)
    return states


def _add_rows(states: States, name: str, kind: Kind, value: Any, weights: torch.Tensor) -> States:
    """Return the states with values of single samples added."""
    scalar = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.ndim < 2)
    values = wide_tensors(name, value)
    if not scalar or name in states.nested:
        _check_new(states, name)
        nested = add_nested_rows(name, states.nested.get(name), kind, values, weights)
        return States(states.scalars, states.nested | {name: nested})
    total = wide(weights.to(values.device)).sum()
    added = sum_of_rows(name, values, kind, weights, total)
    place = _device_of(states.scalars, name)
    if added.is_cpu and place is None:
        if weight := total.item():
            return States(_with_number(states.scalars, name, kind, added.item(), weight), states.nested)
        return states
    place = place or added.device
    return States(add_contribution(states.scalars, kind, name, added.to(place), total.to(place)), states.nested)


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


def _with_number(scalars: Scalars, name: str, kind: Kind, added: float, weight: float) -> Scalars:
    numbers = scalars.numbers.copy()
    weights = scalars.weights.copy()
    numbers[name] = merged_number(kind, numbers.get(name, START[kind]), added)
    weights[name] = weights.get(name, 0.0) + weight
    return Scalars(numbers, weights, scalars.groups)


def _device_of(scalars: Scalars, name: str) -> torch.device | None:
    """Return the device that a name's state lies on; None for the host or no state yet."""
    return next((group.values.device for names, group in scalars.groups.items() if name in names), None)


def _check_new(states: States, name: str) -> None:
    """Raise unless a metric of several numbers has been one from the start."""
    if name in states.scalars.numbers or _device_of(states.scalars, name) is not None:
        raise DataError(
            "values of another form than before",
            expected="a number, as before",
            got="a tensor with dimensions, or a container",
            where=name,
            fix="Add the same containers and shapes each time.",
        )
