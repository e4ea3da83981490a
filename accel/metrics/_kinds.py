# SPDX-License-Identifier: Apache-2.0
"""Kinds of metrics, and the arithmetic of each on numbers, tensors and nested containers. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import msgspec
import torch

from accel.devices import wide_dtype
from accel.errors import DataError, TreeError
from accel.errors._checks import check_kind
from accel.tree._walk import leaves, map_leaves, replace_tensors, tensors

Kind = Literal["mean", "sum", "count", "min", "max", "last"]
Weight = float | torch.Tensor

KINDS = get_args(Kind)
START: dict[Kind, float] = {
    "mean": 0.0,
    "sum": 0.0,
    "count": 0.0,
    "min": math.inf,
    "max": -math.inf,
    "last": math.nan,
}
_EXACT_WEIGHT = 2**29  # times a value of at most 24 bits, the product has no rounding in float64


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float64, or float32 on devices that have no float64; without autograd's record."""
    return tensor.detach().to(wide_dtype(tensor.device))


def contribution(kind: Kind, values: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Return the contribution of wide values to a metric's state; a value of weight 0 may be anything, such as nan."""
    if not isinstance(weight, torch.Tensor):
        return values * weight if kind == "mean" else values
    weight = weight.to(values.device, values.dtype)
    if kind == "last":
        return values  # `merged` leaves it out
    kept = torch.where(weight == 0, START[kind], values)
    return kept * weight if kind == "mean" else kept


def contribution_of_rows(kind: Kind, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the contribution, shape [...], of per-sample values, shape [rows, ...]; rows of weight 0 do not count."""
    if not len(weights):
        return values.new_full(values.shape[1:], START[kind])
    each = weights.to(values.device, values.dtype).reshape(-1, *[1] * (values.ndim - 1))
    if kind == "last":
        positions = torch.arange(1, len(weights) + 1, device=values.device)
        newest = torch.where(each.reshape(-1) == 0, 0, positions).argmax()
        return values.index_select(0, newest.reshape(1))[0]
    kept = torch.where(each == 0, START[kind], values)
    if kind == "min":
        return kept.amin(0)
    if kind == "max":
        return kept.amax(0)
    return (kept * each if kind == "mean" else kept).sum(0)


def merged(kind: Kind, state: torch.Tensor, added: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Return the state with a contribution of the same shape added."""
    if kind == "min":
        return torch.minimum(state, added)
    if kind == "max":
        return torch.maximum(state, added)
    if kind == "last":
        if isinstance(weight, torch.Tensor):
            return torch.where(weight.to(state.device) == 0, state, added)
        return added if weight else state
    return state + added


def merged_values(kind: Kind, state: torch.Tensor, values: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Return the state with values added, in as few kernels as give the bits of `contribution` and `merged`."""
    narrow = values.dtype in (torch.float32, torch.bfloat16, torch.float16) and state.dtype == torch.float64
    if kind == "mean" and narrow and isinstance(weight, int) and weight < _EXACT_WEIGHT:
        return torch.add(state, values, alpha=weight)  # one kernel; fused or not, the product is exact
    return merged(kind, state, contribution(kind, wide(values), weight), weight)


def merged_number(kind: Kind, state: float, added: float) -> float:
    """Return the state with a contribution of weight above 0 added, as `merged` does."""
    if kind == "last":
        return added
    if kind in ("min", "max"):
        lower = added < state if kind == "min" else added > state
        return added if lower or added != added else state
    return state + added


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
    """Return containers with their tensors and numbers as wide tensors; other leaves are a `TreeError`."""
    try:
        found = leaves(values)
    except TreeError as error:
        raise TreeError(error.problem, expected=error.expected, got=error.got, where=name, fix=error.fix) from error
    new = iter([_wide_tensor(name, path, leaf) for path, leaf in found])
    return map_leaves(lambda _: next(new), values)


def add_nested(name: str, state: Nested | None, kind: Kind, values: Any, weight: Weight) -> Nested:
    """Return the state with values from `wide_tensors` added; None before the first. No wait for the device.

    Raises `DataError` for values of another structure or shape than before.
    """
    added = [contribution(kind, leaf, weight) for _, leaf in tensors(values)]
    return _merged(name, state, kind, values, weight, added)


def add_nested_rows(name: str, state: Nested | None, kind: Kind, values: Any, weights: torch.Tensor) -> Nested:
    """Return the state with per-sample values added; one of shape [] counts for all rows. No wait for the device.

    Raises `DataError` as `add_nested`, or for a tensor without a row for each weight.
    """
    total = wide(weights).sum()
    added = [sum_of_rows(f"{name}{path[1:]}", leaf, kind, weights, total) for path, leaf in tensors(values)]
    return _merged(name, state, kind, replace_tensors(values, added), total, added)


def sum_of_rows(
    path: str, values: torch.Tensor, kind: Kind, weights: torch.Tensor, total: torch.Tensor
) -> torch.Tensor:
    """Return the contribution of per-sample values, or of one value of shape []; `DataError` for other rows."""
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
) -> Nested:
    """Merge contributions into a state of the same shapes."""
    if state is None:
        old, before = [torch.full_like(leaf, START[kind]) for leaf in added], 0.0
    else:
        old, before = [leaf for _, leaf in tensors(state.values)], state.weight
        _check_same(name, shapes_of(state.values), shapes_of(values))
    if not isinstance(weight, torch.Tensor) and not weight:
        return Nested(replace_tensors(values, old), before)  # shapes are known from then on
    new = [merged(kind, a.to(b.device), b, weight) for a, b in zip(old, added, strict=True)]
    if isinstance(weight, torch.Tensor):
        weight = wide(weight)
        before = before.to(weight.device) if isinstance(before, torch.Tensor) else before
    return Nested(replace_tensors(values, new), before + weight)


def _check_same(name: str, before: Shapes, now: Shapes) -> None:
    if before != now:
        raise DataError(
            "values of another form than before",
            expected=show_shapes(before),
            got=show_shapes(now),
            where=name,
            fix="Add the same containers and shapes each time.",
        )


def show_shapes(shapes: Shapes) -> str:
    """Return paths and shapes of leaves, for an error."""
    return ", ".join(f"{path} {list(shape)}" for path, shape in shapes)


def _wide_tensor(name: str, path: str, leaf: object) -> torch.Tensor:
    where = f"{name}{path[1:]}"
    kinds = torch.Tensor | int | float
    check_kind(leaf, kinds, "only tensors and numbers are added up", where=where, error=TreeError)
    value = torch.as_tensor(leaf)
    if value.is_complex():
        raise TreeError("only real numbers are added up", got=str(value.dtype), where=where)
    return wide(value)
