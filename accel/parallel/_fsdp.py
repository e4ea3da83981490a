# SPDX-License-Identifier: Apache-2.0
"""Fully sharded: each rank keeps its part of every parameter, and torch's `fully_shard` gathers a block at a time.

Zhao et al. 2023, "PyTorch FSDP: experiences on scaling fully sharded data parallel", arXiv:2304.11277;
torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import filterfalse
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from accel.comm import adopt, broadcast_flat, mesh_of_dims, mesh_of_group
from accel.context import DistContext
from accel.errors import ConfigError, DeviceError, PrepareError
from accel.parallel._axes import shard_axes
from accel.parallel._ddp import replica_of
from accel.parallel._labels import label_parameters, replace_parameter
from accel.parallel._replicas import follow_rank_0_
from accel.parallel._sharded import is_sharded, sharded_roots, spans_all
from accel.parallel._spread import Spread, SpreadOptions, compare_models
from accel.parallel._units import plan_units
from accel.parallel._unwrap import unwrap_model
from accel.tensors import is_dtensor, local_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_WHERE = "prepare_model, strategy fsdp"


class ShardOptions(SpreadOptions, frozen=True, kw_only=True):
    """Options of sharding."""

    find_unused_parameters: bool = False
    broadcast_buffers: bool = True

    def check(self) -> None:
        """Raise `ConfigError` for what this torch does not have."""
        if not self.find_unused_parameters:
            return
        from torch.distributed.fsdp import FSDPModule

        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise ConfigError(
                "fully_shard of this torch cannot leave out parameters",
                got=f"torch {torch.__version__}",
                where=f"{_WHERE}, find_unused_parameters=",
                fix="Update torch, or use the strategy ddp.",
            )


def _is_done(ctx: DistContext, model: nn.Module) -> bool:
    """Tensor parallelism over some of the ranks leaves the others to shard over."""
    return replica_of(model) is not None or (
        is_sharded(model) and (bool(sharded_roots(model)) or spans_all(ctx, model))
    )


def _check(ctx: DistContext, model: nn.Module, _options: ShardOptions) -> None:
    if ctx.device.type == "xla":
        raise ConfigError("fully_shard does not know XLA devices", where=_WHERE, fix="Take the strategy ddp.")
    inner = unwrap_model(model)
    _ = plan_units(inner)
    _ = _mesh(ctx, inner)
    if ctx.device.type == "cpu":
        return
    current = torch.get_device_module(ctx.device).current_device()
    if current != ctx.device.index:
        raise DeviceError(
            "fully_shard computes on the current device",
            expected=str(ctx.device),
            got=f"{ctx.device.type}:{current}",
            where=_WHERE,
            fix="Call torch.cuda.set_device(ctx.device) first.",
        )


def _spread(ctx: DistContext, model: nn.Module, options: ShardOptions) -> nn.Module:
    inner = unwrap_model(model)
    before = dict(inner.named_parameters())
    compare_models(ctx, options, before)
    mesh = _mesh(ctx, inner)
    _shard(ctx, inner, mesh)
    for name, after in inner.named_parameters():
        replace_parameter(name, before[name], after)
    label_parameters(inner, needed=not options.find_unused_parameters)
    if options.find_unused_parameters:
        cast(Any, inner).set_reduce_scatter_unused_params(True)
    _reshard_after_evaluation(inner)
    _begin_alike(ctx, mesh, inner.buffers())
    if options.broadcast_buffers and any(True for _ in inner.buffers()):
        _follow_rank_0(ctx, inner)
    return model


def _shard(ctx: DistContext, model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard one unit after another, so that the device needs room for one whole one at a time."""
    from torch.distributed.fsdp import fully_shard  # its import takes most of a second

    waiting = {id(each) for each in model.parameters()}
    for name in plan_units(model):
        unit = model.get_submodule(name)
        unit.to(ctx.device)
        own = [each for each in unit.parameters() if id(each) in waiting]
        _begin_alike(ctx, mesh, own)
        try:
            fully_shard(unit, mesh=mesh)
        except (ValueError, AssertionError, NotImplementedError) as error:
            where = f"{_WHERE}, {name or type(model).__name__}"
            raise PrepareError("torch cannot shard this", got=str(error), where=where) from error
        _gather_outside_of_inference(unit)
        waiting -= {id(each) for each in own}
        for each in own:
            _release(each)


def _mesh(ctx: DistContext, model: nn.Module) -> DeviceMesh:
    """The mesh to shard over: all dimensions of the context's but those that tensor parallelism has taken."""
    spread = [each.device_mesh for each in model.parameters() if is_dtensor(each)]
    taken = {name for mesh in spread for name in mesh.mesh_dim_names or ()}
    if ctx.mesh is None:
        if spread:
            raise PrepareError(
                "tensor parallelism has spread the model over some of the ranks, and it is not known over which",
                expected="a context that knows its mesh",
                got="one without",
                where=_WHERE,
                fix="Tell it: accel.replace(ctx, mesh=mesh), with the mesh that parallelize_module got a part of.",
            )
        return mesh_of_group(ctx.comm, ctx.device.type, "fsdp")
    if ctx.mesh.device_type != ctx.device.type:
        raise DeviceError(
            "the mesh is of another kind of device than the context",
            expected=ctx.device.type,
            got=ctx.mesh.device_type,
            where=f"{_WHERE}, mesh=",
        )
    if spread:
        _check_tensor_parallel(model)
    names = ctx.mesh.mesh_dim_names
    replicas, shards = shard_axes(names, ctx.mesh.shape, tuple(taken))
    if len(shards) > 1 and not replicas and not spread:
        return mesh_of_group(ctx.comm, ctx.device.type, "fsdp")
    dims = (*replicas, *shards)
    if len(replicas) > 1 or len(shards) > 1 or (spread and list(dims) != sorted(dims)):
        raise PrepareError(
            "fully_shard cannot use this mesh",
            expected="one dimension for replicas, then one for shards",
            got=f"replicas along {_named(names, replicas)}, shards along {_named(names, shards)}",
            where=_WHERE,
            fix="Make one dimension of several.",
        )
    return mesh_of_dims(ctx.mesh, dims)


def _named(names: Sequence[str] | None, dims: Sequence[int]) -> str:
    return ", ".join(names[at] for at in dims) if names and dims else "none"


def _check_tensor_parallel(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not is_dtensor(parameter):
            raise PrepareError(
                "the gradient of a parameter would not reach every rank",
                expected="tensor parallelism of all trainable parameters, or of none",
                got="one that it left as it was",
                where=f"{_WHERE}, {name}",
                fix="Name its module in the plan of parallelize_module, or freeze it.",
            )


def _begin_alike(ctx: DistContext, mesh: DeviceMesh, tensors: Iterable[torch.Tensor]) -> None:
    """Give all ranks rank 0's values; of a DTensor, those of the first rank with the same local part."""
    along = [adopt(mesh.get_group(dim), ctx.device) for dim in range(mesh.ndim)]
    for tensor in tensors:
        if is_dtensor(tensor):
            part = local_part(tensor)
            for comm in along:
                broadcast_flat(comm, part, source=0)
        else:
            broadcast_flat(ctx.comm, tensor.detach(), source=0)


def _release(parameter: nn.Parameter) -> None:
    """Free the memory of a parameter that was sharded, though an optimizer may hold it still."""
    if not is_dtensor(parameter):
        parameter.data = parameter.data.new_empty(0)


def _gather_outside_of_inference(unit: nn.Module) -> None:
    """Make whole parameters ordinary tensors, also where the first forward is in torch.inference_mode.

    `fully_shard` makes them once, and training cannot use tensors made in that mode.
    """

    def gather(module: nn.Module, _inputs: Any) -> None:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                cast(Any, module).unshard()

    _ = unit.register_forward_pre_hook(cast(Any, torch.compiler).disable(gather), prepend=True)


def _reshard_after_evaluation(model: nn.Module) -> None:
    """Shard the model again after a forward without backward.

    `fully_shard` would leave the outermost module's parameters whole, and changes of those are lost.
    """

    def reshard(module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        if not torch.is_grad_enabled():
            cast(Any, module).reshard()

    _ = model.register_forward_hook(cast(Any, torch.compiler).disable(reshard))


def _follow_rank_0(ctx: DistContext, model: nn.Module) -> None:
    """Replace buffers by rank 0's before each forward, as DDP does."""

    def follow(module: nn.Module, _inputs: Any) -> None:
        follow_rank_0_(ctx, filterfalse(is_dtensor, module.buffers()))

    _ = model.register_forward_pre_hook(cast(Any, torch.compiler).disable(follow))


SHARD = Spread(dimension="shard", options=ShardOptions, is_done=_is_done, check=_check, spread=_spread, replaces=True)
