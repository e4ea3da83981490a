# SPDX-License-Identifier: Apache-2.0
"""Reductions of one tensor of each rank, as `all_reduce` and its kin do them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel.testing._errors import SimulationError


class Reduction(Enum):
    """A way to combine tensors; the value is torch's name of it."""

    SUM = "SUM"
    AVG = "AVG"
    PRODUCT = "PRODUCT"
    MIN = "MIN"
    MAX = "MAX"
    BAND = "BAND"
    BOR = "BOR"
    BXOR = "BXOR"


BITWISE = frozenset({Reduction.BAND, Reduction.BOR, Reduction.BXOR})


def reduction_of(op: Any) -> Reduction:
    """Translate torch's reduce op, a `ReduceOp` or one of its members.

    Raises:
        SimulationError: an unknown op.
    """
    reduction = next((known for known in Reduction if op == getattr(dist.ReduceOp, known.value)), None)
    if reduction is None:
        raise SimulationError("unknown reduce op", expected=", ".join(known.value for known in Reduction), got=repr(op))
    return reduction


def reduce_tensors(reduction: Reduction, tensors: Sequence[Tensor]) -> Tensor:
    """Combine one tensor of each rank, in rank order.

    Args:
        reduction: the operation.
        tensors: all of one shape and dtype.

    Returns:
        A new tensor of that shape and dtype.
    """
    first = tensors[0]
    match reduction:
        case Reduction.SUM:
            return _total(tensors)
        case Reduction.AVG:
            whole = not (first.dtype.is_floating_point or first.dtype.is_complex)
            return torch.div(_total(tensors), len(tensors), rounding_mode="trunc" if whole else None)  # as nccl
        case Reduction.PRODUCT:
            return torch.stack(tuple(tensors)).prod(0).to(first.dtype)
        case Reduction.MIN:
            return torch.stack(tuple(tensors)).amin(0)
        case Reduction.MAX:
            return torch.stack(tuple(tensors)).amax(0)
        case Reduction.BAND:
            return _fold(torch.bitwise_and, tensors)
        case Reduction.BOR:
            return _fold(torch.bitwise_or, tensors)
        case Reduction.BXOR:
            return _fold(torch.bitwise_xor, tensors)


def _total(tensors: Sequence[Tensor]) -> Tensor:
    if tensors[0].is_complex():  # torch adds up all complex dtypes only as pairs
        return torch.view_as_complex(_total([torch.view_as_real(tensor) for tensor in tensors]))
    stacked = torch.stack(tuple(tensors))
    return stacked.any(0) if stacked.dtype == torch.bool else stacked.sum(0, dtype=stacked.dtype)


def _fold(combine: Callable[[Tensor, Tensor], Tensor], tensors: Sequence[Tensor]) -> Tensor:
    return functools.reduce(combine, tensors[1:], tensors[0].clone())
