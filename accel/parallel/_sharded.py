# SPDX-License-Identifier: Apache-2.0
"""Models that torch's `fully_shard` or tensor parallelism has spread already: adopted, never wrapped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from torch import nn

from accel.context import DistContext
from accel.errors import PrepareError
from accel.parallel._unwrap import is_pipelined, stage_modules
from accel.tensors import is_dtensor, mesh_of
from accel.topology import Dimension, dimension_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Ranks along these hold parameters of their own, so gradients of the same parameter never cross them.
MODEL_DIMENSIONS: tuple[Dimension, ...] = ("pipeline", "tensor")


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
    if is_pipelined(model):
        return [root for stage in stage_modules(model) for root in sharded_roots(stage)]
    # The class is asked first: a protocol's isinstance takes 10 us for a module that does not fit.
    if hasattr(type(model), "set_requires_gradient_sync") and isinstance(model, Sharded):
        return [model]
    return [root for child in model.children() for root in sharded_roots(child)]


def spans_all(ctx: DistContext, model: nn.Module) -> bool:
    """Return whether the gradients of a sharded model are exchanged between all ranks. No communication.

    Ranks of other pipeline stages, and those that hold other parts of a tensor-parallel parameter, need not be among
    them.
    """
    return _left_out(ctx, model) is None


def check_sharded(ctx: DistContext, model: nn.Module) -> None:
    """Raise unless the gradients of a sharded model are exchanged between all ranks that hold the same parameters.

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
        needed = len(_replica_ranks(ctx) or range(ctx.world_size))
        same = "" if needed == ctx.world_size else " with the same parameters"
        raise PrepareError(
            "the gradient of a parameter would not reach every rank",
            expected=f"a mesh of all {needed} ranks{same}",
            got="a plain parameter beside sharded ones" if ranks is None else f"a mesh of {ranks}",
            where=f"rank {ctx.rank}, {name}",
            fix="Call fully_shard on the whole model too, on a mesh of all ranks.",
        )


def stage_size(ctx: DistContext) -> int:
    """Return the number of ranks of this rank's pipeline stage; all without a pipeline."""
    stages = (axis.size for name, axis in ctx.position.axes if dimension_of(name) == "pipeline")
    return ctx.world_size // math.prod(stages)


def _left_out(ctx: DistContext, model: nn.Module) -> tuple[str, int | None] | None:
    """The first parameter whose gradient would not reach every rank, with the size of its mesh, if it has one."""
    with_fsdp = bool(sharded_roots(model))
    known: dict[DeviceMesh, bool] = {}
    for name, parameter in model.named_parameters():
        mesh = mesh_of(parameter)
        if mesh is None:
            if with_fsdp and parameter.requires_grad:
                return name, None
        elif parameter.requires_grad and mesh.size() != ctx.world_size:
            if mesh not in known:
                known[mesh] = _holds(mesh, _replica_ranks(ctx))
            if not known[mesh]:
                return name, mesh.size()
    return None


def _holds(mesh: DeviceMesh, ranks: frozenset[int] | None) -> bool:
    return ranks is not None and ranks <= _ranks(cast(Any, mesh).mesh)


def _replica_ranks(ctx: DistContext) -> frozenset[int] | None:
    """The ranks with parameters in common with this one's, on the context's mesh; None for all of the context's."""
    mesh = ctx.mesh
    if mesh is None or mesh.mesh_dim_names is None:
        return None
    here = mesh.get_coordinate()
    assert here is not None  # this rank is on its context's mesh
    own = [dimension_of(name) in MODEL_DIMENSIONS for name in mesh.mesh_dim_names]
    place = tuple(at if apart else slice(None) for at, apart in zip(here, own, strict=True))
    return _ranks(cast(Any, mesh).mesh[place])


def _ranks(grid: Any) -> frozenset[int]:
    return frozenset(grid.flatten().tolist())
