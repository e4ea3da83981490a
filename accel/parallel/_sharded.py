# SPDX-License-Identifier: Apache-2.0
"""Models that torch's `fully_shard` or tensor parallelism has spread already: adopted, never wrapped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from accel.context import DistContext
from accel.errors import PrepareError
from accel.tensors import is_dtensor, mesh_of


@runtime_checkable
class Sharded(Protocol):
    """Methods that `fully_shard` adds to a module."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, /) -> None:
        """Set whether the next backward exchanges the gradients of this module and of those below it."""
        ...

    def reshard(self) -> None:
        """Shard this module's parameters again, if they are whole after a forward."""
        ...


def is_sharded(model: nn.Module) -> bool:
    """Return whether somebody has spread the model's parameters over ranks."""
    return any(map(is_dtensor, model.parameters())) or bool(sharded_roots(model))


def sharded_roots(model: nn.Module) -> Sequence[Sharded]:
    """Return the outermost modules that `fully_shard` was called on; none for tensor parallelism alone."""
    # The class is asked first: a protocol's isinstance takes 10 us for a module that does not fit.
    if hasattr(type(model), "set_requires_gradient_sync") and isinstance(model, Sharded):
        return [model]
    return [root for child in model.children() for root in sharded_roots(child)]


def spans_all(ctx: DistContext, model: nn.Module) -> bool:
    """Return whether the gradients of a sharded model are exchanged between all ranks. No communication."""
    return _left_out(ctx, model) is None


def check_sharded(ctx: DistContext, model: nn.Module) -> None:
    """Raise unless the gradients of a sharded model are exchanged between all ranks of the context.

    Parameters that a forward without a backward has left whole, as one for evaluation does, are put apart again.

    Raises:
        PrepareError: a mesh that leaves ranks out, or a trainable parameter that `fully_shard` did not take; named.
    """
    if _left_out(ctx, model) is None:
        return
    for module in model.modules():
        if isinstance(module, Sharded):
            module.reshard()
    if (found := _left_out(ctx, model)) is not None:
        name, ranks = found
        raise PrepareError(
            "the gradient of a parameter would not reach every rank",
            expected=f"a mesh of all {ctx.world_size} ranks",
            got="a plain parameter beside sharded ones" if ranks is None else f"a mesh of {ranks}",
            where=f"rank {ctx.rank}, {name}",
            fix="Call fully_shard on the whole model too, on a mesh of all ranks.",
        )


def _left_out(ctx: DistContext, model: nn.Module) -> tuple[str, int | None] | None:
    """The first parameter whose gradient would not reach every rank, with the size of its mesh, if it has one."""
    with_fsdp = bool(sharded_roots(model))
    for name, parameter in model.named_parameters():
        ranks = _mesh_size(parameter)
        if parameter.requires_grad and ranks != ctx.world_size and (ranks is not None or with_fsdp):
            return name, ranks
    return None


def _mesh_size(parameter: torch.Tensor) -> int | None:
    mesh = mesh_of(parameter)
    return None if mesh is None else mesh.size()
