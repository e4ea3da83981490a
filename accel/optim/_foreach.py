# SPDX-License-Identifier: Apache-2.0
"""torch's operations over lists of tensors, which have no public names; torch.nn.utils and torch.optim use the same.

`torch.nn.utils.get_total_norm` takes twice as long as `norms` for small models, and nothing public multiplies a list by
more than 1. A test compares all with plain loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

_torch = cast(Any, torch)
_HALVES = (torch.float16, torch.bfloat16)


def norms(tensors: Sequence[torch.Tensor], norm_type: float = 2.0) -> list[torch.Tensor]:
    """Return the norm of each tensor, shape [] each; that of a 16-bit one in float32, whose range it needs."""
    dtypes = {tensor.dtype for tensor in tensors}
    if not dtypes.isdisjoint(_HALVES):
        if any(dtype.is_complex for dtype in dtypes):  # whose norms cannot be had in a real dtype
            return [norm for tensor in tensors for norm in norms([tensor], norm_type)]
        wide = torch.float64 if torch.float64 in dtypes else torch.float32
        return list(_torch._foreach_norm(list(tensors), norm_type, dtype=wide))
    return list(_torch._foreach_norm(list(tensors), norm_type))


def mul_(tensors: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply each tensor in place."""
    _torch._foreach_mul_(list(tensors), factor)


def clamp_(tensors: Sequence[torch.Tensor], bound: float) -> None:
    """Cut every element to between -bound and bound, in place."""
    _torch._foreach_clamp_min_(list(tensors), -bound)
    _torch._foreach_clamp_max_(list(tensors), bound)
