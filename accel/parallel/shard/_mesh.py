# SPDX-License-Identifier: Apache-2.0
"""The mesh that a model is sharded over: the context's, but for the axes along which ranks hold other parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from torch import nn

from accel.comm import merged_mesh, merged_order, mesh_of_group
from accel.context import DistContext
from accel.errors import DeviceError, PrepareError
from accel.parallel._local_mark import APART, is_local
from accel.parallel.experts import is_expert_parameter
from accel.parallel.shard._axes import shard_axes
from accel.parallel.shard._options import check_reshard
from accel.tensors import is_dtensor
from accel.topology import dimension_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_WHERE = "prepare_model, strategy fsdp"
_WORLD = ((0,),)  # of a mesh of one dimension

Parts = Sequence[Sequence[int]]


def check_mesh(ctx: DistContext, model: nn.Module, reshard: bool | int | None = None) -> None:
    """Raise for a mesh that `fully_shard` cannot take, now or after tensor parallelism. No communication.

    Args:
        ctx: the context.
        model: as it is now.
        reshard: `Plan.reshard_after_forward`.

    Raises:
        ConfigError: as `check_reshard`.
        DeviceError, PrepareError: as `open_shard_mesh`.
    """
    parts = _parts(ctx, model, _taken(model))
    if ctx.mesh is not None and (names := ctx.mesh.mesh_dim_names):
        parts = _parts(ctx, model, [name for name in names if dimension_of(name) == "tensor"])
    sizes = (ctx.world_size,) if ctx.mesh is None else ctx.mesh.shape
    counts = [math.prod(sizes[dim] for dim in part) for part in parts]
    check_reshard(reshard, counts[-1] if counts else 1, math.prod(counts), ctx.world_size)


def open_shard_mesh(ctx: DistContext, model: nn.Module) -> DeviceMesh | None:
    """Return the mesh to shard a model over; None where no rank but this one has the same parameters. A collective.

    It has one dimension for shards, or two: for replicas, and for shards, which is this rank alone under the strategy
    `ddp`.

    Args:
        ctx: the context.
        model: as tensor parallelism has left it.

    Raises:
        DeviceError: the context's mesh is of another kind of device than the context.
        PrepareError: a mesh without an axis to shard along, one whose axes torch cannot combine, or a model that tensor
            parallelism has spread over an unknown mesh or only in part.
    """
    parts = _parts(ctx, model, _taken(model))
    if not parts and any(map(is_expert_parameter, model.parameters())):
        parts = ((),)  # this rank alone: experts are units of a sharded model there too
    if ctx.mesh is None:
        return mesh_of_group(ctx.comm, ctx.device.type, "fsdp")
    return merged_mesh(ctx.comm, ctx.mesh, parts, ctx.timeout_s) if parts else None


def _taken(model: nn.Module) -> set[str]:
    """Names of the axes over which somebody has spread the model."""
    return {name for each in _spread(model) for name in each.device_mesh.mesh_dim_names or ()}


def _spread(model: nn.Module) -> Iterator[DTensor]:
    """Parameters that are spread already, but for those of experts, which have a mesh of their own."""
    return (each for each in model.parameters() if is_dtensor(each) and not is_expert_parameter(each))


def _parts(ctx: DistContext, model: nn.Module, taken: Iterable[str]) -> Parts:
    """Return the axes of the context's mesh, by number, for each dimension of the mesh to shard over.

    Of local SGD these are the axes along which ranks share samples.
    """
    if any(True for _ in _spread(model)):
        _check_tensor_parallel(ctx, model)
    if ctx.mesh is None:
        return _WORLD
    if ctx.mesh.device_type != ctx.device.type:
        raise DeviceError(
            "the mesh is of another kind of device than the context",
            expected=ctx.device.type,
            got=ctx.mesh.device_type,
            where=f"{_WHERE}, mesh=",
        )
    names, sizes = ctx.mesh.mesh_dim_names, ctx.mesh.shape
    apart = [name for name in names or () if is_local(model) and dimension_of(name) in APART]
    replicas, shards = shard_axes(names, sizes, (*taken, *apart), whole=ctx.strategy == "ddp")
    if not replicas and not shards:
        return ()
    parts = (replicas, shards) if replicas else (shards,)
    order = [dim for part in merged_order(len(sizes), parts) for dim in part if sizes[dim] > 1]
    if taken and order != sorted(order):
        listed = [", ".join(names[dim] for dim in part) for part in parts] if names else []
        raise PrepareError(
            "torch cannot combine the axes of this mesh",
            expected="those for replicas, then those for shards, then those for tensor parallelism",
            got=f"({', '.join(names or ())}), to merge {' and '.join(filter(None, listed))}",
            where=_WHERE,
            fix="Make the mesh with its axes in this order, as accel does: accel.replace(ctx, mesh=...) with a text.",
        )
    return parts


def _check_tensor_parallel(ctx: DistContext, model: nn.Module) -> None:
    if ctx.mesh is None:
        raise PrepareError(
            "tensor parallelism has spread the model over some of the ranks, and it is not known over which",
            expected="a context that knows its mesh",
            got="one without",
            where=_WHERE,
            fix="Tell it: accel.replace(ctx, mesh=mesh), with the mesh that parallelize_module got a part of.",
        )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not is_dtensor(parameter):
            raise PrepareError(
                "the gradient of a parameter would not reach every rank",
                expected="tensor parallelism of all trainable parameters, or of none",
                got="one that it left as it was",
                where=f"{_WHERE}, {name}",
                fix="Name its module in the plan of parallelize_module, or freeze it.",
            )
