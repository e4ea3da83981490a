# SPDX-License-Identifier: Apache-2.0
"""torch's operations over lists of tensors, which have no public names; torch.nn.utils and torch.optim use the same.

`torch.nn.utils.get_total_norm` takes twice as long as `norms` for small models, and nothing public multiplies a list by
more than 1. A test compares both with plain loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

_torch = cast(Any, torch)


def norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the L2 norm of each tensor, shape [] each."""
    return list(_torch._foreach_norm(list(tensors)))


def mul_(tensors: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply each tensor in place."""
    _torch._foreach_mul_(list(tensors), factor)
