# SPDX-License-Identifier: Apache-2.0
"""Metrics of more than one number: tensors of any shape, alone or in nested containers; and per-sample values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from accel.errors import DataError, TreeError
from accel.metrics._kinds import (
    Kind,
    Weight,
    contribution,
    contribution_of_rows,
    merged,
    started,
    wide,
)
from accel.tree import leaves, map_leaves, replace_tensors, tensors

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class Nested(msgspec.Struct, frozen=True, eq=False):
    """The state of one metric of several numbers.

    Attributes:
        values: nested containers of tensors, float64.
        weight: a number, or a tensor of shape [].
    """

    values: Any
    weight: Any = 0.0


def shapes_of(values: object) -> Shapes:
    """Return the paths and shapes of the tensors in a state."""
    return tuple([(path, tuple(leaf.shape)) for path, leaf in tensors(values)])


def wide_tensors(name: str, values: object) -> Any:
    """Return containers with their tensors and numbers as wide tensors.

    Raises:
        TreeError: a container that cannot be taken apart, or a leaf that is no real number.
    """
    try:
        found = leaves(values)
    except TreeError as error:
        raise TreeError(error.problem, expected=error.expected, got=error.got, where=name, fix=error.fix) from error
    new = iter([_wide_tensor(name, path, leaf) for path, leaf in found])
    return map_leaves(lambda _: next(new), values)


def add_nested(name: str, state: Nested | None, kind: Kind, values: Any, weight: Weight) -> Nested:
    """Return the state with values added. No wait for the device.

    Args:
        name: name of the metric, for errors.
        state: None before the first values.
        kind: kind of the metric.
        values: from `wide_tensors`, the same containers and shapes at every call.
        weight: a number from 0, or a tensor of shape [].

    Raises:
        DataError: values of another structure or shape than before.
    """
    return _merged(name, state, kind, values, weight, [leaf for _, leaf in tensors(values)], ready=False)


def add_nested_rows(name: str, state: Nested | None, kind: Kind, values: Any, weights: torch.Tensor) -> Nested:
    """Return the state with per-sample values added. No wait for the device.

    Args:
        name: name of the metric, for errors.
        state: None before the first values.
        kind: kind of the metric.
        values: from `wide_tensors`, tensors of shape [rows, ...]; those of shape [] are one value for all rows.
        weights: shape [rows].

    Raises:
        DataError: as `add_nested`, or a tensor without a row for each weight.
    """
    total = wide(weights).sum()
    added = [sum_of_rows(f"{name}{path[1:]}", leaf, kind, weights, total) for path, leaf in tensors(values)]
    return _merged(name, state, kind, replace_tensors(values, added), total, added, ready=True)


def sum_of_rows(
    path: str, values: torch.Tensor, kind: Kind, weights: torch.Tensor, total: torch.Tensor
) -> torch.Tensor:
    """Return the contribution of per-sample values; of one value of shape [] with the rows' weights together.

    Raises:
        DataError: no row for each weight.
    """
    if values.ndim == 0:
        return contribution(kind, values, total)
    if len(values) != len(weights):
        raise DataError(
            "values that do not fit their weights",
            expected=f"{len(weights)} rows, one for each weight",
            got=f"shape {list(values.shape)}",
            where=path,
            fix="Pass values with one row a sample, or one number as the weight.",
        )
    return contribution_of_rows(kind, values, weights)


def _merged(
    name: str,
    state: Nested | None,
    kind: Kind,
    values: Any,
    weight: Weight,
    added: Sequence[torch.Tensor],
    *,
    ready: bool,
) -> Nested:
    """Merge values, or contributions that are ready, into a state of the same shapes."""
    if state is None:
        old, before = [started(kind, leaf) for leaf in added], 0.0
    else:
        old, before = [leaf for _, leaf in tensors(state.values)], state.weight
        _check_same(name, shapes_of(state.values), shapes_of(values))
    if not isinstance(weight, torch.Tensor) and not weight:
        return Nested(replace_tensors(values, old), before)  # shapes are known from then on
    if not ready:
        added = [contribution(kind, leaf, weight) for leaf in added]
    new = [merged(kind, a.to(b.device), b, weight) for a, b in zip(old, added, strict=True)]
    if isinstance(weight, torch.Tensor):
        weight = wide(weight)
        before = before.to(weight.device) if isinstance(before, torch.Tensor) else before
    return Nested(replace_tensors(values, new), before + weight)


def _check_same(name: str, before: Shapes, now: Shapes) -> None:
    if before != now:
        raise DataError(
            "values of another form than before",
            expected=_shown(before),
            got=_shown(now),
            where=name,
            fix="Add the same containers and shapes each time.",
        )


def _shown(shapes: Shapes) -> str:
    return ", ".join(f"{path} {list(shape)}" for path, shape in shapes)


def _wide_tensor(name: str, path: str, leaf: object) -> torch.Tensor:
    where = f"{name}{path[1:]}"
    if not isinstance(leaf, torch.Tensor | int | float):
        raise TreeError("only tensors and numbers are added up", got=type(leaf).__name__, where=where)
    value = torch.as_tensor(leaf)
    if value.is_complex():
        raise TreeError("only real numbers are added up", got=str(value.dtype), where=where)
    return wide(value)
