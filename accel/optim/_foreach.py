# SPDX-License-Identifier: Apache-2.0
"""torch's operations over lists of tensors, which have no public names; torch.nn.utils and torch.optim use the same.

`torch.nn.utils.get_total_norm` does what `norm` does in twice the time for small models, and nothing public multiplies
a list by more than 1. A test compares both with plain loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

_torch = cast(Any, torch)


def norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norm of all tensors together, shape []; they share a dtype and a device."""
    return _torch.linalg.vector_norm(torch.stack(_torch._foreach_norm(list(tensors))))


def mul_(tensors: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply each tensor in place."""
    _torch._foreach_mul_(list(tensors), factor)
