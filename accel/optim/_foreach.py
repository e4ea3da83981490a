# SPDX-License-Identifier: Apache-2.0
"""torch's private operations over lists of tensors, which torch.nn.utils and torch.optim use, too.

`torch.nn.utils.get_total_norm` takes twice as long as `norms` for small models, and no public function multiplies a
list by more than 1. A test compares all with plain loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

_torch = cast(Any, torch)
_HALVES = (torch.float16, torch.bfloat16)


def norms(tensors: Sequence[torch.Tensor], norm_type: float = 2.0) -> list[torch.Tensor]:
    """Return the norm of each tensor, of shape []; of 16-bit tensors in float32, for its range."""
    dtypes = {tensor.dtype for tensor in tensors}
    if not dtypes.isdisjoint(_HALVES):
        if any(dtype.is_complex for dtype in dtypes):  # whose norms accept no real dtype
            return [norm for tensor in tensors for norm in norms([tensor], norm_type)]
        wide = torch.float64 if torch.float64 in dtypes else torch.float32
        return list(_torch._foreach_norm(list(tensors), norm_type, dtype=wide))
    return list(_torch._foreach_norm(list(tensors), norm_type))


def mul_(tensors: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply each tensor in place."""
    _torch._foreach_mul_(list(tensors), factor)


def clamp_(tensors: Sequence[torch.Tensor], bound: float) -> None:
    """Clamp every element to [-bound, bound], in place."""
    _torch._foreach_clamp_min_(list(tensors), -bound)
    _torch._foreach_clamp_max_(list(tensors), bound)


def copy_(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, of any dtype."""
    _torch._foreach_copy_(list(targets), list(sources))
