# SPDX-License-Identifier: Apache-2.0
"""The total norm of gradients, plain or sharded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.utils import get_total_norm

from accel.comm import adopt, all_gather_flat, all_reduce_flat
from accel.optim import _foreach
from accel.tensors import is_dtensor, local_part, split_dims

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_MeshDims = tuple["DeviceMesh", tuple[int, ...]]  # a mesh, and its dimensions along which elements are split


def total_norm(grads: Sequence[torch.Tensor], norm_type: float = 2.0) -> float | torch.Tensor:
    """Return the total norm of gradients; inf or NaN if one of them is not finite. A collective of DTensors' meshes.

    Args:
        grads: plain tensors or DTensors of any placements, of any dtypes and devices.
        norm_type: p of the p-norm, above 0; inf for the largest absolute value.

    Returns:
        A number for gradients on the CPU, where reading does not wait; else a tensor of shape []. Equal on all ranks.
    """
    if not grads:
        return 0.0
    if not any(map(is_dtensor, grads)):
        return _local_norm(grads, norm_type)
    whole: list[torch.Tensor] = []
    spreads: dict[_MeshDims, list[torch.Tensor]] = {}
    for grad in grads:
        if is_dtensor(grad):
            spreads.setdefault((grad.device_mesh, split_dims(grad)), []).append(local_part(grad))
        else:
            whole.append(grad)
    alone = _local_norm(whole, norm_type) if whole else 0.0
    parts = [_spread_norm(spread, locals_, norm_type, alone * 0.0) for spread, locals_ in spreads.items()]
    return _joined([*parts, alone] if whole else parts, norm_type)


def _local_norm(grads: Sequence[torch.Tensor], norm_type: float) -> float | torch.Tensor:
    first = grads[0]
    if norm_type == math.inf:
        grads = [grad for grad in grads if grad.numel()] or [first.new_zeros(1)]
    if all(grad.is_cpu for grad in grads):
        return _combined([norm.item() for norm in _foreach.norms(grads, norm_type)], norm_type)
    if any(grad.dtype != first.dtype or grad.device != first.device for grad in grads):
        return get_total_norm(list(grads), norm_type)
    return get_total_norm(_foreach.norms(grads, norm_type), norm_type)


def _spread_norm(
    spread: _MeshDims, parts: Sequence[torch.Tensor], norm_type: float, alone: float | torch.Tensor
) -> float | torch.Tensor:
    """Return the norm of tensors that are split over the same dimensions of one mesh.

    `alone` is 0, or NaN where a plain gradient of this rank is not finite, which so reaches all ranks.
    """
    mesh, dims = spread
    device = parts[0].device
    mine = torch.as_tensor(_local_norm(parts, norm_type), dtype=torch.float64, device=device).reshape(1)
    power = (mine if norm_type == math.inf else mine**norm_type) + torch.as_tensor(alone).to(device)
    for dim in dims:
        comm = adopt(mesh.get_group(dim), device)
        # a reduction by max need not keep NaN
        largest = norm_type == math.inf
        power = all_gather_flat(comm, power).amax(0) if largest else all_reduce_flat(comm, power, "sum")
    norm = power if norm_type == math.inf else power ** (1 / norm_type)
    return norm.item() if norm.is_cpu else norm.reshape(())


def _joined(norms: Sequence[float | torch.Tensor], norm_type: float) -> float | torch.Tensor:
    """Return the norm of concatenated vectors from the norm of each."""
    tensors = [norm for norm in norms if isinstance(norm, torch.Tensor)]
    if not tensors:
        return _combined([norm for norm in norms if not isinstance(norm, torch.Tensor)], norm_type)
    device = tensors[0].device
    return get_total_norm([torch.as_tensor(norm, dtype=torch.float64, device=device) for norm in norms], norm_type)


def _combined(norms: Sequence[float], norm_type: float) -> float:
    if norm_type == 2.0:
        return math.hypot(*norms)
    if not all(map(math.isfinite, norms)):
        return math.nan if any(map(math.isnan, norms)) else math.inf
    largest = max(norms)
    if norm_type == math.inf or largest == 0.0:
        return largest
    return largest * math.fsum((norm / largest) ** norm_type for norm in norms) ** (1 / norm_type)
