# SPDX-License-Identifier: Apache-2.0
"""Kinds of metrics, and the arithmetic of each on tensors: a contribution to each, and the sum of two. Pure.

Everything is added in float64, where the device has it. Integers are exact up to 2**53.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch

from accel.devices import wide_dtype

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


def started(kind: Kind, like: torch.Tensor) -> torch.Tensor:
    """Return the state before the first value, of the shape and on the device of a wide tensor."""
    return torch.full_like(like, START[kind])


def contribution(kind: Kind, values: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Return what values add to a metric's state.

    A value of weight 0 may be anything, such as the mean of no tokens, which is nan.

    Args:
        kind: kind of the metric.
        values: any shape, wide.
        weight: a number above 0, or a tensor of shape [].
    """
    if not isinstance(weight, torch.Tensor):
        return values * weight if kind == "mean" else values
    weight = weight.to(values.device, values.dtype)
    if kind == "last":
        return values  # `merged` leaves it out
    kept = torch.where(weight == 0, START[kind], values)
    return kept * weight if kind == "mean" else kept


def contribution_of_rows(kind: Kind, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return what per-sample values add to a metric's state.

    Args:
        kind: kind of the metric.
        values: shape [rows, ...], wide.
        weights: shape [rows]; rows of weight 0 do not count.

    Returns:
        Shape [...].
    """
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
    """Return the state with a contribution added.

    Args:
        kind: kind of the metric.
        state: any shape, wide.
        added: the contribution, same shape.
        weight: the contribution's: a number, or a tensor of shape [].
    """
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
    """Return the state with values added, in as few kernels as give the bits of `contribution` and `merged`.

    Args:
        kind: kind of the metric.
        state: any shape, wide.
        values: same shape, of any real dtype.
        weight: a number above 0, or a tensor of shape [].
    """
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
