# SPDX-License-Identifier: Apache-2.0
"""Live tensors that nothing can simply be copied into: elements that share memory, memory that may not be written."""

from __future__ import annotations

import torch

from accel.checkpoint import is_sharded, local_part


def unwritable(tensor: torch.Tensor) -> str:
    """Return why a tensor cannot be loaded in place, "" if it can."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "one that was made in inference mode; make the module outside of it, or load within it"
    return "a DTensor whose elements share memory; clone it" if is_sharded(tensor) and overlaps(tensor) else ""


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory, as those of `expand` do. No communication."""
    part, reach = local_part(tensor), 0
    if part.layout != torch.strided or not part.numel():
        return False
    for stride, size in sorted(zip(part.stride(), part.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def memory_under(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory from a tensor's first element to its last, as one dimension. A view."""
    reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.detach().as_strided((reach + 1,), (1,))


def put_under(memory: torch.Tensor, tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Put a value where a tensor has its elements. Mutates the memory.

    Args:
        memory: a copy of what is under the tensor.
        tensor: says where each element is.
        value: of the same shape.

    Returns:
        Whether elements that share memory have one value, bit for bit.
    """
    places = torch.arange(memory.numel(), device=memory.device).as_strided(tensor.shape, tensor.stride())
    memory[places.reshape(-1)] = value.to(memory.dtype).reshape(-1)
    found = memory[places]
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (found, value.to(memory.dtype))))
