# SPDX-License-Identifier: Apache-2.0
"""Models that torch's `fully_shard` or tensor parallelism has spread already: adopted, never wrapped."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from accel.context import DistContext
from accel.errors import PrepareError


@runtime_checkable
class Sharded(Protocol):
    """What `fully_shard` adds to a module."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, /) -> None:
        """Say whether the next backward exchanges the gradients of this module and of those below it."""
        ...


def is_sharded(model: nn.Module) -> bool:
    """Return whether somebody has spread the model's parameters over ranks: whether one of them is a DTensor."""
    if "torch.distributed.tensor" not in sys.modules:  # its import takes most of a second
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def sharded_roots(model: nn.Module) -> Sequence[Sharded]:
    """Return the outermost modules that `fully_shard` was called on; none for tensor parallelism alone."""
    if isinstance(model, Sharded):
        return [model]
    return [root for child in model.children() for root in sharded_roots(child)]


def check_sharded(ctx: DistContext, model: nn.Module) -> None:
    """Raise unless the gradients of a sharded model are exchanged between all ranks of the context.

    Raises:
        PrepareError: a mesh that leaves ranks out, or a trainable parameter that `fully_shard` did not take; named.
    """
    with_fsdp = bool(sharded_roots(model))
    for name, parameter in model.named_parameters():
        ranks = _mesh_size(parameter)
        if ranks == ctx.world_size or not parameter.requires_grad or (ranks is None and not with_fsdp):
            continue
        raise PrepareError(
            "the gradient of a parameter would not reach every rank",
            expected=f"a mesh of all {ctx.world_size} ranks",
            got="a plain parameter beside sharded ones" if ranks is None else f"a mesh of {ranks}",
            where=f"rank {ctx.rank}, {name}",
            fix="Call fully_shard on the whole model too, on a mesh of all ranks.",
        )


def _mesh_size(parameter: torch.Tensor) -> int | None:
    mesh = getattr(parameter, "device_mesh", None)
    return None if mesh is None else int(mesh.size())
