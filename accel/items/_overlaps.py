# SPDX-License-Identifier: Apache-2.0
"""Live tensors whose elements share memory, as after `expand`: loaded through their memory."""

from __future__ import annotations

from functools import partial

import torch

from accel.items._source import Change


def overlap_change(where: str, live: torch.Tensor, value: torch.Tensor) -> Change | None:
    """Return the change of a live tensor to a value; None if elements with shared memory would differ.

    Args:
        where: name of the tensor.
        live: the tensor.
        value: value of the same shape.
    """
    reach = sum(stride * (size - 1) for stride, size in zip(live.stride(), live.shape, strict=True))
    memory = live.detach().as_strided((reach + 1,), (1,))
    before = memory.clone()
    after = memory.clone()
    value = value.to(memory.device, memory.dtype)
    places = torch.arange(memory.numel(), device=memory.device).as_strided(live.shape, live.stride())
    after[places.reshape(-1)] = value.reshape(-1)
    same = torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (after[places], value)))
    return Change(where, partial(memory.copy_, after), partial(memory.copy_, before)) if same else None
