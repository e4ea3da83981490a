# SPDX-License-Identifier: Apache-2.0
"""Tensors of every dtype, shape and memory layout that user code hands to collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from hypothesis import strategies as st
from torch import Tensor

from accel.errors import ConfigError

Layout = Literal["contiguous", "transposed", "strided", "expanded", "conjugated"]

DTYPES = (
    torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.float64, torch.float16, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.complex128,
)  # fmt: skip

_ORDINARY = 7  # 0 to 6 are exact in every dtype, and so are their sums over a few ranks
_VALUES = 9  # of a dtype, at most


class TensorValues(NamedTuple):
    """Values of a tensor: ordinary or special ones, from one of them on."""

    special: bool
    start: int


def tensors(
    *, dtypes: Sequence[torch.dtype] = DTYPES, max_dims: int = 3, max_side: int = 3, special: bool = False
) -> st.SearchStrategy[Tensor]:
    """Generate tensors on the CPU, 0-d, empty, non-contiguous and lazily conjugated ones among them.

    They shrink to a 0-d zero of the first dtype. Elements are small whole numbers, so that sums over ranks are exact
    and two results can be compared with `torch.equal`.

    Args:
        dtypes: to choose from; the first is the simplest.
        max_dims: the most dimensions.
        max_side: the most elements along one dimension.
        special: whether elements may be nan, infinite, -0.0, or the largest and smallest of their dtype.

    Raises:
        ConfigError: no dtypes, or a negative number.
    """
    check_tensors(dtypes, max_dims=max_dims, max_side=max_side)
    return _tensors(st.sampled_from(list(dtypes)), st.lists(st.integers(0, max_side), max_size=max_dims), special)


def contents(*, special: bool) -> st.SearchStrategy[TensorValues]:
    """Generate what a tensor holds; it shrinks to elements from 0 on."""
    return st.builds(TensorValues, st.booleans() if special else st.just(False), st.integers(0, _VALUES - 1))


def layouts() -> st.SearchStrategy[Layout]:
    """Generate ways to lie in memory; the first is the plain one."""
    return st.sampled_from(get_args(Layout))


def build(dtype: torch.dtype, shape: Sequence[int], content: TensorValues, layout: Layout) -> Tensor:
    """Make a tensor whose elements are consecutive values of its dtype."""
    values = _values(dtype, special=content.special)
    elements = [values[(content.start + i) % len(values)] for i in range(math.prod(shape))]
    tensor = torch.tensor(elements, dtype=dtype).reshape(tuple(shape))
    match layout:
        case "transposed" if tensor.ndim > 1:
            return tensor.transpose(0, -1).contiguous().transpose(0, -1)
        case "strided" if tensor.ndim:
            return torch.stack([tensor, tensor], dim=-1)[..., 1]
        case "expanded" if tensor.ndim and tensor.shape[0]:
            return tensor[:1].expand(tensor.shape)
        case "conjugated" if dtype.is_complex:
            return tensor.conj()
        case _:
            return tensor


def check_tensors(dtypes: Sequence[torch.dtype], **numbers: int) -> None:
    """Raise `ConfigError` unless there are dtypes to choose from, and no number is negative."""
    if not dtypes:
        raise ConfigError("no dtype to choose from", expected="one dtype or more", got=repr(dtypes), where="dtypes=")
    for name, number in numbers.items():
        if number < 0:
            raise ConfigError("a negative number", expected="0 or more", got=str(number), where=f"{name}=")


@st.composite  # and not `builds`, so that failing examples show tensors
def _tensors(
    draw: st.DrawFn, dtypes: st.SearchStrategy[torch.dtype], shapes: st.SearchStrategy[list[int]], special: bool
) -> Tensor:
    return build(draw(dtypes), draw(shapes), draw(contents(special=special)), draw(layouts()))


def _values(dtype: torch.dtype, *, special: bool) -> list[complex]:
    """Some values of a dtype: ordinary ones, or those that are easily spoilt."""
    if dtype == torch.bool:
        return [False, True]
    if dtype.is_complex:
        parts = _values(dtype.to_real(), special=special)
        return [complex(real.real, imaginary.real) for real, imaginary in zip(parts, reversed(parts), strict=True)]
    if not special:
        return list(range(_ORDINARY))
    if dtype.is_floating_point:
        limits = torch.finfo(dtype)
        return [math.nan, math.inf, -math.inf, -0.0, limits.max, limits.min, limits.smallest_normal, limits.eps, 1.0]
    limits = torch.iinfo(dtype)
    return [limits.max, limits.min, 0, 1]
