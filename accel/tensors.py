# SPDX-License-Identifier: Apache-2.0
"""DTensors: whether a tensor is one, and what this rank holds of it. Plain tensors are held whole.

Nothing here imports torch.distributed.tensor, which takes most of a second, before there is a DTensor.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, cast

import torch
from typing_extensions import TypeIs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: object) -> TypeIs[DTensor]:
    """Return whether a tensor is a DTensor. No communication."""
    if type(tensor) is torch.Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)  # another thread may be importing the module
    return kind is not None and isinstance(tensor, kind)


class AbsentWeight(Protocol):
    """A weight that is not in memory: a tensor whose class has `stored`."""

    def stored(self) -> torch.Tensor:
        """Return the values on the host: memory that has them already, a mapped file, or else a copy."""
        ...


def is_absent(tensor: object) -> bool:
    """Return whether a tensor is a weight that is not in memory."""
    return type(tensor) is not torch.Tensor and hasattr(type(tensor), "stored")


def stored_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a weight that is not in memory, on the host; any other tensor as it is."""
    return cast("AbsentWeight", tensor).stored() if is_absent(tensor) else tensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements that this rank holds: the same memory, without autograd's record. No communication."""
    if is_dtensor(tensor):
        with torch.no_grad():  # or the part would be a new tensor, and a step in the graph
            tensor = tensor.to_local()
    return tensor if type(tensor) is torch.Tensor and not tensor.requires_grad else tensor.detach()


def local_parts(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the local part of each tensor; a sequence without DTensors as it is. No communication."""
    return [local_part(each) for each in tensors] if any(map(is_dtensor, tensors)) else tensors


def integers(tensor: torch.Tensor) -> list[int]:
    """Return the elements of an integer tensor of shape [n]. Waits for its device."""
    return cast(Any, tensor).tolist()


def mesh_of(tensor: torch.Tensor) -> DeviceMesh | None:
    """Return the mesh of a DTensor; None of a plain tensor."""
    return tensor.device_mesh if is_dtensor(tensor) else None


def placements_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return the placements of a DTensor, one a dimension of its mesh; none of a plain tensor."""
    return tuple(tensor.placements) if is_dtensor(tensor) else ()


def is_offloaded(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether a DTensor lies on the CPU while its ranks compute on devices of another type."""
    return is_dtensor(tensor) and tensor.device.type == "cpu" and tensor.device_mesh.device_type == device.type


def split_dims(tensor: DTensor) -> tuple[int, ...]:
    """Return the dimensions of the mesh along which ranks hold different elements or summands."""
    mesh = tensor.device_mesh
    split = (at for at, placement in enumerate(tensor.placements) if not placement.is_replicate())
    return tuple(at for at in split if mesh.size(at) > 1)


def is_partial(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Return whether each rank holds a summand, as tensor parallelism leaves some gradients."""
    return is_dtensor(tensor) and any(placement.is_partial() for placement in tensor.placements)


def summed(tensor: DTensor) -> DTensor:
    """Sum the summands that ranks hold; each then has the sum. A collective of the mesh."""
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor.redistribute(placements=placements)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whole and without autograd's record. A collective of the mesh for a DTensor."""
    if not is_dtensor(tensor):
        return tensor.detach()
    spread = cast("DTensor", tensor.detach())
    kind = spread.device_mesh.device_type
    if spread.device.type != kind:  # offloaded, while its ranks communicate through their devices
        spread = cast("DTensor", spread.to(kind))
    return _unstrided(spread).full_tensor()


def _unstrided(tensor: DTensor) -> DTensor:
    """Gather what `fully_shard` cut again after tensor parallelism had cut it.

    These parts lie apart in the whole, so torch gathers them alone in any case, and warns if it has others to gather.
    """
    from torch.distributed.tensor import Replicate

    placements = list(tensor.placements)
    for dim, placement in enumerate(placements):
        if not (placement.is_replicate() or placement.is_shard() or placement.is_partial()):
            placements[dim] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    return tensor


def dtensor_like(part: torch.Tensor, template: DTensor, shape: torch.Size | None = None) -> DTensor:
    """Make a DTensor of local parts, on the mesh and the device of another one. No communication.

    Args:
        part: the elements that this rank holds.
        template: gives mesh, device and placements.
        shape: of the whole; None for a part that is the whole, alike on every rank.
    """
    from torch.distributed.tensor import DTensor, Replicate

    mesh = template.device_mesh
    placements = [Replicate()] * mesh.ndim if shape is None else template.placements
    shape = part.shape if shape is None else shape
    stride = torch.empty(shape, device="meta").stride()
    part = part.to(local_part(template).device)
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
